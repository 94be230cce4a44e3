"""The account of a start: from the process's birth on, part by part."""

import logging
import subprocess
import sys
import time

from mzd.daemon.start_clock import StartClock, process_age_s

TICK_S = 0.02
"""The kernel knows a process's birth to a hundredth of a second."""

AGE_AND_CPU_TIME = """
import time
from mzd.daemon.start_clock import process_age_s
print(process_age_s(), time.process_time())
"""


def test_a_process_is_older_than_its_cpu_time_and_younger_than_who_began_it():
    """In a child with one thread: several together may use more CPU time than there is."""
    before_s = time.perf_counter()
    command = [sys.executable, "-c", AGE_AND_CPU_TIME]
    age_s, cpu_s = map(float, subprocess.run(command, capture_output=True, check=True).stdout.split())
    assert cpu_s <= age_s + TICK_S
    assert age_s <= time.perf_counter() - before_s + TICK_S


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
