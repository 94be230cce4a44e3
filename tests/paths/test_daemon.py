"""`mzd serve` as a process: ready, its socket, its signals, and what it finds again at the next start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mzd.errors import MzdError
from mzd.rpc.blocking_client import BlockingClient

FIXTURES = Path(__file__).parents[1] / "fixtures"
END_S = 300.0
"""What takes longer will not end; a first start compiles all kernels."""

LONG_NAME = 128 * "\N{CJK UNIFIED IDEOGRAPH-20000}"
"""Of a request, and told with each token: after some two hundred of them a socket is full."""

ENDLESS = {"tokens": [7, 8, 9], "max_tokens": 1000, "temperature": 0, "stream": True, "request": LONG_NAME}
"""An answer that waits for its client to read, and so does not end before a client that is slow acts."""


def environment(home):
    """Models of its own; kernels that other tests have compiled already are found in PoCL's own cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pocl" / "kcache"
    return os.environ | {
        "MZD_HOME": str(home),
        "POCL_CACHE_DIR": os.environ.get("POCL_CACHE_DIR", str(cache)),
    }


@dataclass
class Process:
    """A daemon that has said `ready`."""

    popen: subprocess.Popen
    socket: str
    lines: list[str]

    def connect(self):
        return BlockingClient(self.socket)

    def call(self, method, **params):
        with self.connect() as client:
            return client.call(method, params)

    def generate(self, context, tokens, max_tokens=8):
        given = {"context": context, "tokens": tokens, "max_tokens": max_tokens, "temperature": 0.0}
        return self.call("generate", **given)

    def end(self, number):
        """Send a signal; the exit status."""
        self.popen.send_signal(number)
        return self.popen.wait(END_S)


def serve_command(directory, *options):
    """`mzd serve` over the fixture model."""
    command = [sys.executable, "-m", "mzd.cli.main", "serve", "--model", str(FIXTURES / "llama-F16.gguf")]
    command += ["--socket", str(directory / "s"), "--state", str(directory / "state"), "--codec", "none"]
    return [*command, *options]


def refused(directory, *options, **variables):
    """A start that is to fail: its exit status and what it said."""
    command = serve_command(directory, *options)
    env = environment(directory / "home") | variables
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=env, timeout=END_S, check=False)
    return done.returncode, done.stderr


@contextlib.contextmanager
def serving(directory, *options, **variables):
    """A daemon in a state directory that outlives it; killed at last."""
    socket, command = str(directory / "s"), serve_command(directory, *options)
    env = environment(directory / "home") | variables
    popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    lines, ready = [], threading.Event()

    def read():
        for line in popen.stderr:
            lines.append(line.rstrip())
            if lines[-1] == "ready":
                ready.set()
        ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(END_S)
        assert "ready" in lines, lines
        yield Process(popen, socket, lines)
    finally:
        popen.kill()
        popen.wait(END_S)
        reader.join(END_S)
        popen.stderr.close()


@pytest.fixture
def directory(tmp_path_factory):
    """A directory whose name is short enough for a socket."""
    return tmp_path_factory.mktemp("d")


def some_tokens(count, seed=0):
    return np.random.default_rng(seed).integers(5, 320, count).tolist()


def test_contexts_come_back_after_sigterm_and_after_sigkill(directory, golden):
    """Cases 004, 039 and 099: with the tokens that were to come, and none computed again."""
    prompt, expected = golden[0]
    long_prompt = some_tokens(300)
    with serving(directory) as daemon:
        whole = daemon.generate("whole", long_prompt, 24)
        assert daemon.generate("c", prompt)["tokens"] == expected[:8]
        first = daemon.generate("long", long_prompt, 8)
        assert first["tokens"] == whole["tokens"][:8]
        assert daemon.end(signal.SIGTERM) == 0
    with serving(directory) as daemon:
        second = daemon.generate("long", [], 8)
        assert second["tokens"] == whole["tokens"][8:16]
        assert second["usage"]["reused_tokens"] == 307
        assert second["usage"]["computed_tokens"] == 1
        evicted = daemon.call("evict", fraction=1.0)
        assert evicted["resident_bytes"] == 0
        assert daemon.end(signal.SIGKILL) == -signal.SIGKILL
    with serving(directory) as daemon:
        listed = {context["context"]: context for context in daemon.call("contexts")["contexts"]}
        assert {name: context["tokens"] for name, context in listed.items()} == {
            "whole": 324,
            "long": 316,
            "c": len(prompt) + 8,
        }
        third = daemon.generate("long", [], 8)
        assert third["tokens"] == whole["tokens"][16:24]
        assert third["usage"]["reused_tokens"] == 315
        assert daemon.generate("c", [])["tokens"] == expected[8:16]
        daemon.call("drop", context="whole")
        assert daemon.end(signal.SIGINT) == 0
    assert sorted(path.name for path in (directory / "state" / "contexts").iterdir()) == ["c", "long"]


