"""The pinned window: pieces never overlap, and whoever waits gets one."""

import random
import threading

import pytest

from mzd.memory.host_window import HostWindow

PAGE = 4096
START = 1 << 20


def test_slots_lie_side_by_side_on_pages():
    window = HostWindow(START, 8 * PAGE)
    with window.slots([1, PAGE, PAGE + 1]) as slots:
        assert slots == [START, START + PAGE, START + 2 * PAGE]
        with window.slots([4 * PAGE]) as more:
            assert more == [START + 4 * PAGE]
    with window.slots([8 * PAGE]) as all_of_it:
        assert all_of_it == [START]


def test_what_never_fits_is_refused_and_a_failure_gives_its_room_back():
    window = HostWindow(START, 2 * PAGE)
    with pytest.raises(ValueError, match="do not pass"), window.slots([2 * PAGE + 1]):
        pass
    with pytest.raises(RuntimeError), window.slots([2 * PAGE]):
        raise RuntimeError
    with window.slots([2 * PAGE]) as slots:
        assert slots == [START]


def test_threads_share_the_window_and_none_waits_for_ever():
    window = HostWindow(0, 16 * PAGE)
    owners = [None] * 16
    overlaps = []

    def use(seed):
        rng = random.Random(seed)
        for _ in range(200):
            with window.slots([rng.randrange(1, 8 * PAGE)]) as (start,):
                owners[start // PAGE] = seed
                if owners[start // PAGE] != seed:
                    overlaps.append(start)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not overlaps
