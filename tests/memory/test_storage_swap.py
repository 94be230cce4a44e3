"""The storage swap on real files: content and place are checked, and no crash or full disk confuses it."""

import ctypes
import errno
import gc
import mmap
import os
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mzd import native
from mzd.errors import MzdError
from mzd.formats.swap_record import RECORD_BYTES, encode_record
from mzd.memory import context_directory
from mzd.memory.context_directory import SWAP_DATA, SWAP_JOURNAL, TOKEN_LOG, ContextDirectory
from mzd.memory.context_listing import list_contexts
from mzd.memory.storage_swap import StorageSwap
from mzd.memory.swap_file import NewChunk
from mzd.memory.token_log import TokenLog
from mzd.policy.units import KvUnit

PAGE = 4096
SLOT = 3 * PAGE
MODEL, OTHER_MODEL = "11" * 32, "22" * 32
QUOTA = 64 * SLOT


class Buffer:
    """Page-aligned memory that a test reads and writes through."""

    def __init__(self, size_bytes=SLOT):
        self._memory = mmap.mmap(-1, size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.size_bytes = size_bytes

    def put(self, content):
        self._memory[: self.size_bytes] = content.ljust(self.size_bytes, b"\0")

    def get(self, size_bytes):
        return self._memory[:size_bytes]


BUFFER = Buffer()


def unit(chunk=0, layer=0, context="chat"):
    return KvUnit(context, layer, chunk)


def payload_for(seed, size_bytes=SLOT - 100):
    return random.Random(seed).randbytes(size_bytes)


def new_chunk(of, payload_bytes=SLOT - 100, tokens_hash=b"t" * 16, codec="int8"):
    return NewChunk(of, 256, tokens_hash, codec, 1, payload_bytes, SLOT)


def transfer(move, place):
    (result,) = move(
        place.fd,
        np.array([place.offset_bytes], np.uint64),
        np.array([BUFFER.address], np.uint64),
        np.array([place.size_bytes], np.uint64),
    )
    return result


def write_content(write, payload):
    BUFFER.put(payload)
    assert transfer(native.write_extents, write) == 0
    return write.checksum(BUFFER.address)


def store(swap, of, payload, **fields):
    (write,) = swap.allocate([new_chunk(of, len(payload), **fields)])
    swap.commit([(write, write_content(write, payload))])
    return write


def load(swap, of):
    """The payload of a chunk: None if it is not stored, False if it fails its check."""
    stored = swap.locate(of)
    if stored is None:
        return None
    if transfer(native.read_extents, stored) != 0 or not stored.is_intact(BUFFER.address):
        return False
    return BUFFER.get(stored.payload_bytes)


class State:
    """A state directory; `crash` opens it anew as after SIGKILL: nothing is flushed, closed or said."""

    def __init__(self, path):
        self.path = path
        self.contexts = ContextDirectory(path)

    def open(self, model_id=MODEL, quota_bytes=QUOTA):
        return StorageSwap(self.contexts, model_id=model_id, quota_bytes=quota_bytes)

    def crash(self, **options):
        self.contexts.close()
        self.contexts = ContextDirectory(self.path)
        return self.open(**options)

    def file(self, name, context="chat"):
        return self.path / context / name


@pytest.fixture
def state(tmp_path):
    made = State(tmp_path / "contexts")
    yield made
    made.contexts.close()


@pytest.fixture
def swap(state):
    return state.open()


def test_a_chunk_comes_back_as_it_was(state, swap):
    store(swap, unit(3), payload_for(3))
    assert load(swap, unit(3)) == payload_for(3)
    assert load(swap, unit(4)) is None
    assert load(swap, unit(3, context="other")) is None
    stored = swap.locate(unit(3))
    assert (stored.record.num_tokens, stored.record.codec_name, stored.unit) == (256, "int8", unit(3))
    assert stored.offset_bytes % PAGE == 0 == stored.size_bytes % PAGE


def test_stored_chunks_survive_sigkill(state, swap):
    for chunk in range(5):
        store(swap, unit(chunk, layer=chunk % 2), payload_for(chunk))
    swap = state.crash()
    for chunk in range(5):
        assert load(swap, unit(chunk, layer=chunk % 2)) == payload_for(chunk)
    order = [(stored.unit.layer, stored.unit.chunk) for stored in swap.stored_chunks("chat")]
    assert order == [(0, 0), (0, 2), (0, 4), (1, 1), (1, 3)]


def test_a_slot_without_a_record_does_not_count(state, swap):
    (write,) = swap.allocate([new_chunk(unit())])
    write_content(write, payload_for(0))
    assert swap.locate(unit()) is None
    swap = state.crash()
    assert swap.locate(unit()) is None
    assert swap.statistics().swap_bytes == 0


def test_an_unchanged_chunk_is_written_once(swap):
    store(swap, unit(), payload_for(0), tokens_hash=b"a" * 16)
    written = swap.statistics().written_bytes
    assert written == SLOT + RECORD_BYTES
    assert swap.has_clean_copy(unit(), b"a" * 16)
    assert not swap.has_clean_copy(unit(), b"b" * 16)
    assert not swap.has_clean_copy(unit(1), b"a" * 16)
    assert swap.statistics().written_bytes == written


def test_a_clean_copy_of_another_model_is_none(state, swap):
    store(swap, unit(), payload_for(0), tokens_hash=b"a" * 16)
    swap = state.crash(model_id=OTHER_MODEL)
    assert not swap.has_clean_copy(unit(), b"a" * 16)
    assert swap.locate(unit()) is None
    assert swap.stored_chunks("chat") == []
    assert swap.statistics().swap_bytes == swap.stored_bytes("chat") == SLOT
    assert load(state.crash(), unit()) == payload_for(0)


@pytest.mark.parametrize("place", [0, 1, PAGE, SLOT - 101])
def test_a_flipped_byte_is_noticed(state, swap, place):
    write = store(swap, unit(), payload_for(0))
    with state.file(SWAP_DATA).open("r+b") as file:
        file.seek(write.offset_bytes + place)
        byte = file.read(1)[0]
        file.seek(write.offset_bytes + place)
        file.write(bytes([byte ^ 0x20]))
        file.flush()
        os.fsync(file.fileno())
    assert load(swap, unit()) is False
    swap.free([unit()])
    assert load(swap, unit()) is None


@pytest.mark.parametrize("length", [0, 1, PAGE, SLOT - 200])
def test_a_short_file_is_noticed(state, swap, length):
    store(swap, unit(), payload_for(0))
    os.truncate(state.file(SWAP_DATA), length)
    assert load(swap, unit()) is False
    assert load(state.crash(), unit()) is False


def test_a_missing_data_file_leaves_nothing_to_locate(state, swap):
    store(swap, unit(), payload_for(0))
    state.file(SWAP_DATA).unlink()
    swap = state.crash()
    assert swap.locate(unit()) is None
    store(swap, unit(), payload_for(1))
    assert load(swap, unit()) == payload_for(1)


def test_good_content_at_the_wrong_place_is_noticed(state, swap):
    writes = [store(swap, unit(chunk), payload_for(chunk)) for chunk in range(2)]
    data = bytearray(state.file(SWAP_DATA).read_bytes())
    first, second = (slice(write.offset_bytes, write.offset_bytes + SLOT) for write in writes)
    data[first], data[second] = data[second], data[first]
    state.file(SWAP_DATA).write_bytes(data)
    assert load(swap, unit(0)) is False
    assert load(swap, unit(1)) is False


def test_a_checksum_tells_places_apart_whatever_the_content(swap):
    chunks = [unit(), unit(1), unit(0, layer=1), unit(context="other")]
    writes = swap.allocate([new_chunk(of) for of in chunks] + [new_chunk(unit(), codec="none")])
    BUFFER.put(payload_for(0))
    assert len({write.checksum(BUFFER.address) for write in writes}) == 5


def test_of_two_records_for_one_place_the_newer_is_right(state, swap):
    for chunk in range(2):
        store(swap, unit(chunk), payload_for(chunk))
    older, newer = (stored.record for stored in swap.stored_chunks("chat"))
    forged = replace(newer, offset_bytes=older.offset_bytes, chunk=2, layer=1, generation=9)
    forged = replace(forged, slot_bytes=PAGE, offset_bytes=older.offset_bytes + 2 * PAGE, payload_bytes=PAGE)
    with state.file(SWAP_JOURNAL).open("ab") as journal:
        journal.write(encode_record(forged, context="chat"))
    swap = state.crash()
    assert [stored.record for stored in swap.stored_chunks("chat")] == [forged]
    assert swap.statistics().swap_bytes == PAGE


def test_files_of_another_context_in_its_place_are_not_believed(state, swap):
    for context in ("chat", "other"):
        store(swap, unit(context=context), payload_for(context))
    for name in (SWAP_DATA, SWAP_JOURNAL):
        state.file(name).write_bytes(state.file(name, "other").read_bytes())
    swap = state.crash()
    assert load(swap, unit()) is None
    assert "not of context chat" in swap.problems["chat"]
    assert load(swap, unit(context="other")) == payload_for("other")


def test_a_journal_torn_at_every_byte_keeps_every_whole_record(state, swap):
    for chunk in range(3):
        store(swap, unit(chunk), payload_for(chunk))
    content = state.file(SWAP_JOURNAL).read_bytes()
    assert len(content) == 4 * RECORD_BYTES
    for length in range(len(content), -1, -1):
        state.file(SWAP_JOURNAL).write_bytes(content[:length])
        swap = state.crash()
        whole = max(0, length // RECORD_BYTES - 1)
        assert [stored.unit.chunk for stored in swap.stored_chunks("chat")] == list(range(whole))
        assert swap.statistics().swap_bytes == whole * SLOT
        assert swap.problems == {}


def test_after_a_torn_tail_new_records_count(state, swap):
    store(swap, unit(0), payload_for(0))
    store(swap, unit(1), payload_for(1))
    os.truncate(state.file(SWAP_JOURNAL), 3 * RECORD_BYTES - 5)
    swap = state.crash()
    store(swap, unit(2), payload_for(2))
    swap = state.crash()
    assert [load(swap, unit(chunk)) for chunk in range(3)] == [payload_for(0), None, payload_for(2)]


def test_a_damaged_record_costs_its_chunk_only(state, swap):
    for chunk in range(3):
        store(swap, unit(chunk), payload_for(chunk))
    journal = bytearray(state.file(SWAP_JOURNAL).read_bytes())
    journal[2 * RECORD_BYTES + 20] ^= 1
    state.file(SWAP_JOURNAL).write_bytes(journal)
    swap = state.crash()
    assert [load(swap, unit(chunk)) for chunk in range(3)] == [payload_for(0), None, payload_for(2)]
    assert swap.problems == {"chat": "1 records of the swap journal are damaged"}


def test_a_journal_of_another_version_is_a_problem_and_then_replaced(state, swap):
    for chunk in range(4):
        store(swap, unit(chunk), payload_for(chunk))
    journal = bytearray(state.file(SWAP_JOURNAL).read_bytes())
    journal[8] = 0
    state.file(SWAP_JOURNAL).write_bytes(journal)
    swap = state.crash()
    assert "version 0, this program reads 1" in swap.problems["chat"]
    assert swap.locate(unit()) is None
    store(swap, unit(), payload_for("new"))
    assert load(state.crash(), unit()) == payload_for("new")
    assert state.file(SWAP_DATA).stat().st_blocks < 2 * SLOT // 512


def test_a_freed_chunk_stays_freed_and_its_slot_is_used_again(state, swap):
    first = store(swap, unit(), payload_for(0))
    store(swap, unit(1), payload_for(1))
    swap.free([unit(), unit(7), unit(context="unknown")])
    assert load(swap, unit()) is None
    assert swap.statistics().swap_bytes == SLOT
    swap = state.crash()
    assert load(swap, unit()) is None
    assert store(swap, unit(), payload_for(2)).offset_bytes == first.offset_bytes
    assert load(swap, unit(1)) == payload_for(1)


def test_a_freed_slot_gives_its_blocks_back(state, swap):
    store(swap, unit(), payload_for(0))
    blocks = state.file(SWAP_DATA).stat().st_blocks
    assert blocks >= SLOT // 512
    swap.free([unit()])
    assert state.file(SWAP_DATA).stat().st_blocks <= blocks - SLOT // 512


def test_a_new_copy_is_written_beside_the_one_that_counts(state, swap):
    store(swap, unit(), payload_for("old"), tokens_hash=b"o" * 16)
    (write,) = swap.allocate([new_chunk(unit(), tokens_hash=b"n" * 16)])
    crc = write_content(write, payload_for("new"))
    assert load(state.crash(), unit()) == payload_for("old")
    swap.commit([(write, crc)])
    assert load(swap, unit()) == payload_for("new")
    assert swap.statistics().swap_bytes == SLOT
    swap = state.crash()
    assert load(swap, unit()) == payload_for("new")
    assert swap.has_clean_copy(unit(), b"n" * 16)


def test_consecutive_chunks_of_a_layer_are_one_sequential_read(swap):
    for chunk in reversed(range(8)):
        for layer in (1, 0):
            store(swap, unit(chunk, layer), payload_for(chunk))
    for layer in (0, 1):
        offsets = [stored.offset_bytes for stored in swap.stored_chunks("chat") if stored.unit.layer == layer]
        assert offsets == list(range(offsets[0], offsets[0] + 8 * SLOT, SLOT))


def test_the_quota_covers_all_contexts_and_counts_writes_in_flight(state):
    swap = state.open(quota_bytes=3 * SLOT)
    store(swap, unit(context="a"), payload_for(0))
    pending = swap.allocate([new_chunk(unit(context="b"))])
    with pytest.raises(MzdError) as error:
        swap.allocate([new_chunk(unit(context="c")), new_chunk(unit(1, context="c"))])
    assert error.value.code == "swap_full"
    assert error.value.data["used_bytes"] == 2 * SLOT
    swap.cancel(pending)
    assert len(swap.allocate([new_chunk(unit(context="c")), new_chunk(unit(1, context="c"))])) == 2
    assert swap.statistics().swap_bytes == 3 * SLOT


def test_what_an_earlier_run_left_counts_in_the_quota(state, swap):
    store(swap, unit(), payload_for(0))
    swap = state.crash(quota_bytes=SLOT + PAGE)
    with pytest.raises(MzdError):
        swap.allocate([new_chunk(unit(1))])


def test_a_quota_of_zero_turns_flash_off(state):
    swap = state.open(quota_bytes=0)
    with pytest.raises(MzdError) as error:
        swap.allocate([new_chunk(unit())])
    assert error.value.code == "swap_full"
    assert state.contexts.names() == []


def test_no_space_for_the_content_leaves_the_old_copy_and_no_slot(state, swap):
    store(swap, unit(), payload_for("old"))
    (write,) = swap.allocate([new_chunk(unit())])
    BUFFER.put(payload_for("new"))
    native_fault(1, "enospc")
    try:
        assert transfer(native.write_extents, write) == -errno.ENOSPC
    finally:
        native_fault(0, "none")
    swap.cancel([write])
    assert swap.statistics().swap_bytes == SLOT
    assert load(swap, unit()) == payload_for("old")
    assert load(state.crash(), unit()) == payload_for("old")


def native_fault(every_nth, kind):
    if native.BACKEND != "c":
        pytest.skip("faults are injected by the C extension")
    from mzd import _native

    _native._set_io_fault(every_nth, kind)


@pytest.mark.parametrize("written_before_the_error", [0, 1, RECORD_BYTES, RECORD_BYTES + 1])
def test_no_space_for_the_records_lets_none_of_them_count(state, swap, monkeypatch, written_before_the_error):
    store(swap, unit(), payload_for("old"))
    writes = swap.allocate([new_chunk(unit(chunk)) for chunk in range(2)])
    written = [(write, write_content(write, payload_for("new"))) for write in writes]
    fill_disk(monkeypatch, written_before_the_error)
    with pytest.raises(MzdError) as error:
        swap.commit(written)
    assert error.value.code == "swap_full"
    monkeypatch.undo()
    swap.cancel(writes)
    assert swap.statistics().swap_bytes == SLOT
    assert [load(swap, unit(chunk)) for chunk in range(2)] == [payload_for("old"), None]
    swap = state.crash()
    assert [load(swap, unit(chunk)) for chunk in range(2)] == [payload_for("old"), None]
    store(swap, unit(5), payload_for(5))
    assert load(state.crash(), unit(5)) == payload_for(5)


def fill_disk(monkeypatch, allowed_bytes):
    """Let `os.pwrite` write `allowed_bytes` more and then find no space."""
    real_write, allowed = os.pwrite, [allowed_bytes]

    def almost_full(fd, content, offset):
        count, allowed[0] = allowed[0], 0
        if not count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, bytes(content)[:count], offset)

    monkeypatch.setattr(context_directory.os, "pwrite", almost_full)


def test_no_space_to_free_keeps_the_copy(swap, monkeypatch):
    store(swap, unit(), payload_for(0))
    fill_disk(monkeypatch, 0)
    with pytest.raises(MzdError):
        swap.free([unit()])
    assert load(swap, unit()) == payload_for(0)


def test_a_journal_of_mostly_stale_records_is_written_anew(state, swap, monkeypatch):
    monkeypatch.setattr("mzd.memory.swap_journal._STALE_RECORDS_MAX", 8)
    store(swap, unit(9), payload_for(9))
    for step in range(30):
        store(swap, unit(), payload_for(step))
    assert state.file(SWAP_JOURNAL).stat().st_size <= (2 + 2 + 8 + 1) * RECORD_BYTES
    monkeypatch.undo()
    store(swap, unit(8), payload_for(8))
    swap = state.crash()
    assert load(swap, unit()) == payload_for(29)
    assert load(swap, unit(8)) == payload_for(8)
    assert load(swap, unit(9)) == payload_for(9)
    assert swap.problems == {}


def test_a_journal_that_cannot_be_written_anew_goes_on(state, swap, monkeypatch):
    monkeypatch.setattr("mzd.memory.swap_journal._STALE_RECORDS_MAX", 0)
    store(swap, unit(), payload_for("first"))

    def refuse(*args):
        raise MzdError("swap_full", "no space")

    monkeypatch.setattr(state.contexts, "replace_file", refuse)
    for step in range(5):
        store(swap, unit(), payload_for(step))
    assert load(state.crash(), unit()) == payload_for(4)


def test_dropping_a_context_takes_its_files_and_leaves_the_others(state, swap):
    TokenLog.create(state.contexts, "chat", model_id=MODEL)
    for context in ("chat", "other"):
        store(swap, unit(context=context), payload_for(context))
    assert swap.drop_context("chat") is True
    assert state.contexts.names() == ["other"]
    assert swap.statistics().swap_bytes == SLOT
    assert load(swap, unit()) is None
    assert load(swap, unit(context="other")) == payload_for("other")
    assert swap.drop_context("chat") is False


def test_a_drop_under_a_running_write_and_read_keeps_their_descriptors(swap):
    store(swap, unit(), payload_for(0))
    stored = swap.locate(unit())
    (write,) = swap.allocate([new_chunk(unit(1))])
    swap.drop_context("chat")
    gc.collect()
    crc = write_content(write, payload_for(1))
    assert transfer(native.read_extents, stored) == 0
    assert stored.is_intact(BUFFER.address)
    store(swap, unit(), payload_for("anew"))
    with pytest.raises(MzdError) as error:
        swap.commit([(write, crc)])
    assert error.value.code == "unknown_context"
    swap.cancel([write])
    assert swap.statistics().swap_bytes == SLOT
    assert load(swap, unit()) == payload_for("anew")
    assert swap.locate(unit(1)) is None


def test_a_link_in_place_of_a_swap_file_is_a_problem_and_never_followed(state, swap, tmp_path):
    store(swap, unit(), payload_for(0))
    store(swap, unit(context="other"), payload_for(1))
    target = tmp_path / "precious"
    target.write_bytes(b"keep")
    state.file(SWAP_DATA).unlink()
    state.file(SWAP_DATA).symlink_to(target)
    swap = state.crash()
    assert swap.problems == {"chat": "swap is a symbolic link"}
    with pytest.raises(MzdError):
        swap.allocate([new_chunk(unit())])
    assert load(swap, unit(context="other")) == payload_for(1)
    assert target.read_bytes() == b"keep"


def test_nothing_to_commit_or_cancel_is_nothing(swap):
    swap.commit([])
    swap.cancel([])


def test_a_write_is_finished_once(swap):
    (write,) = swap.allocate([new_chunk(unit())])
    crc = write_content(write, payload_for(0))
    swap.commit([(write, crc)])
    with pytest.raises(MzdError):
        swap.commit([(write, crc)])
    swap.cancel([write])
    assert load(swap, unit()) == payload_for(0)
    assert swap.statistics().swap_bytes == SLOT


def test_writes_of_several_contexts_are_cancelled_together(swap):
    swap.cancel(swap.allocate([new_chunk(unit(context=context)) for context in ("a", "b", "a")]))
    assert swap.statistics().swap_bytes == 0


def test_a_chunk_twice_in_one_commit_is_refused(swap):
    writes = swap.allocate([new_chunk(unit()), new_chunk(unit())])
    with pytest.raises(ValueError, match="twice"):
        swap.commit([(write, 0) for write in writes])


@pytest.mark.parametrize(("payload_bytes", "slot_bytes"), [(0, PAGE), (PAGE + 1, PAGE), (10, PAGE + 1)])
def test_a_payload_that_does_not_fit_its_slot_is_refused(payload_bytes, slot_bytes):
    with pytest.raises(ValueError, match="do not go into"):
        NewChunk(unit(), 1, b"t" * 16, "int8", 1, payload_bytes, slot_bytes)


def test_listing_tells_what_is_there(state, swap):
    TokenLog.create(state.contexts, "chat", model_id=MODEL).append(np.arange(300, dtype=np.uint32))
    store(swap, unit(1), payload_for(1))
    store(swap, unit(0), payload_for(0))
    store(swap, unit(context="no-log"), payload_for(0))
    TokenLog.create(state.contexts, "damaged", model_id=OTHER_MODEL)
    state.file(TOKEN_LOG, "damaged").write_bytes(b"?" * 64)
    state.file(SWAP_JOURNAL, "damaged").write_bytes(b"?" * RECORD_BYTES)
    chat, damaged, no_log = list_contexts(state.contexts)
    assert (chat.name, chat.model_id, len(chat.tokens), chat.problems) == ("chat", MODEL, 300, ())
    assert [record.chunk for record in chat.stored] == [0, 1]
    assert damaged.problems == ("this is no token log", "this is no swap journal")
    assert (damaged.model_id, len(damaged.tokens), damaged.stored) == (None, 0, ())
    assert no_log.problems == ("there is no token log",)
    assert len(no_log.stored) == 1


class SwapMachine(RuleBasedStateMachine):
    """Any history of writes, failures, frees, drops, crashes: a chunk is what was committed last."""

    quota_bytes = 7 * SLOT

    def __init__(self):
        super().__init__()
        self.state = State(self.make_directory())
        self.swap = self.state.open(quota_bytes=self.quota_bytes)
        self.committed = {}
        self.pending = []
        self.next_seed = 0

    def teardown(self):
        self.state.contexts.close()

    units = st.builds(unit, st.integers(0, 3), st.integers(0, 1), st.sampled_from(["a", "b"]))

    @rule(chosen=st.lists(units, min_size=1, max_size=3, unique=True), size=st.integers(1, SLOT))
    def write(self, chosen, size):
        chosen = sorted(chosen, key=lambda of: of.context)
        try:
            writes = self.swap.allocate([new_chunk(of, size) for of in chosen])
        except MzdError:
            assert self.used_bytes() + len(chosen) * pages(size) > self.quota_bytes
            return
        for write in writes:
            self.next_seed += 1
            payload = payload_for(self.next_seed, size)
            self.pending.append((write, write_content(write, payload), payload))

    @precondition(lambda self: self.pending)
    @rule(is_commit=st.booleans(), data=st.data())
    def finish(self, is_commit, data):
        write, crc, payload = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        if is_commit:
            self.swap.commit([(write, crc)])
            self.committed[write.chunk.unit] = payload
        else:
            self.swap.cancel([write])

    @rule(chosen=st.lists(units, max_size=3))
    def free(self, chosen):
        self.swap.free(chosen)
        for of in chosen:
            self.committed.pop(of, None)

    @rule(context=st.sampled_from(["a", "b"]))
    def drop(self, context):
        self.swap.drop_context(context)
        self.committed = {of: payload for of, payload in self.committed.items() if of.context != context}
        self.pending = [entry for entry in self.pending if entry[0].chunk.unit.context != context]

    @rule()
    def crash(self):
        self.swap = self.state.crash(quota_bytes=self.quota_bytes)
        self.pending = []

    def used_bytes(self):
        committed = sum(pages(len(payload)) for payload in self.committed.values())
        return committed + sum(pages(len(payload)) for _, _, payload in self.pending)

    @invariant()
    def chunks_are_what_was_committed(self):
        for context in ("a", "b"):
            for of in (unit(chunk, layer, context) for chunk in range(4) for layer in range(2)):
                assert load(self.swap, of) == self.committed.get(of)

    @invariant()
    def quota_adds_up(self):
        assert self.swap.statistics().swap_bytes == self.used_bytes() <= self.quota_bytes
        assert self.swap.problems == {}


def pages(size_bytes):
    return -(-size_bytes // PAGE) * PAGE


@pytest.fixture
def directories(tmp_path):
    """A function that makes a fresh directory a call."""
    numbers = iter(range(10**6))
    return lambda: tmp_path / str(next(numbers))


def test_any_history(directories):
    SwapMachine.make_directory = staticmethod(directories)
    run_state_machine_as_test(
        SwapMachine, settings=settings(max_examples=40, stateful_step_count=20, deadline=None)
    )
