"""Owns what a device offers beyond the core of OpenCL, as far as it matters here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyopencl as cl

USEFUL: Final[Mapping[str, frozenset[str]]] = {
    "fp16": frozenset({"cl_khr_fp16"}),
    "sub-groups": frozenset({"cl_khr_subgroups", "cl_intel_subgroups", "cl_qcom_subgroup_shuffle"}),
    "int dot product": frozenset(
        {"cl_khr_integer_dot_product", "cl_arm_integer_dot_product_int8", "cl_qcom_dot_product8"}
    ),
    "buffer addresses": frozenset({"cl_ext_buffer_device_address"}),
    "USM": frozenset({"cl_intel_unified_shared_memory"}),
    "command buffers": frozenset({"cl_khr_command_buffer"}),
}
"""What each group of extensions gives; any one of a group will do."""


def useful_extensions(device: cl.Device) -> dict[str, bool]:
    """Whether `device` announces them."""
    announced = set(device.extensions.split())
    return {what: bool(names & announced) for what, names in USEFUL.items()}
