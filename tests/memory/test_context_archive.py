"""The archive: what an earlier run left is found again, and never taken for what it is not."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from mzd.errors import MzdError
from mzd.formats.prefix_hash import prefix_hashes
from mzd.memory.context_archive import RECORD_TOKENS, ContextArchive
from mzd.memory.context_directory import ContextDirectory
from mzd.memory.storage_swap import StorageSwap
from mzd.memory.swap_file import NewChunk
from mzd.memory.token_log import TokenLog
from mzd.memory.unit_table import chunks_of
from mzd.memory.workers import Workers
from mzd.policy.residency import UnitState
from mzd.policy.snapshot import CopyKind
from mzd.policy.units import CHUNK_TOKENS, KvUnit

MODEL, OTHER = "a" * 64, "b" * 64
LAYERS = 2
SLOT = mmap.PAGESIZE


class Disk:
    """One state directory; `start` opens it as a daemon would, the last one being gone."""

    def __init__(self, path):
        self._path = path
        self._contexts = None

    def start(self, model_id=MODEL, codec=("int8", 1)):
        self.stop()
        self._contexts = ContextDirectory(self._path)
        self.swap = StorageSwap(self._contexts, model_id=model_id, quota_bytes=1 << 30)
        return ContextArchive(
            self._contexts,
            self.swap,
            Workers("archive", 1),
            model_id=model_id,
            codec_name=codec[0],
            codec_version=codec[1],
        )

    def stop(self):
        if self._contexts is not None:
            self._contexts.close()
            self._contexts = None

    def store(self, context, tokens, places, codec=("none", 1)):
        """Let the swap's journal say that these (layer, chunk) are stored for just these tokens."""
        hashes = prefix_hashes(np.asarray(tokens, np.uint32), chunk_tokens=CHUNK_TOKENS)
        for layer, chunk in places:
            num_tokens = min(CHUNK_TOKENS, len(tokens) - chunk * CHUNK_TOKENS)
            unit = KvUnit(context, layer, chunk)
            new = NewChunk(unit, num_tokens, hashes[chunk], codec[0], codec[1], SLOT, SLOT)
            self.swap.commit([(self.swap.allocate([new])[0], 0)])


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "contexts")
    yield disk
    disk.stop()


def all_places(num_tokens):
    return [(layer, chunk) for layer in range(LAYERS) for chunk in range(chunks_of(num_tokens))]


def the_one(found):
    assert len(found) == 1
    return found[0]


async def test_tokens_and_chunks_come_back(disk):
    tokens = list(range(600))
    archive = disk.start()
    await archive.keep_tokens("c", tokens)
    disk.store("c", tokens, all_places(600))
    found = the_one(disk.start().revive(LAYERS))
    assert found.name == "c"
    assert found.tokens.tolist() == tokens
    assert found.cache.tokens.tolist() == tokens
    assert (found.cache.states == UnitState.STORED).all()
    assert (found.cache.copies == CopyKind.STORED).all()


async def test_payloads_of_our_codec_count_and_others_do_not(disk):
    tokens = list(range(600))
    for version, intact in ((1, 600), (2, 256)):
        archive = disk.start()
        await archive.keep_tokens("c", tokens)
        disk.store("c", tokens, all_places(256))
        disk.store(
            "c", tokens, [(layer, chunk) for layer, chunk in all_places(600) if chunk], ("int8", version)
        )
        found = the_one(disk.start().revive(LAYERS))
        assert len(found.cache.tokens) == intact
        assert len(found.tokens) == 600
        if version == 1:
            assert (found.cache.states[:, 1:] == UnitState.STORED_COMPRESSED).all()


@pytest.mark.parametrize("missing", [(0, 0), (1, 1), (1, 2)])
async def test_tokens_count_as_far_as_every_layer_has_their_chunk(disk, missing):
    tokens = list(range(600))
    archive = disk.start()
    await archive.keep_tokens("c", tokens)
    disk.store("c", tokens, [place for place in all_places(600) if place != missing])
    found = the_one(disk.start().revive(LAYERS))
    assert len(found.cache.tokens) == 256 * missing[1]
    assert found.cache.num_chunks == missing[1]


async def test_a_chunk_of_other_tokens_does_not_count(disk):
    """The context was cut and went on otherwise, and its new chunks were never written."""
    old, new = list(range(600)), [*range(300), *range(900, 1200)]
    archive = disk.start()
    await archive.keep_tokens("c", old)
    disk.store("c", old, all_places(600))
    await archive.keep_tokens("c", new)
    found = the_one(disk.start().revive(LAYERS))
    assert found.tokens.tolist() == new
    assert len(found.cache.tokens) == 256


@pytest.mark.parametrize("stored", [512, 600])
async def test_tokens_said_after_the_last_eviction_are_computed_again(disk, stored):
    """All ids are there, and the KV of those that were stored, the unfinished chunk included."""
    tokens = list(range(700))
    archive = disk.start()
    await archive.keep_tokens("c", tokens[:stored])
    disk.store("c", tokens[:stored], all_places(stored))
    await archive.keep_tokens("c", tokens)
    found = the_one(disk.start().revive(LAYERS))
    assert (len(found.tokens), len(found.cache.tokens)) == (700, stored)


