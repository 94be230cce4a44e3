"""The demo: what is shown while the daemon starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mzd import demo
from mzd.errors import MzdError


def daemon(code):
    """A process that says on stderr what a daemon might."""
    return subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def end(process):
    process.stdin.close()
    process.wait()


def test_what_the_daemon_logs_is_passed_on(capsys):
    process = daemon("import sys; print('INFO device: x\\nready', file=sys.stderr, flush=True); input()")
    demo._wait_ready(process)
    assert "INFO device: x" in capsys.readouterr().out
    end(process)


def test_a_silent_daemon_is_said_to_be_not_ready(monkeypatch):
    process = daemon("import sys; input(); print('ready', file=sys.stderr)")
    said = []

    def say(line):
        said.append(line)
        if not process.stdin.closed:  # only now it becomes ready
            process.stdin.write("\n")
            process.stdin.close()

    monkeypatch.setattr(demo, "_say", say)
    demo._wait_ready(process, say_every_s=0.01)
    assert "not ready yet, after" in said[0]
    process.wait()


def test_a_daemon_that_ends_is_told_of_by_its_last_words():
    process = daemon("import sys; sys.exit('no device')")
    with pytest.raises(MzdError, match="no device"):
        demo._wait_ready(process)
    end(process)
