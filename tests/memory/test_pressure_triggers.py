"""Waiting for stall: systemd's protocol on a FIFO and a socket, and what happens when a kernel refuses."""

import base64
import errno
import os
import socket
from pathlib import Path

import pytest
import trio

from mzd.memory.pressure_sources import ProbeError, parse_psi, psi_path, read_probe
from mzd.memory.pressure_triggers import (
    DEFAULT_TRIGGER,
    PollingTrigger,
    TriggerGoneError,
    close_all,
    open_triggers,
)

PSI = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


@pytest.fixture
def psi(tmp_path):
    path = tmp_path / "proc/pressure/memory"
    path.parent.mkdir(parents=True)
    path.write_text(PSI.format(0))
    return path


def refusing(code):
    """A kernel that opens the file and refuses the trigger."""

    def write(fd, payload):
        raise OSError(code, os.strerror(code))

    return write


def discarding(fd, payload):
    """A kernel that takes the trigger; the fake file keeps its text."""
    return len(payload)


def test_the_trigger_ends_in_a_zero_byte_and_needs_no_privilege():
    kind, stall_us, window_us = DEFAULT_TRIGGER.rstrip(b"\0").split()
    assert DEFAULT_TRIGGER.endswith(b"\0")
    assert kind == b"some"
    assert int(window_us) % 2_000_000 == 0
    assert 0 < int(stall_us) < int(window_us)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EPERM, errno.EACCES, errno.EBUSY])
def test_a_refused_trigger_falls_back_to_polling(tmp_path, psi, code):
    (trigger,) = open_triggers(tmp_path, {}, write=refusing(code))
    assert trigger.source == f"polling {psi}"


def test_a_file_that_cannot_be_polled_falls_back_too(tmp_path, psi):
    (trigger,) = open_triggers(tmp_path, {}, write=discarding)
    assert isinstance(trigger, PollingTrigger)


def test_psi_compiled_in_but_off_is_no_trigger_and_no_retries(tmp_path, psi):
    """Case: the file opens, and read and write give EOPNOTSUPP."""
    assert open_triggers(tmp_path, {}, write=refusing(errno.EOPNOTSUPP)) == ()


def test_no_psi_is_no_trigger(tmp_path):
    assert open_triggers(tmp_path, {}) == ()


def test_the_administrator_can_turn_watching_off(tmp_path, psi):
    assert open_triggers(tmp_path, {"MEMORY_PRESSURE_WATCH": "/dev/null"}) == ()


@pytest.mark.parametrize(
    "environ",
    [
        {"MEMORY_PRESSURE_WATCH": "/nowhere"},
        {"MEMORY_PRESSURE_WATCH": "/proc/version", "MEMORY_PRESSURE_WRITE": "not base64!"},
    ],
)
def test_a_watch_that_cannot_be_opened_is_left_out(tmp_path, environ):
    assert open_triggers(tmp_path, environ) == ()


async def test_polling_fires_when_a_window_held_enough_stall(psi, autojump_clock):
    trigger = PollingTrigger(psi)
    start_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_grow_after, psi, [(3.0, 149_999), (5.0, 299_999)])
        await trigger.wait()
    assert trio.current_time() - start_s == pytest.approx(6.0)


async def _grow_after(path, totals):
    start_s = trio.current_time()
    for at_s, total_us in totals:
        await trio.sleep_until(start_s + at_s)
        path.write_text(PSI.format(total_us))


async def test_polling_ends_when_the_file_goes(psi, autojump_clock):
    trigger = PollingTrigger(psi)
    psi.unlink()
    with pytest.raises(TriggerGoneError):
        await trigger.wait()
    with pytest.raises(ProbeError):
        PollingTrigger(psi)


async def test_a_fifo_tells_of_stall_and_what_it_carries_is_discarded(tmp_path):
    fifo = tmp_path / "watch"
    os.mkfifo(fifo)
    environ = {"MEMORY_PRESSURE_WATCH": str(fifo)}
    (trigger,) = open_triggers(tmp_path, environ)
    writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    try:
        for _ in range(2):
            os.write(writer, b"some stall\n")
            with trio.fail_after(60):
                await trigger.wait()
        with trio.move_on_after(0.05) as scope:
            await trigger.wait()
        assert scope.cancelled_caught
    finally:
        os.close(writer)
        close_all([trigger])
        trigger.close()


async def test_a_socket_gets_the_bytes_as_they_are_and_its_end_is_noticed(tmp_path):
    path = tmp_path / "watch.sock"
    payload = b"full 100000 2000000\0"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        environ = {
            "MEMORY_PRESSURE_WATCH": str(path),
            "MEMORY_PRESSURE_WRITE": base64.b64encode(payload).decode(),
        }
        (trigger,) = open_triggers(tmp_path, environ)
        peer, _ = server.accept()
    with peer:
        assert peer.recv(100) == payload
        peer.send(b"x")
        with trio.fail_after(60):
            await trigger.wait()
    with trio.fail_after(60), pytest.raises(TriggerGoneError):
        await trigger.wait()
    trigger.close()


def stalled_us():
    """0 where the kernel does not say."""
    try:
        return parse_psi(read_probe(psi_path(Path("/")))).some_total_us
    except ProbeError:
        return 0


async def test_the_real_kernel_does_not_wake_us_without_stall():
    """The file always counts as readable; a trigger that is not nested would return at once."""
    before_us = stalled_us()  # before the trigger: it counts from when it is made
    triggers = open_triggers(environ={})
    if not triggers or isinstance(triggers[0], PollingTrigger):
        close_all(triggers)
        pytest.skip("this kernel takes no trigger from us")
    with trio.move_on_after(0.2) as scope:
        await triggers[0].wait()
    close_all(triggers)
    assert scope.cancelled_caught or stalled_us() > before_us
