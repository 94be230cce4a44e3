"""What the doctor says of devices, and which hints fit which machine."""

from dataclasses import replace

import pytest

from mzd.daemon.config import Config
from mzd.daemon.doctor_opencl import describe_device, opencl_checks, speed_hints
from tests.daemon.opencl_reports import CPU, GPU, REFUSAL, a_report


def hints(tmp_path, report, config=None, environment=None, **facts):
    found = speed_hints(config or Config(), report, root=tmp_path, environment=environment or {}, **facts)
    return "\n".join(found)


def test_a_good_machine_gets_no_hint(tmp_path):
    assert hints(tmp_path, a_report(CPU), quantised=False) == ""
    assert hints(tmp_path, a_report(replace(GPU, memory="fine_svm")), quantised=True) == ""
    assert hints(tmp_path, a_report(devices=(), chosen="")) == ""


@pytest.mark.parametrize(
    ("driver", "said"),
    [("3.0-rc2", "3 to 7 times"), ("3.1+debian", "is an old one"), ("5.0", "is an old one"), ("odd", "")],
)
def test_old_versions_of_pocl(tmp_path, driver, said):
    found = hints(tmp_path, a_report(replace(CPU, driver=driver)))
    assert said in found
    assert bool(said) == bool(found)


def test_pinned_workers(tmp_path):
    assert "POCL_AFFINITY" in hints(tmp_path, a_report(), environment={"POCL_AFFINITY": "0"})
    assert hints(tmp_path, a_report(), environment={"POCL_AFFINITY": "1"}) == ""
    assert hints(tmp_path, a_report(GPU), environment={"POCL_AFFINITY": "0"}).count("POCL") == 0


def test_a_gpu_that_is_not_used(tmp_path):
    unusable = replace(GPU, memory="")
    assert "Mali-G610 cannot be used" in hints(tmp_path, a_report(unusable, CPU))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/mali0").write_text("")
    assert "/dev/mali0" in hints(tmp_path, a_report(CPU))
    assert "/dev/mali0" not in hints(tmp_path, a_report(GPU))


def test_memory_that_is_mapped_or_copied(tmp_path):
    assert "fine-grain SVM" in hints(tmp_path, a_report(GPU))
    assert "fine-grain SVM" not in hints(tmp_path, a_report(replace(GPU, shares_memory=False)))
    assert "SVM would save" in hints(tmp_path, a_report(replace(GPU, memory="buffers")))
    copied = replace(CPU, direct_reads="Invalid argument, for units are not page-aligned")
    assert "not page-aligned" in hints(tmp_path, a_report(copied))


def test_integers_are_suggested_where_they_would_help(tmp_path):
    assert "int8" in hints(tmp_path, a_report(CPU), Config(activations="f32"), quantised=True)
    assert hints(tmp_path, a_report(CPU), Config(), quantised=True) == ""


def test_a_device_is_described(tmp_path):
    text = "\n".join(describe_device(replace(CPU, failures=("memory staged: it moved",))))
    for fact in (
        "pthread-cpu (Portable Computing Language 6.0)",
        "SVM fine_buffer",
        "local memory 32 KiB",
        "fp16: no",
        "memory fine_svm: shared with the host without a map",
        "cpu kernels: it is a CPU",
        "memory staged: it moved",
    ):
        assert fact in text
    left_out = replace(CPU, memory="", memory_reason="the configuration leaves it out")
    unused = "\n".join(describe_device(left_out))
    assert "would not be used: the configuration leaves it out" in unused
    assert "would use" not in unused


def test_checks_follow_the_report():
    assert [check.ok for check in opencl_checks(a_report(), ())] == [True] * 4
    assert [check.ok for check in opencl_checks(a_report(), (REFUSAL,))] == [True, True, True, False]
    nothing = a_report(replace(CPU, memory=""), problem="none opens")
    assert [check.ok for check in opencl_checks(nothing, ())] == [True, True, False, True]
    assert opencl_checks(nothing, ())[2].detail == "none opens"
