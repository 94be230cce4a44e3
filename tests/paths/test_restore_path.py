"""The restore path: restoration and prefill overlap at random moments, and nobody sees a unit too early."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from mzd.actors import storage_reader, storage_writer
from mzd.actors.evict_operation import EvictOperation
from mzd.actors.restore_operation import RestoreOperation
from mzd.codec.int8 import Int8Codec
from mzd.device.engine import Engine
from mzd.errors import MzdError
from mzd.messages.restore_path import LayerReady
from mzd.policy.units import KvUnit, WeightUnit
from tests.paths.faults import failing_extents, fresh_chunks_are_zero
from tests.paths.harness import BLOCKED_S, open_daemon, poisoned_arena, slow_workers

ROUNDS = 200
DELAY_S = 0.002
LATE_S = 0.05
"""Long beside a layer's compute, even where a core is shared."""

CONTEXTS = ("a", "b")


class LogitsError(AssertionError):
    """A row of logits holds NaN, or is not the one that it should be."""


def random_tokens(rng, count):
    return [rng.randrange(5, 320) for _ in range(count)]


async def conversation(daemon, rounds, seed):
    """Two contexts of some 300 tokens, then `rounds` times: evict a random share, continue one of them."""
    rng = random.Random(seed)
    for context in CONTEXTS:
        await daemon.generate(context, random_tokens(rng, 280 + rng.randrange(40)), 1)
    for _ in range(rounds):
        await daemon.evict(rng.choice((rng.random(), 1.0)))
        await daemon.generate(rng.choice(CONTEXTS), random_tokens(rng, rng.choice((1, 3, 8))), 2)
        await daemon.settle()
    return daemon.engine.seen


