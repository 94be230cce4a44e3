"""What the probe of OpenCL might say."""

from dataclasses import replace

from mzd.daemon.opencl_probe import DeviceReport, OpenClReport
from mzd.daemon.refused_devices import Refusal

CPU = DeviceReport(
    platform="Portable Computing Language",
    name="pthread-cpu",
    driver="6.0",
    svm_level="fine_buffer",
    is_cpu=True,
    shares_memory=True,
    compute_units=4,
    memory="fine_svm",
    memory_reason="shared with the host without a map",
    kernels="cpu",
    kernels_reason="it is a CPU",
    pointer_lists="short",
    direct_reads="",
    failures=(),
    extensions={"fp16": False},
    local_memory_bytes=32768,
    allocation_bytes_max=1 << 30,
    memory_bytes=1 << 32,
)
GPU = replace(CPU, platform="ARM", name="Mali-G610", is_cpu=False, memory="coarse_svm", kernels="gpu")
REFUSAL = Refusal("Mali-G610", "coarse_svm", "gpu", "embed", "the device computes embed wrongly")


def a_report(*devices, **changes):
    """A loader with `devices`, by default a CPU; the first that can be opened is chosen."""
    devices = devices or (CPU,)
    chosen = next((device.name for device in devices if device.memory), "")
    fields = {"loader": "/lib/libOpenCL.so", "devices": devices, "chosen": chosen, "problem": ""}
    return OpenClReport(**fields | changes)
