"""Memory on a device, as each driver counts it."""

import subprocess

import pytest

from mzd.memory.device_memory import DeviceMemory, read_device_memory


def nobody():
    raise FileNotFoundError


def fdinfo(root, pid, **files):
    directory = root / "proc" / str(pid) / "fdinfo"
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name.removeprefix("fd")).write_text(text)


def test_nobody_knows_where_units_are_the_processs_own_pages(tmp_path):
    fdinfo(tmp_path, 7, fd3="pos:\t0\nflags:\t02\n")
    assert read_device_memory(7, tmp_path, nobody) is None
    assert read_device_memory(8, tmp_path, nobody) is None


def test_adreno_counts_in_two_files(tmp_path):
    directory = tmp_path / "sys/class/kgsl/kgsl/proc/7"
    directory.mkdir(parents=True)
    (directory / "gpumem_mapped").write_text("4096\n")
    (directory / "gpumem_unmapped").write_text("8192\n")
    assert read_device_memory(7, tmp_path, nobody) == DeviceMemory(12288, "kgsl")


def test_a_drm_client_counts_once_however_many_descriptors_it_has(tmp_path):
    client = (
        "drm-driver:\ti915\ndrm-client-id:\t5\ndrm-resident-system0:\t12 KiB\ndrm-resident-local0:\t1 MiB\n"
    )
    other = "drm-client-id:\t6\ndrm-memory-vram:\t100\n"
    fdinfo(tmp_path, 7, fd3=client, fd4=client, fd5=other, fd6="drm-client-id:\t9\n", fd7="not a key")
    assert read_device_memory(7, tmp_path, nobody) == DeviceMemory(12 * 1024 + (1 << 20) + 100, "drm")


def test_nvidia_counts_by_process(tmp_path):
    assert read_device_memory(7, tmp_path, lambda: "6, 100\n7, 30\n7, 2\n") == DeviceMemory(
        32 << 20, "nvidia-smi"
    )
    assert read_device_memory(8, tmp_path, lambda: "6, 100\n") is None


@pytest.mark.parametrize("answer", ["7, [N/A]\n", "No running processes found\n", ""])
def test_an_answer_that_says_nothing_is_no_figure(tmp_path, answer):
    assert read_device_memory(7, tmp_path, lambda: answer) is None


def test_a_tool_that_hangs_is_no_figure(tmp_path):
    def hang():
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    assert read_device_memory(7, tmp_path, hang) is None
