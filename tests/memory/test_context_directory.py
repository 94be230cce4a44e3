"""Names, modes, links and replacement of what lies under STATE/contexts."""

import errno
import os
import stat

import pytest

from mzd.errors import MzdError
from mzd.memory import context_directory
from mzd.memory.context_directory import SWAP_DATA, TOKEN_LOG, ContextDirectory, check_context_name


@pytest.fixture
def contexts(tmp_path):
    directory = ContextDirectory(tmp_path / "state" / "contexts")
    yield directory
    directory.close()


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "...", "x" * 64])
def test_names_that_contexts_may_have(name):
    assert check_context_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "x" * 65, "a/b", "ä", "a b", "a\n", "\0"])
def test_names_that_contexts_may_not_have(contexts, name):
    with pytest.raises(MzdError) as error:
        contexts.open_file(name, TOKEN_LOG, create=True)
    assert error.value.code == "invalid_params"
    assert error.value.data == {"parameter": "context"}


def test_files_are_0600_in_a_0700_directory_whatever_the_umask(contexts):
    umask = os.umask(0)
    try:
        contexts.open_file("chat", SWAP_DATA, create=True)
        contexts.replace_file("chat", TOKEN_LOG, b"x")
    finally:
        os.umask(umask)
    assert mode_of(contexts.path) == mode_of(contexts.path / "chat") == 0o700
    assert mode_of(contexts.path / "chat" / SWAP_DATA) == mode_of(contexts.path / "chat" / TOKEN_LOG) == 0o600


def test_rights_that_others_have_are_taken_away(contexts):
    contexts.replace_file("chat", TOKEN_LOG, b"x")
    (contexts.path / "chat").chmod(0o755)
    (contexts.path / "chat" / TOKEN_LOG).chmod(0o644)
    contexts.read_file("chat", TOKEN_LOG)
    assert mode_of(contexts.path / "chat") == 0o700
    assert mode_of(contexts.path / "chat" / TOKEN_LOG) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_owns_is_refused(contexts):
    contexts.replace_file("chat", TOKEN_LOG, b"x")
    os.chown(contexts.path / "chat" / TOKEN_LOG, 12345, 12345)
    with pytest.raises(MzdError, match="belongs to user 12345"):
        contexts.read_file("chat", TOKEN_LOG)


def test_a_link_in_place_of_a_file_is_refused_and_its_target_untouched(contexts, tmp_path):
    target = tmp_path / "precious"
    target.write_text("keep")
    contexts.open_file("chat", TOKEN_LOG, create=True)
    (contexts.path / "chat" / SWAP_DATA).symlink_to(target)
    for direct in (False, True):
        with pytest.raises(MzdError, match="symbolic link"):
            contexts.open_file("chat", SWAP_DATA, create=True, direct=direct)
    contexts.replace_file("chat", SWAP_DATA, b"new")
    assert target.read_text() == "keep"
    assert not (contexts.path / "chat" / SWAP_DATA).is_symlink()


def test_a_planted_temporary_file_is_not_written_through(contexts, tmp_path):
    target = tmp_path / "precious"
    target.write_text("keep")
    contexts.open_file("chat", TOKEN_LOG, create=True)
    (contexts.path / "chat" / (TOKEN_LOG + ".new")).symlink_to(target)
    contexts.replace_file("chat", TOKEN_LOG, b"log")
    assert target.read_text() == "keep"
    assert contexts.read_file("chat", TOKEN_LOG) == b"log"


def test_a_link_in_place_of_a_context_is_refused_and_not_listed(contexts, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (contexts.path / "chat").symlink_to(tmp_path / "elsewhere")
    assert contexts.names() == []
    for use in (lambda: contexts.open_file("chat", TOKEN_LOG, create=True), lambda: contexts.remove("chat")):
        with pytest.raises(MzdError, match="symbolic link"):
            use()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_in_place_of_the_directory_itself_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "contexts").symlink_to(tmp_path / "real")
    with pytest.raises(MzdError, match="symbolic link"):
        ContextDirectory(tmp_path / "contexts")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused_without_waiting(contexts, make):
    contexts.open_file("chat", TOKEN_LOG, create=True)
    make(contexts.path / "chat" / SWAP_DATA)
    with pytest.raises(MzdError) as error:
        contexts.open_file("chat", SWAP_DATA, create=False)
    assert error.value.code == "internal"


def test_only_one_process_holds_the_directory(contexts):
    with pytest.raises(MzdError) as error:
        ContextDirectory(contexts.path)
    assert error.value.code == "busy"


def test_names_lists_contexts_only(contexts):
    for name in ("b", "a"):
        contexts.open_file(name, TOKEN_LOG, create=True)
    (contexts.path / "a file").write_text("")
    (contexts.path / "not a name").mkdir()
    assert contexts.names() == ["a", "b"]


def test_remove_takes_everything_and_says_whether_there_was_something(contexts):
    contexts.replace_file("chat", TOKEN_LOG, b"x")
    contexts.open_file("chat", SWAP_DATA, create=True)
    assert contexts.remove("chat") is True
    assert contexts.names() == []
    assert contexts.remove("chat") is False


def test_a_failed_replacement_leaves_the_old_file(contexts, monkeypatch):
    contexts.replace_file("chat", TOKEN_LOG, b"old")

    def no_space(fd, content, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(context_directory.os, "pwrite", no_space)
    with pytest.raises(MzdError) as error:
        contexts.replace_file("chat", TOKEN_LOG, b"new")
    assert error.value.code == "swap_full"
    assert contexts.read_file("chat", TOKEN_LOG) == b"old"


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(contexts, monkeypatch):
    real_open = os.open

    def without_direct(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(context_directory.os, "open", without_direct)
    file = contexts.open_file("chat", SWAP_DATA, create=True, direct=True)
    assert not file.direct
    assert os.pwrite(file.fd, b"unaligned", 1) == 9


def test_a_descriptor_lives_as_long_as_somebody_refers_to_it(contexts):
    file = contexts.open_file("chat", TOKEN_LOG, create=True)
    fd = file.fd
    contexts.remove("chat")
    assert os.pwrite(fd, b"still open", 0) == 10
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