def check_logits(found, expected):
    """Bit for bit the same rows, none with NaN."""
    assert len(found) == len(expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not np.isfinite(one).all():
            raise LogitsError(f"step {i} read a unit that was not resident")
        if not np.array_equal(one, other):
            raise LogitsError(f"the logits of step {i} differ by up to {np.abs(one - other).max()}")


async def sequential(device, store, state, rounds, **config):
    """The logits of the same conversation where nothing overlaps and nothing is late."""
    async with open_daemon(device, store, state, overlap="mz_NO", **config) as daemon:
        return await conversation(daemon, rounds, seed=1)


async def overlapped(device, store, state, rounds, overlap="mz_ARP", **config):
    """The same conversation over poisoned memory, with every thread late by random times."""
    late = slow_workers(seed=rounds, delay_s=DELAY_S)
    with fresh_chunks_are_zero():
        async with open_daemon(
            device, store, state, memory=poisoned_arena, workers=late, overlap=overlap, **config
        ) as daemon:
            return await conversation(daemon, rounds, seed=1)


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_overlap_never_reads_what_is_not_there(device, long_store, tmp_path, codec):
    """Case 037: 100 times by each way back; int8 makes the same errors in both runs."""
    expected = await sequential(device, long_store, tmp_path / "1", ROUNDS // 2, codec=codec)
    found = await overlapped(device, long_store, tmp_path / "2", ROUNDS // 2, codec=codec)
    check_logits(found, expected)


# Planted faults: the checks above would notice.


def announce_when_populated(monkeypatch):
    """A layer is said to be ready when its memory is there, long before its content."""
    read_layer = RestoreOperation._read_layer

    async def announce_and_dispatch(operation, layer):
        await operation._wait_populated(operation._read_path(layer))
        units = [unit for unit in operation._leases if getattr(unit, "layer", None) == layer.layer]
        await operation.ends.readiness.send(early_event(operation, layer.layer, units))
        await trio.sleep(LATE_S)
        await read_layer(operation, layer)

    monkeypatch.setattr(RestoreOperation, "_read_layer", announce_and_dispatch)


def early_event(operation, layer, units):
    """What `_layer_ready` would say if all that is still to come had come."""
    to_come = {unit: operation._leases[unit] for unit in units}
    weights = to_come.get(WeightUnit(layer)) or operation.parts.units.weights[layer].lease
    chunks = [KvUnit(operation.cache.name, layer, chunk) for chunk in range(operation.cache.num_chunks)]
    leases = [to_come.get(unit) or operation.cache.leases[layer, unit.chunk] for unit in chunks]
    table = np.array([lease.address for lease in leases], np.uint64)
    return LayerReady(operation.restore_id, layer, weights.address, table)


def exchange_two_chunks(monkeypatch):
    """Chunks of a layer come back whole, each in another's place."""
    chunk_read = RestoreOperation._chunk_read

    def crossed(operation, layer, chunks):
        read = chunk_read(operation, layer, chunks)
        return replace(read, addresses=read.addresses[::-1].copy())

    monkeypatch.setattr(RestoreOperation, "_chunk_read", crossed)


@pytest.mark.parametrize("plant", [announce_when_populated, exchange_two_chunks])
async def test_a_planted_fault_is_noticed(device, long_store, tmp_path, monkeypatch, plant):
    """By a row of logits, or by the sampler, which refuses NaN."""
    expected = await sequential(device, long_store, tmp_path / "1", 5)
    plant(monkeypatch)
    with pytest.raises((LogitsError, MzdError), match=r"NaN|not resident|differ"):
        check_logits(await overlapped(device, long_store, tmp_path / "2", 5), expected)


async def test_a_chunk_from_a_wrong_slot_is_noticed_by_its_checksum(
    device, long_store, tmp_path, monkeypatch
):
    """Its seed covers the place: content that is whole, and belongs elsewhere, counts as damaged."""
    located = RestoreOperation._located

    def locate_neighbour(operation, unit):
        neighbour = located(operation, replace(unit, chunk=1 - unit.chunk)) if unit.chunk < 2 else None
        stored = located(operation, unit)
        return stored if neighbour is None else replace(stored, record=neighbour.record)

    async with open_daemon(device, long_store, tmp_path) as daemon:
        await daemon.generate("c", random_tokens(random.Random(1), 600))
        monkeypatch.setattr(RestoreOperation, "_located", locate_neighbour)
        await daemon.evict()
        result = await daemon.generate("c", [5, 6, 7], 2)
    assert result["usage"]["recomputed_tokens"] == 600


# Bad luck.


def flip_byte(path, offset_bytes):
    """Change one byte of a file, on the device too: the daemon reads past the page cache."""
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        (byte,) = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


async def answer_before_and_after(daemon, damage, context="c"):
    """What a context says, and what it says when `damage` happened while it was on flash."""
    prompt, question = random_tokens(random.Random(2), 700), [9, 8, 7]
    for name in ("whole", context):
        await daemon.generate(name, prompt)
    expected = await daemon.generate("whole", question, 6)
    await daemon.evict()
    damage()
    result = await daemon.generate(context, question, 6)
    assert result["tokens"] == expected["tokens"]
    await daemon.settle()
    return result["usage"]


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("chunk", [0, 1, 2])
async def test_a_damaged_chunk_is_computed_again(device, long_store, tmp_path, codec, chunk):
    """Its tokens and those behind it, from the ids, and counted; what lies before it is used."""
    async with open_daemon(device, long_store, tmp_path, codec=codec) as daemon:

        def damage():
            stored = daemon.opened.parts.storage.locate(KvUnit("c", 3, chunk))
            flip_byte(daemon.swap_path("c"), stored.offset_bytes + stored.payload_bytes - 1)

        if codec == "int8":  # its errors are not those of tokens computed again: only usage is compared
            await daemon.generate("c", random_tokens(random.Random(2), 700))
            await daemon.evict()
            damage()
            usage = (await daemon.generate("c", [9, 8, 7], 1))["usage"]
            await daemon.settle()
        else:
            usage = await answer_before_and_after(daemon, damage)
    assert usage["reused_tokens"] == 256 * chunk
    assert usage["recomputed_tokens"] == 700 - 256 * chunk
    assert usage["prompt_tokens"] == usage["reused_tokens"] + usage["computed_tokens"] == 703


async def test_a_torn_swap_file_is_computed_again(device, long_store, tmp_path):
    """All of it is gone but its first chunk."""
    async with open_daemon(device, long_store, tmp_path) as daemon:
        usage = await answer_before_and_after(daemon, lambda: os.truncate(daemon.swap_path("c"), 4096))
    assert usage["recomputed_tokens"] == 700


async def test_reads_of_the_swap_that_fail_are_damage(device, long_store, tmp_path):
    """EIO on one chunk of flash, once."""
    async with open_daemon(device, long_store, tmp_path) as daemon:
        with contextlib.ExitStack() as stack:
            fail = failing_extents(
                "read_extents", errno.EIO, wanted=lambda fd: fd != daemon.store_fd, times=1
            )
            usage = await answer_before_and_after(daemon, lambda: stack.enter_context(fail))
    assert usage["recomputed_tokens"] > 0


async def test_weights_that_cannot_be_read_are_an_error_with_a_name(device, long_store, tmp_path):
    """And nothing is lost: when the store can be read again, nothing is computed again."""
    async with open_daemon(device, long_store, tmp_path) as daemon:
        await daemon.generate("c", random_tokens(random.Random(2), 700))
        await daemon.evict()
        with (
            failing_extents("read_extents", errno.EIO, wanted=lambda fd: fd == daemon.store_fd),
            pytest.raises(MzdError) as raised,
        ):
            await daemon.generate("c", [7], 1)
        assert raised.value.code == "weights_unavailable"
        await daemon.settle()
        result = await daemon.generate("c", [7], 1)
        await daemon.settle()
    assert (result["usage"]["reused_tokens"], result["usage"]["recomputed_tokens"]) == (700, 0)


def replace_store(path):
    path.rename(path.with_suffix(".old"))
    shutil.copy(path.with_suffix(".old"), path)


def truncate_store(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_weights(path):
    flip_byte(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "codes"),
    [
        (replace_store, {"model_changed"}),
        (truncate_store, {"weights_unavailable"}),
        (flip_weights, {"weights_unavailable", "model_changed"}),
    ],
)
async def test_a_weight_store_that_changes_meanwhile(device, long_store, tmp_path, damage, codes):
    """Cases 105 and 106: refused by name, never mixed, the daemon alive, the context's KV kept."""
    store = Path(shutil.copy(long_store, tmp_path / "weights.mzw"))
    async with open_daemon(device, store, tmp_path) as daemon:
        await daemon.generate("c", random_tokens(random.Random(2), 300))
        await daemon.evict()
        damage(store)
        for _ in range(2):
            with pytest.raises(MzdError) as raised:
                await daemon.generate("c", [7], 1)
            assert raised.value.code in codes
            await daemon.settle()
        assert (await daemon.call("status"))["state"] == "idle"
        assert len(daemon.units.caches["c"].tokens) == 300


def leaves(error):
    """The exceptions of a group of groups."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]


@pytest.mark.parametrize(
    ("owner", "function"),
    [
        (storage_reader, "_read_and_check"),
        (storage_writer, "_checksum_and_write"),
        (Int8Codec, "decode_batch"),
        (Int8Codec, "encode_release_batch"),
        (Engine, "enqueue_head"),
        (RestoreOperation, "_take"),
        (EvictOperation, "_note"),
    ],
)
async def test_a_bug_in_any_actor_ends_the_daemon(device, long_store, tmp_path, monkeypatch, owner, function):
    """It does not hang, and the bug's own exception is told; others may meet channels that it has closed."""

    def fail(*args):
        raise ZeroDivisionError("planted")

    async def use_all_ways():
        async with open_daemon(device, long_store, tmp_path, codec="int8") as daemon:
            await daemon.generate("c", random_tokens(random.Random(2), 300))
            await daemon.evict(0.3)
            monkeypatch.setattr(owner, function, fail)
            await daemon.evict(1.0)
            await daemon.generate("c", [7], 1)

    with trio.fail_after(BLOCKED_S), pytest.raises((ZeroDivisionError, ExceptionGroup)) as raised:
        await use_all_ways()
    assert any(isinstance(error, ZeroDivisionError) for error in leaves(raised.value))


async def test_a_restore_ahead_of_a_request_leaves_damage_to_the_request(device, long_store, tmp_path):
    """It brings back what is good; the request knows what is left, and computes the rest."""
    async with open_daemon(device, long_store, tmp_path) as daemon:
        await daemon.generate("c", random_tokens(random.Random(2), 700))
        await daemon.evict()
        stored = daemon.opened.parts.storage.locate(KvUnit("c", 3, 1))
        flip_byte(daemon.swap_path("c"), stored.offset_bytes)
        await daemon.call("restore", context="c")
        await daemon.settle()
        assert len(daemon.units.caches["c"].tokens) == 256
        result = await daemon.generate("c", [9, 8, 7], 1)
        assert (result["usage"]["reused_tokens"], result["usage"]["recomputed_tokens"]) == (256, 444)
        await daemon.settle()