async def test_more_layers_or_chunks_than_there_are_are_passed_over(disk):
    tokens = list(range(600))
    archive = disk.start()
    await archive.keep_tokens("c", tokens[:100])
    disk.store("c", tokens, [(0, 0), (1, 0), (7, 0), (0, 2)])
    found = the_one(disk.start().revive(LAYERS))
    assert len(found.cache.tokens) == 0  # the first chunk was stored for 256 tokens, and holds 100


async def test_another_models_context_is_stale_until_it_is_dropped(disk):
    archive = disk.start(OTHER)
    await archive.keep_tokens("c", [1, 2, 3])
    archive = disk.start(MODEL)
    assert archive.revive(LAYERS) == []
    assert archive.unusable["c"].data["tokens"] == 3
    with pytest.raises(MzdError) as raised:
        archive.check_usable("c")
    assert raised.value.code == "model_changed"
    archive.check_usable("free")
    await archive.forget("c")
    archive.check_usable("c")
    assert disk.start(OTHER).revive(LAYERS) == []


async def test_a_stale_context_is_kept_for_its_own_model(disk):
    archive = disk.start(OTHER)
    await archive.keep_tokens("c", [1, 2, 3])
    disk.start(MODEL).revive(LAYERS)
    assert the_one(disk.start(OTHER).revive(LAYERS)).tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "second", [[1, 2, 3], [1, 2, 3, 4], [1, 2], [1, 9, 3], [9], [1, 2, 9, 9, 9], [1, 2, 3, 4, 5, 6]]
)
async def test_a_log_becomes_just_the_tokens(disk, second):
    archive = disk.start()
    await archive.keep_tokens("c", [1, 2, 3])
    await archive.keep_tokens("c", second)
    assert the_one(disk.start().revive(LAYERS)).tokens.tolist() == second
    archive = disk.start()
    await archive.keep_tokens("c", [1, 2, 3])
    assert the_one(disk.start().revive(LAYERS)).tokens.tolist() == [1, 2, 3]


async def test_a_log_that_is_up_to_date_is_not_written(disk):
    archive = disk.start()
    await archive.keep_tokens("c", [1, 2, 3])
    size_bytes = (disk._path / "c" / "tokens").stat().st_size
    await archive.keep_tokens("c", [1, 2, 3])
    assert (disk._path / "c" / "tokens").stat().st_size == size_bytes


async def test_a_log_that_cannot_be_read_is_begun_anew(disk):
    archive = disk.start()
    await archive.keep_tokens("c", [1, 2, 3])
    (disk._path / "c" / "tokens").write_bytes(b"no log at all")
    archive = disk.start()
    assert [found for found in archive.revive(LAYERS) if found.name == "c" and len(found.tokens)] == []
    await archive.keep_tokens("c", [4, 5])
    assert the_one(disk.start().revive(LAYERS)).tokens.tolist() == [4, 5]


async def test_no_space_is_said_and_the_next_time_all_is_added(disk, monkeypatch, caplog):
    archive = disk.start()
    await archive.keep_tokens("c", [1])

    def fail(log, tokens):
        raise MzdError("swap_full", "planted")

    with monkeypatch.context() as patch:
        patch.setattr(TokenLog, "append", fail)
        await archive.keep_tokens("c", [1, 2])
    assert "not on disk" in caplog.text
    await archive.keep_tokens("c", [1, 2, 3])
    assert the_one(disk.start().revive(LAYERS)).tokens.tolist() == [1, 2, 3]


async def test_damage_to_the_log_costs_what_follows_and_is_told(disk, caplog):
    archive = disk.start()
    await archive.keep_tokens("c", list(range(3 * RECORD_TOKENS)))
    log = disk._path / "c" / "tokens"
    content = bytearray(log.read_bytes())
    content[-8] ^= 1
    log.write_bytes(content)
    assert len(the_one(disk.start().revive(LAYERS)).tokens) == 2 * RECORD_TOKENS


async def test_a_chunk_whose_data_file_is_gone_is_not_stored_whatever_the_journal_says(disk):
    archive = disk.start()
    tokens = list(range(300))
    await archive.keep_tokens("c", tokens)
    disk.store("c", tokens, all_places(300))
    disk.stop()
    (disk._path / "c" / "swap").unlink()
    found = the_one(disk.start().revive(LAYERS))
    assert found.tokens.tolist() == tokens
    assert len(found.cache.tokens) == 0
    assert found.cache.num_chunks == 0


async def test_chunks_without_tokens_are_kept_and_say_corrupt_chunk(disk):
    archive = disk.start()
    await archive.keep_tokens("c", [1, 2, 3])
    disk.store("c", [1, 2, 3], all_places(3))
    disk.stop()
    (disk._path / "c" / "tokens").unlink()
    archive = disk.start()
    assert archive.revive(LAYERS) == []
    with pytest.raises(MzdError) as raised:
        archive.check_usable("c")
    assert raised.value.code == "corrupt_chunk"


async def test_the_time_of_the_last_tokens_is_found(disk, tmp_path):
    await disk.start().keep_tokens("c", [1, 2, 3])
    (log,) = tmp_path.rglob("tokens")
    os.utime(log, (1000.0, 1000.0))
    assert the_one(disk.start().revive(LAYERS)).written_s == 1000.0
