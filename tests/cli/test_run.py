"""`mzd run` and `mzd chat`: what is asked, what is streamed where, Ctrl-C."""

from __future__ import annotations

import io
import json
import signal

from mzd.cli.generation import AnswerView
from mzd.cli.main import main
from mzd.errors import MzdError
from mzd.messages.requests import ChatMessage


def test_run_streams_text_to_stdout_and_progress_to_stderr(daemon, capsys):
    assert main(["run", "hi"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello, world and more\n"
    assert printed.err == "restoring…\n"
    [(_, params)] = daemon.asked
    assert params.messages == (ChatMessage("user", "hi"),)
    assert params.stream
    assert params.max_tokens == 256


def test_run_as_json_is_the_whole_result(daemon, capsys):
    assert main(["run", "hi", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result.pop("usage")["prompt_tokens"] == 9
    assert result == {"context": "c1", "text": "Hello, world", "finish_reason": "stop"}
    assert printed.err == ""


def test_run_passes_every_flag(daemon):
    flags = {
        "context": "c", "max-tokens": "5", "temperature": "0", "seed": "7", "top-k": "3", "top-p": "0.5",
        "min-p": "0.1",
    }  # fmt: skip
    line = [f"--{flag}={value}" for flag, value in flags.items()]
    assert main(["run", "hi", *line, "--stop", "a", "--stop", "b", "--system", "be brief"]) == 0
    [(_, params)] = daemon.asked
    assert params.messages == (ChatMessage("system", "be brief"), ChatMessage("user", "hi"))
    assert (params.context, params.max_tokens, params.temperature, params.seed) == ("c", 5, 0.0, 7)
    assert (params.top_k, params.top_p, params.min_p, params.stop) == (3, 0.5, 0.1, ("a", "b"))


def test_run_raw_and_from_stdin(daemon, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))
    assert main(["run", "--raw", "-"]) == 0
    [(_, params)] = daemon.asked
    assert (params.prompt, params.messages) == ("from stdin\n", None)


def test_ctrl_c_cancels_the_request_and_keeps_what_was_said(daemon, capsys):
    before = signal.getsignal(signal.SIGINT)
    daemon.interrupt = True
    assert main(["run", "hi"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "Hello, world\n"
    assert "mzd: cancelled: " in printed.err
    assert len(daemon.cancelled) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_with_json_is_the_error_with_the_text(daemon, capsys):
    daemon.interrupt = True
    assert main(["run", "hi", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["data"]) == ("cancelled", {"text": "Hello, world"})


def test_chat_sends_the_whole_conversation_and_keeps_its_context(daemon, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\nsecond\n"))
    assert main(["chat", "--system", "be brief"]) == 0
    (_, first), (_, second) = daemon.asked
    assert first.context is None
    assert second.context == "c1"
    assert [message.content for message in second.messages] == [
        "be brief",
        "first",
        "Hello, world and more",
        "second",
    ]
    assert capsys.readouterr().out == "Hello, world and more\n" * 2


def test_chat_goes_on_after_ctrl_c(daemon, monkeypatch, capsys):
    daemon.interrupt = True
    monkeypatch.setattr("sys.stdin", io.StringIO("first\nsecond\n"))
    assert main(["chat"]) == 0
    assert [message.content for message in daemon.asked[1][1].messages] == ["first", "Hello, world", "second"]
    assert "(cancelled)" in capsys.readouterr().err


def test_chat_forgets_a_refused_turn(daemon, monkeypatch, capsys):
    daemon.failure = MzdError("context_full", "too long")
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n"))
    assert main(["chat", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "context_full"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def use_terminal(monkeypatch):
    """(stdout, stderr) that claim to be a terminal. In the test: pytest sets its own after each fixture."""
    streams = Terminal(), Terminal()
    monkeypatch.setattr("sys.stdout", streams[0])
    monkeypatch.setattr("sys.stderr", streams[1])
    return streams


def test_a_model_cannot_drive_the_terminal(monkeypatch):
    terminal = use_terminal(monkeypatch)
    with AnswerView() as view:
        view.take("token", {"text": "a\x1b[2Jb\x9bc\td\r\n"})
    assert terminal[0].getvalue() == "a[2Jbc\td\n"


def test_progress_on_a_terminal_is_one_line_that_goes_when_text_comes(monkeypatch):
    terminal = use_terminal(monkeypatch)
    with AnswerView() as view:
        view.take("progress", {"phase": "restoring", "done": 1, "total": 2})
        view.take("progress", {"phase": "restoring", "done": 2, "total": 2})
        view.take("token", {"text": "x"})
    assert terminal[1].getvalue() == "\r\x1b[Krestoring… 1/2\r\x1b[Krestoring… 2/2\r\x1b[K"
    assert terminal[0].getvalue() == "x\n"
