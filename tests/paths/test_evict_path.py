"""The evict path: as much as was asked for and no unit more, gone from the resident set, and nothing lost."""

from __future__ import annotations

import errno
import random
from dataclasses import replace

import numpy as np
import pytest

from mzd import native
from mzd.codec.int8 import Int8Codec
from mzd.daemon.config import SwapConfig
from mzd.errors import MzdError
from mzd.memory.arena import Arena
from mzd.policy.residency import UnitState
from tests.paths.faults import PoisonedPages, failing_extents
from tests.paths.harness import CONFIG, RESERVATION_BYTES, open_daemon

NO_FLASH = replace(CONFIG, swap=SwapConfig(storage=False))
GROUP = 32


def some_tokens(count, seed=0):
    return np.random.default_rng(seed).integers(5, 320, count).tolist()


def largest_unit_bytes(daemon):
    units = daemon.units
    return max(
        units.kv_sizes.chunk_bytes, units.head.size_bytes, *(unit.size_bytes for unit in units.weights)
    )


async def resident_set_fall(daemon, evict):
    """(what an eviction says it freed, by how much the resident set fell)."""
    before_bytes = daemon.resident_set_bytes()
    freed_bytes = (await evict())["freed_bytes"]
    return freed_bytes, before_bytes - daemon.resident_set_bytes()


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_evict_frees_what_was_asked_and_less_than_a_unit_more(device, wide_store, tmp_path, codec):
    """Case 027; and over all steps together the resident set falls by 95 % of what they say, at least."""
    rng = random.Random(1)
    async with open_daemon(device, wide_store, tmp_path, codec=codec) as daemon:
        await daemon.generate("c", some_tokens(1500))
        unit_bytes = largest_unit_bytes(daemon)
        freed_in_all = fallen_in_all = 0
        exhausted = False
        while not exhausted:
            asked_bytes = rng.choice((1, unit_bytes // 3, 2 * unit_bytes, 5 * unit_bytes))
            before_bytes = daemon.resident_set_bytes()
            result = await daemon.evict(bytes=asked_bytes)
            freed_in_all += result["freed_bytes"]
            fallen_in_all += before_bytes - daemon.resident_set_bytes()
            exhausted = result["exhausted"]
            assert exhausted or asked_bytes <= result["freed_bytes"] < asked_bytes + unit_bytes
            assert sum(step["bytes"] for step in result["steps"]) == result["freed_bytes"]
            await daemon.settle()
        assert result["resident_bytes"] == 0
    assert freed_in_all > 10 * unit_bytes
    assert fallen_in_all >= 0.95 * freed_in_all


async def test_memory_that_stays_resident_after_a_release_is_noticed(device, wide_store, tmp_path):
    """A planted fault: an arena whose pages never go."""

    def arena(reserve):
        return Arena(reserve, RESERVATION_BYTES, huge_pages=False, pages=PoisonedPages())

    async with open_daemon(device, wide_store, tmp_path, memory=arena) as daemon:
        await daemon.generate("c", some_tokens(1000))
        freed_bytes, fallen_bytes = await resident_set_fall(daemon, daemon.evict)
    assert fallen_bytes < 0.95 * freed_bytes


async def test_evict_goes_backward(device, long_store, tmp_path):
    """Layers leave from the rear, each one's chunks too; a dry run says the same and does nothing."""
    async with open_daemon(device, long_store, tmp_path) as daemon:
        await daemon.generate("c", some_tokens(600))
        planned = await daemon.evict(0.6, dry_run=True)
        resident_bytes = daemon.units.resident_bytes()
        done = await daemon.evict(0.6)
    assert resident_bytes == planned["resident_bytes"] + planned["freed_bytes"]
    assert planned["steps"] == done["steps"]
    assert done["steps"][0]["unit"] == "head"
    layers = [step["layer"] for step in done["steps"] if step["unit"] == "weights"]
    chunks = [(step["layer"], step["chunk"]) for step in done["steps"] if step["unit"] == "kv"]
    assert layers == sorted(layers, reverse=True)
    assert chunks == sorted(chunks, reverse=True)


async def test_the_least_recently_used_context_gives_its_kv_first(device, long_store, tmp_path):
    async with open_daemon(device, long_store, tmp_path) as daemon:
        for name in ("old", "new"):
            await daemon.generate(name, some_tokens(300))
        chunks_bytes = 12 * daemon.units.kv_sizes.chunk_bytes
        await daemon.evict(bytes=daemon.units.head.size_bytes + chunks_bytes)
        assert daemon.states("old") == {"STORED"}
        assert daemon.states("new") == {"RESIDENT"}
        await daemon.evict(1.0, context="old")
        assert daemon.states("new") == {"RESIDENT"}


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_more_contexts_leave_at_once_than_channels_hold(device, fixture_store, tmp_path, codec):
    """Each context's chunks are written by themselves: sixteen batches in one window."""
    async with open_daemon(device, fixture_store, tmp_path, codec=codec) as daemon:
        for i in range(16):
            await daemon.generate(f"c{i}", some_tokens(9, seed=i))
        result = await daemon.evict()
        await daemon.settle()
    assert result["resident_bytes"] == 0


# Content.


def group_errors(before, after):
    """Largest error of each group of 32 elements, over the group's largest magnitude."""
    before, after = (a.reshape(-1, GROUP).astype(np.float32) for a in (before, after))
    scale = np.maximum(np.abs(before).max(axis=1), 1e-6)
    return np.abs(after - before).max(axis=1) / scale


def chunks_content(daemon, context):
    """Copies of a context's resident chunks as FP16, one row a chunk."""
    size_bytes = daemon.units.kv_sizes.chunk_bytes
    leases = daemon.units.caches[context].leases
    rows = np.empty((len(leases), size_bytes // 2), np.float16)
    for row, (_, lease) in zip(rows, sorted(leases.items()), strict=True):
        native.copy(row.ctypes.data, lease.address, size_bytes)
    return rows


async def evicted_and_back(daemon):
    """The content of all chunks before and after one cycle through RAM and flash."""
    before = chunks_content(daemon, "c")
    await daemon.evict()
    await daemon.call("restore", context="c")
    return before, chunks_content(daemon, "c")


@pytest.mark.parametrize("config", [CONFIG, NO_FLASH], ids=["flash", "ram"])
async def test_int8_errs_by_a_code_step_once_and_then_never_again(device, long_store, tmp_path, config):
    """Idempotent: the second cycle changes no bit, whichever way it goes."""
    async with open_daemon(device, long_store, tmp_path, config, codec="int8") as daemon:
        await daemon.generate("c", some_tokens(700))
        before, after = await evicted_and_back(daemon)
        assert (group_errors(before, after) <= 1 / 120).all()
        assert not np.array_equal(before, after)
        again, last = await evicted_and_back(daemon)
        assert np.array_equal(after.view(np.uint16), again.view(np.uint16))
        assert np.array_equal(again.view(np.uint16), last.view(np.uint16))
        await daemon.settle()


async def test_scales_of_the_group_beside_are_noticed(device, long_store, tmp_path, monkeypatch):
    """A planted fault: int8 decodes each group with its neighbour's scale."""
    decode = Int8Codec.decode_batch

    def decode_shifted(codec, payloads, addresses, chunk_bytes):
        num_groups = chunk_bytes // 2 // GROUP
        for payload in payloads:
            scales = np.empty(num_groups, np.uint16)
            native.copy(scales.ctypes.data, int(payload), scales.nbytes)
            shifted = np.roll(scales, 1)
            native.copy(int(payload), shifted.ctypes.data, scales.nbytes)
        decode(codec, payloads, addresses, chunk_bytes)

    monkeypatch.setattr(Int8Codec, "decode_batch", decode_shifted)
    async with open_daemon(device, long_store, tmp_path, NO_FLASH, codec="int8") as daemon:
        await daemon.generate("c", some_tokens(300))
        before, after = await evicted_and_back(daemon)
    assert (group_errors(before, after) > 1 / 120).any()


@pytest.mark.parametrize("overlap", ["mz_NO", "mz_AR", "mz_RP", "mz_ARP"])
async def test_every_tensor_comes_back_as_it_was(device, long_store, tmp_path, overlap):
    """Case 033: weights, norms, head and, with the exact codec, every chunk, by their checksums."""
    async with open_daemon(device, long_store, tmp_path, overlap=overlap) as daemon:
        await daemon.generate("c", some_tokens(700))
        weights, chunks = daemon.weight_sums(), daemon.chunk_sums("c")
        await daemon.evict()
        assert not any(unit.lease for unit in daemon.units.weights)
        await daemon.call("restore", context="c")
        assert daemon.weight_sums() == weights
        assert daemon.chunk_sums("c") == chunks
        await daemon.settle()


async def test_nan_goes_to_flash_unchanged(device, long_store, tmp_path):
    """int8 refuses such chunks, whichever way the plan wanted them to go; they are kept as they are."""
    async with open_daemon(device, long_store, tmp_path, codec="int8") as daemon:
        await daemon.generate("c", some_tokens(700))
        cache = daemon.units.caches["c"]
        for (layer, _), lease in cache.leases.items():
            if layer > 0:
                native.fill(lease.address + 4096, 2, 0xFF)
        sums = daemon.chunk_sums("c")
        result = await daemon.evict()
        await daemon.settle()
        assert result["resident_bytes"] == 0
        assert (cache.states[1:] == UnitState.STORED).all()
        await daemon.call("restore", context="c")
        after = daemon.chunk_sums("c")
        assert all(after[place] == total for place, total in sums.items() if place[0] > 0)


# Flash.


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_evicting_again_writes_nothing(device, long_store, tmp_path, codec):
    """Case 042."""
    async with open_daemon(device, long_store, tmp_path, codec=codec) as daemon:
        await daemon.generate("c", some_tokens(700))
        await daemon.evict()
        written = [(await daemon.call("status"))["storage"]["written_bytes"]]
        for _ in range(2):
            await daemon.call("restore", context="c")
            await daemon.evict()
            written.append((await daemon.call("status"))["storage"]["written_bytes"])
            await daemon.settle()
    assert written[0] > 0
    assert written == [written[0]] * 3


async def test_only_the_chunk_that_grew_is_written_again(device, long_store, tmp_path):
    async with open_daemon(device, long_store, tmp_path) as daemon:
        await daemon.generate("c", some_tokens(700))
        await daemon.evict()
        before_bytes = (await daemon.call("status"))["storage"]["written_bytes"]
        await daemon.generate("c", some_tokens(8))
        await daemon.evict()
        written_bytes = (await daemon.call("status"))["storage"]["written_bytes"] - before_bytes
        await daemon.settle()
        chunk_bytes = daemon.units.kv_sizes.chunk_bytes
    assert 6 * chunk_bytes <= written_bytes < 7 * chunk_bytes


@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
async def test_without_room_on_flash_eviction_goes_on_in_ram(device, long_store, tmp_path, error, after):
    """Nothing is lost; with int8 all that RAM alone allows is freed, and the reason is said."""
    async with open_daemon(device, long_store, tmp_path, codec="int8") as daemon:
        await daemon.generate("c", some_tokens(1000))
        with failing_extents("write_extents", error, after=after):
            result = await daemon.evict()
            await daemon.settle()
        assert ("swap_full" if error == errno.ENOSPC else "internal") in result["warnings"]
        assert result["exhausted"]
        assert result["freed_bytes"] > 0
        assert daemon.states("c") <= {"COMPRESSED", "STORED", "STORED_COMPRESSED"}
        assert daemon.units.resident_bytes() == 0
        result = await daemon.generate("c", [7], 1)
        assert result["usage"]["reused_tokens"] == 1000
        await daemon.settle()


async def test_without_flash_and_without_a_codec_kv_stays(device, long_store, tmp_path):
    """Case 043: nothing is dropped that is nowhere else."""
    async with open_daemon(device, long_store, tmp_path, NO_FLASH) as daemon:
        await daemon.generate("c", some_tokens(300))
        result = await daemon.evict()
        await daemon.settle()
        assert result["exhausted"]
        assert result["warnings"] == ["swap_full"]
        assert daemon.states("c") == {"RESIDENT"}
        assert daemon.units.weights_bytes == daemon.units.head_bytes == 0


async def test_evicting_nothing_is_nothing(device, long_store, tmp_path):
    """Case 030: no context, no unit, no bytes; an unknown context is an error that touches none."""
    async with open_daemon(device, long_store, tmp_path) as daemon:
        for _ in range(2):
            result = await daemon.evict()
            assert (result["freed_bytes"], result["exhausted"], result["steps"]) == (0, True, [])
        await daemon.generate("c", some_tokens(100))
        result = await daemon.evict(bytes=0)
        assert (result["freed_bytes"], result["exhausted"]) == (0, False)
        for method in ("restore", "evict", "drop"):
            extra = {"bytes": 1} if method == "evict" else {}
            with pytest.raises(MzdError) as raised:
                await daemon.call(method, context="nobody", **extra)
            assert raised.value.code == "unknown_context"
        assert daemon.states("c") == {"RESIDENT"}
        await daemon.settle()
