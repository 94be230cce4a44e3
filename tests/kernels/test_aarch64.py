"""Products of rounded activations as aarch64 code, under emulation: dot products of bytes, and without them.

Needs ``apt-get install clang gcc-aarch64-linux-gnu qemu-user``. No OpenCL driver is involved: kernels are
compiled as functions, and what they call is in aarch64_builtins.cl.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mzd.formats.weight_layout import repack, unpack
from mzd.kernels import kernel_source
from tests.device.products import Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, activations, relative_error, rounded
from tests.reference.blocks import random_blocks

HERE = Path(__file__).parent
SHAPES = [(Q8_0, 41, 96), (Q4_0, 24, 64), (Q4_1, 41, 96), (Q4_K, 9, 256), (Q5_K, 9, 512), (Q6_K, 24, 256)]
ARCHITECTURES = {"dot products": "armv8.2-a+dotprod", "generic": "armv8-a"}


def find(*names):
    """The first of these programs that is there."""
    found = next((name for name in names if shutil.which(name)), None)
    if found is None:
        pytest.skip(f"{names[0]} is not installed")
    return found


@pytest.fixture(scope="module")
def compile_program(tmp_path_factory):
    """Make the program for a type and an architecture."""
    clang, gcc = find("clang", "clang-15", "clang-14"), find("aarch64-linux-gnu-gcc")
    find("qemu-aarch64")
    directory = tmp_path_factory.mktemp("aarch64")

    def compile_cl(source, name, *flags):
        path = directory / f"{name}.cl"
        path.write_text(source)
        command = [clang, "-x", "cl", "-cl-std=CL1.2", "--target=aarch64-linux-gnu", "-O2", "-w", "-c"]
        command += [
            "-Xclang",
            "-finclude-default-header",
            *flags,
            str(path),
            "-o",
            str(path.with_suffix(".o")),
        ]
        subprocess.run(command, check=True)
        return str(path.with_suffix(".o"))

    builtins = compile_cl((HERE / "aarch64_builtins.cl").read_text(), "builtins")

    def compile_all(type, architecture):
        name = f"{type.name}-{architecture}"
        source = kernel_source("matmul_int8").replace("kernel WIDE_VECTORS ONE_WORK_ITEM void", "void")
        kernels = compile_cl(source, name, f"-march={architecture}", f"-DWEIGHT_{type.name}")
        program = directory / f"{name}.out"
        command = [gcc, "-O2", "-static", str(HERE / "aarch64_driver.c"), kernels, builtins, "-lm"]
        subprocess.run([*command, "-o", str(program)], check=True)
        return program

    return compile_all


def multiply(program, packed, x, rows):
    """(tokens, rows) float32; four row groups, blocks of two tokens, so that both have tails."""
    operands = np.array([rows, x.shape[1], len(x), packed.size, 4, 2], np.int32)
    stdin = operands.tobytes() + packed.tobytes() + x.tobytes()
    run = subprocess.run(
        ["qemu-aarch64", "-cpu", "max", program], input=stdin, capture_output=True, check=True
    )
    return np.frombuffer(run.stdout, np.float32).reshape(len(x), rows)


@pytest.mark.parametrize(("type", "rows", "cols"), SHAPES, ids=lambda value: getattr(value, "name", value))
def test_both_ways_are_right_and_the_same(compile_program, type, rows, cols):
    packed = repack(type, random_blocks(type, rows, cols, 3), rows, cols)
    values = unpack(type, packed, rows, cols).astype(np.float64)
    programs = [compile_program(type, architecture) for architecture in ARCHITECTURES.values()]
    for tokens in (1, 5):
        x = activations(tokens, cols)
        with_dots, generic = (multiply(program, packed, x, rows) for program in programs)
        assert relative_error(with_dots, rounded(x) @ values.T) <= 5e-6
        assert np.array_equal(with_dots, generic)


def test_the_instruction_is_used_where_there_is_one(compile_program):
    found = {}
    for name, architecture in ARCHITECTURES.items():
        program = compile_program(Q4_1, architecture)
        listing = subprocess.run(
            ["aarch64-linux-gnu-objdump", "-d", program.with_suffix(".o")], capture_output=True, check=True
        )
        found[name] = b"sdot" in listing.stdout
    assert found == {"dot products": True, "generic": False}
