"""The account of a start: from the process's birth on, part by part."""

import logging
import time

from mzd.daemon.start_clock import StartClock, process_age_s


def test_a_process_is_older_than_its_cpu_time():
    assert process_age_s() + 0.02 >= time.process_time()  # born at a multiple of a hundredth
    assert process_age_s() < 24 * 3600


def test_without_proc_the_cpu_time_stands_in(tmp_path):
    assert process_age_s(tmp_path) <= time.process_time()
    stat = tmp_path / "proc/self/stat"
    stat.parent.mkdir(parents=True)
    stat.write_text("1 (a) b) S")
    assert process_age_s(tmp_path) <= time.process_time()


def test_parts_are_logged_and_the_whole_is_told(caplog):
    caplog.set_level(logging.DEBUG)
    clock = StartClock()
    with clock.part("device"):
        pass
    before_s = clock.elapsed_s()
    ready_s = clock.ready()
    assert before_s <= ready_s <= clock.elapsed_s()
    assert [word for word in caplog.text.split() if word.startswith("part=")] == [
        "part=imports",
        "part=device",
    ]
    assert "start: ready" in caplog.text
