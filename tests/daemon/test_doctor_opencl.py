"""What the doctor says of devices, and which hints fit which machine."""

from dataclasses import replace

import pytest

from mzd.daemon.config import Config
from mzd.daemon.doctor_opencl import describe_device, opencl_checks, speed_hints
from mzd.daemon.opencl_probe import OpenClReport
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


def checks(report, refusals=(), config=None, environment=None):
    return opencl_checks(report, refusals, config or Config(), environment or {})


def test_checks_follow_the_report():
    assert [check.ok for check in checks(a_report())] == [True] * 4
    assert [check.ok for check in checks(a_report(), (REFUSAL,))] == [True, True, True, False]
    nothing = a_report(replace(CPU, memory=""), problem="none opens")
    assert [check.ok for check in checks(nothing)] == [True, True, False, True]
    assert checks(nothing)[2].detail == "none opens"


def test_keys_that_leave_nothing_are_the_advice():
    left_out = a_report(replace(CPU, memory=""), problem="no OpenCL device is called 'mali'")
    advice = checks(left_out, config=Config(device="mali"))[2].advice
    assert 'device = "mali"' in advice
    assert "pthread-cpu" in advice
    assert "install" not in advice
    assert "install" in checks(left_out)[2].advice


@pytest.mark.parametrize("name", ["POCL_DEVICES", "OCL_ICD_VENDORS", "OCL_ICD_FILENAMES"])
def test_a_variable_that_hides_drivers_is_named(name):
    nothing = OpenClReport("/lib/libOpenCL.so", (), "", "no OpenCL platform was found")
    found = checks(nothing, config=Config(device="mali"), environment={name: "/none"})
    assert all(f"{name}=/none: unset it" in check.advice for check in found[1:3])
