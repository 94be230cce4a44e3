"""Workers: bounded, pinned, named, and never left behind by a cancellation."""

import os
import threading

import pytest
import trio

from mzd.errors import MzdError
from mzd.memory.workers import Workers, check_cores


async def test_no_more_threads_than_said_run_at_once(nursery):
    lock, now, most = threading.Lock(), [0], [0]
    gate, two_at_work = threading.Semaphore(0), trio.Event()

    def work():
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if most[0] == 2:
            trio.from_thread.run_sync(two_at_work.set)
        gate.acquire()
        with lock:
            now[0] -= 1

    workers = Workers("test", 2)
    async with trio.open_nursery() as inner:
        for _ in range(6):
            inner.start_soon(workers.run, work)
        await two_at_work.wait()
        for _ in range(6):
            await trio.testing.wait_all_tasks_blocked(0.01)  # a third one would begin by now
            gate.release()
    assert most == [2]


async def test_arguments_results_and_errors_pass_through():
    workers = Workers("test", 1)
    assert await workers.run(divmod, 17, 5) == (3, 2)
    with pytest.raises(ZeroDivisionError):
        await workers.run(divmod, 1, 0)


async def test_threads_carry_the_groups_name():
    assert await Workers("read", 1).run(lambda: threading.current_thread().name) == "mzd-read"


async def test_a_thread_that_changes_groups_is_pinned_anew():
    """Trio hands idle threads to whoever asks next."""
    cores = sorted(os.sched_getaffinity(0))
    groups = [
        Workers("one", 1, frozenset(cores[:1])),
        Workers("all", 1),
        Workers("last", 1, frozenset(cores[-1:])),
    ]
    wanted = [set(cores[:1]), set(cores), set(cores[-1:])]
    for _ in range(3):
        assert [await group.run(os.sched_getaffinity, 0) for group in groups] == wanted
    assert os.sched_getaffinity(0) == set(cores)


async def test_cancelled_the_work_ends_first():
    """It writes into memory that somebody is about to release."""
    begun, go_on, done = trio.Event(), threading.Event(), []

    def work():
        trio.from_thread.run_sync(begun.set)
        go_on.wait(10)
        done.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(Workers("test", 1).run, work)
        await begun.wait()
        nursery.cancel_scope.cancel()
        go_on.set()
    assert done == [True]


async def test_cores_that_went_away_are_told_of_once_and_the_work_is_done(caplog):
    everything = os.sched_getaffinity(0)
    workers = Workers("read", 1, frozenset({9999}))
    for _ in range(3):
        assert await workers.run(os.sched_getaffinity, 0) == everything
    assert [record.getMessage().split(" now")[0] for record in caplog.records] == [
        "cores are gone: threads=read cores=9999"
    ]


def test_cores_are_checked_against_those_that_there_are():
    cores = os.sched_getaffinity(0)
    check_cores(())
    check_cores(cores)
    with pytest.raises(MzdError, match="9999") as raised:
        check_cores({*cores, 9999})
    assert raised.value.code == "invalid_params"
    assert raised.value.data["cores"] == sorted(cores)