def test_damaged_kernels_cost_one_start(directory):
    """As a power cut leaves them: PoCL ends the process over a library that it cannot load."""
    kernels = directory / "state" / "kernels"
    own_cache = {"POCL_CACHE_DIR": str(kernels / "pocl")}
    with serving(directory, **own_cache) as daemon:
        assert daemon.end(signal.SIGTERM) == 0
    libraries = list(kernels.glob("pocl/**/*.so"))
    if not libraries:
        pytest.skip("the driver keeps no libraries")
    for library in libraries:
        os.truncate(library, 100)
    status, told = refused(directory, **own_cache)
    assert status == -signal.SIGABRT, told
    with serving(directory, **own_cache) as daemon:
        assert "compiled kernels may be damaged" in "\n".join(daemon.lines)
        assert daemon.end(signal.SIGTERM) == 0
    with serving(directory, **own_cache) as daemon:
        assert "damaged" not in "\n".join(daemon.lines)


def test_a_second_daemon_is_refused_before_it_compiles(directory):
    """On the same socket, and on the same state behind another socket."""
    with serving(directory) as daemon:
        for options, reason in (
            ((), "a daemon listens at"),
            (("--socket", str(directory / "t")), "another process uses"),
        ):
            status, told = refused(directory, *options)
            assert status > 0
            assert reason in told
            assert "choosing a device" not in told
        assert daemon.end(signal.SIGTERM) == 0


def test_what_clients_see(directory):
    """Streaming, cancelling, leaving, and the account of memory, over one daemon."""
    with serving(directory, "--context", "1024") as daemon:
        with daemon.connect() as client:
            check_stream(client)
            check_cancel(daemon, client)
        check_leaving(daemon)
        check_accounts(daemon)
        assert "Traceback" not in "\n".join(daemon.lines)
        assert daemon.end(signal.SIGTERM) == 0


def check_stream(client):
    """Every token is told before the response, and progress before the first of them."""
    told = []
    given = {"context": "s", "tokens": some_tokens(700), "max_tokens": 6, "temperature": 0, "stream": True}
    client.call("evict", {"fraction": 1.0})
    msgid = client.start("generate", given)
    result = client.wait(msgid, lambda method, params: told.append((method, params)))
    assert [params["token"] for method, params in told if method == "token"] == result["tokens"]
    assert "".join(params["text"] for method, params in told if method == "token") == result["text"]
    phases = [params["phase"] for method, params in told if method == "progress"]
    assert phases[0] == "restoring"
    assert "prefill" in phases


def check_cancel(daemon, client):
    """Case 063: a request that waits is cancelled by its name, and the one that runs goes on."""
    running = client.start("generate", ENDLESS | {"context": "r"})
    waiting = client.start("generate", ENDLESS | {"context": "w", "request": "waiting"})
    assert daemon.call("cancel", request="waiting") == {"cancelled": True}
    with pytest.raises(MzdError, match="cancelled"):
        client.wait(waiting)
    assert daemon.call("cancel", request="waiting") == {"cancelled": False}
    assert daemon.call("cancel", request=LONG_NAME) == {"cancelled": True}
    with pytest.raises(MzdError, match="cancelled"):
        client.wait(running)


def check_leaving(daemon):
    """Case 061: a client that goes away ends its generation, and its context says how far it came."""

    def leave(method, params):
        if method == "token":
            raise EOFError

    with daemon.connect() as client, contextlib.suppress(EOFError):
        client.wait(client.start("generate", ENDLESS | {"context": "gone"}), leave)
    wait_idle(daemon)
    (context,) = [c for c in daemon.call("contexts")["contexts"] if c["context"] == "gone"]
    assert 4 <= context["tokens"] < 1003


def wait_idle(daemon):
    deadline_s = time.monotonic() + END_S
    while daemon.call("status")["state"] != "idle":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def check_accounts(daemon):
    """Case 015: what status adds up is what the kernel sees, within 3 %, at every stage."""
    for fraction in (0, 0.5, 1):
        daemon.generate("s", [7], 2)
        daemon.call("evict", fraction=fraction)
        memory = daemon.call("status")["memory"]
        assert memory["total_bytes"] == pytest.approx(memory["kernel_bytes"], rel=0.03)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_model"),
        (b"GGUF", "invalid_model"),
        (b"<!DOCTYPE html><html></html>", "invalid_model"),
        (None, "unsupported_architecture"),
    ],
)
def test_a_bad_model_is_refused_by_a_code(directory, content, code):
    """Cases 109, 120 and 121: exit status 1, one line on stderr, no traceback."""
    path = directory / "model.gguf"
    if content is None:
        content = (FIXTURES / "llama-F16.gguf").read_bytes().replace(b"llama", b"mamba", 1)
    path.write_bytes(content)
    command = [sys.executable, "-m", "mzd.cli.main", "serve", "--model", str(path)]
    command += ["--socket", str(directory / "s"), "--state", str(directory / "state")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=END_S,
        env=environment(directory / "home"),
        check=False,
    )
    assert done.returncode == 1
    assert code in done.stderr
    assert "Traceback" not in done.stderr
