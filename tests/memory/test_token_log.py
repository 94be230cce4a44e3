"""The token log on disk: what was appended is there after a crash at any byte."""

import errno

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mzd.errors import FormatError, MzdError
from mzd.formats.token_record import HEADER_BYTES
from mzd.memory import context_directory
from mzd.memory.context_directory import TOKEN_LOG, ContextDirectory
from mzd.memory.token_log import TokenLog

MODEL = "c3" * 32


@pytest.fixture
def contexts(tmp_path):
    directory = ContextDirectory(tmp_path / "contexts")
    yield directory
    directory.close()


def ids(*values):
    return np.array(values, dtype=np.uint32)


def log_path(contexts):
    return contexts.path / "chat" / TOKEN_LOG


def test_appended_tokens_are_there_after_a_crash(contexts):
    log = TokenLog.create(contexts, "chat", model_id=MODEL)
    log.append(ids(5, 6, 7))
    log.append(ids())
    log.append(ids(2**32 - 1))
    again = TokenLog.open(contexts, "chat")
    assert again.model_id == MODEL
    assert again.tokens().tolist() == log.tokens().tolist() == [5, 6, 7, 2**32 - 1]


def test_forgotten_tokens_stay_forgotten(contexts):
    log = TokenLog.create(contexts, "chat", model_id=MODEL)
    log.append(ids(*range(10)))
    log.truncate(4)
    log.truncate(4)
    log.append(ids(77))
    assert TokenLog.open(contexts, "chat").tokens().tolist() == [0, 1, 2, 3, 77]
    with pytest.raises(ValueError, match="cannot cut 5 tokens to 6"):
        log.truncate(6)


def test_torn_at_every_byte_it_opens_and_goes_on(contexts):
    log = TokenLog.create(contexts, "chat", model_id=MODEL)
    states = [(log.size_bytes, [])]
    for step in (ids(1, 2), ids(3), ids(4, 5, 6)):
        log.append(step)
        states.append((log.size_bytes, log.tokens().tolist()))
    content = log_path(contexts).read_bytes()
    for length in range(HEADER_BYTES, len(content)):
        log_path(contexts).write_bytes(content[:length])
        torn = TokenLog.open(contexts, "chat")
        expected = max(state for state in states if state[0] <= length)[1]
        assert torn.tokens().tolist() == expected
        torn.append(ids(99))
        assert TokenLog.open(contexts, "chat").tokens().tolist() == [*expected, 99]


def test_a_log_without_its_header_is_a_lost_context(contexts):
    TokenLog.create(contexts, "chat", model_id=MODEL)
    log_path(contexts).write_bytes(b"")
    with pytest.raises(FormatError) as error:
        TokenLog.open(contexts, "chat")
    assert error.value.code == "corrupt_chunk"


def test_a_missing_log_is_told_from_a_damaged_one(contexts):
    with pytest.raises(FileNotFoundError):
        TokenLog.open(contexts, "chat")


@pytest.mark.parametrize("written_before_the_error", [0, 1, 13])
def test_a_full_disk_adds_nothing_and_the_next_append_brings_all(
    contexts, monkeypatch, written_before_the_error
):
    log = TokenLog.create(contexts, "chat", model_id=MODEL)
    log.append(ids(1, 2))
    real_write = context_directory.os.pwrite
    allowed = [written_before_the_error]

    def almost_full(fd, content, offset):
        count, allowed[0] = allowed[0], 0
        if not count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, bytes(content)[:count], offset)

    monkeypatch.setattr(context_directory.os, "pwrite", almost_full)
    for change in (lambda: log.append(ids(3, 4)), lambda: log.truncate(0)):
        with pytest.raises(MzdError) as error:
            change()
        assert error.value.code == "swap_full"
        assert log.tokens().tolist() == [1, 2]
    monkeypatch.undo()
    log.append(ids(3, 4, 5))
    assert TokenLog.open(contexts, "chat").tokens().tolist() == [1, 2, 3, 4, 5]


def test_a_wasteful_log_is_written_anew_as_one_record(contexts):
    log = TokenLog.create(contexts, "chat", model_id=MODEL)
    log.append(ids(*range(10)))
    for _ in range(10):
        log.append(np.arange(20_000, dtype=np.uint32))
        log.truncate(10)
    assert log_path(contexts).stat().st_size == log.size_bytes < 400_000
    log.append(ids(7))
    assert TokenLog.open(contexts, "chat").tokens().tolist() == [*range(10), 7]


steps = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2**32 - 1), max_size=5), st.floats(0, 1)))


@settings(max_examples=50, deadline=None)
@given(steps)
def test_file_and_memory_agree_after_any_history(tmp_path_factory, steps):
    contexts = ContextDirectory(tmp_path_factory.mktemp("state") / "contexts")
    log = TokenLog.create(contexts, "chat", model_id=MODEL)
    expected = []
    for is_append, tokens, where in steps:
        if is_append:
            log.append(ids(*tokens))
            expected += tokens
        else:
            expected = expected[: int(where * len(expected))]
            log.truncate(len(expected))
    log = TokenLog.open(contexts, "chat")
    assert log.tokens().tolist() == expected
    log.compact()
    assert TokenLog.open(contexts, "chat").tokens().tolist() == expected
    contexts.close()
