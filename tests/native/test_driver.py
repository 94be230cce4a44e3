"""The C parts without Python: under the sanitizers, and as aarch64 code under emulation.

Needs a C compiler; the aarch64 half needs ``apt-get install gcc-aarch64-linux-gnu qemu-user``. By hand::

    gcc -g -fsanitize=address,undefined -D_GNU_SOURCE -Inative tests/native/driver.c $(C_PARTS) && ./a.out
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
C_PARTS = sorted(
    str(path)
    for path in (ROOT / "native").glob("*.c")
    if path.stem not in ("module", "args") and not path.stem.startswith("bind_")
)
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-ffp-contract=off", "-D_GNU_SOURCE"]
GOLDEN = ("062e7b45", "62c6544f")
"""CRC-32C of the driver's payloads and of the chunks they decode to: version 1 of the format, on any CPU."""


def need(*programs):
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def build(tmp_path, compiler, *flags):
    program = tmp_path / "driver"
    source = str(ROOT / "tests" / "native" / "driver.c")
    command = [compiler, *STRICT, *flags, f"-I{ROOT / 'native'}", source, *C_PARTS, "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def int8_lines(output):
    """{variant: (payload CRC, chunk CRC)}"""
    assert output.endswith("done\n")
    lines = [line.split() for line in output.splitlines() if line.startswith("int8 ")]
    return {name: tuple(crcs) for _, name, *crcs in lines}


def run(*command, **environment):
    finished = subprocess.run(
        command, check=True, capture_output=True, text=True, env=dict(os.environ, **environment)
    )
    assert finished.stderr == ""
    return int8_lines(finished.stdout)


def test_c_parts_under_address_and_undefined_behaviour_sanitizers(tmp_path):
    need("cc")
    flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    results = run(build(tmp_path, "cc", *flags), ASAN_OPTIONS="detect_leaks=1")
    assert set(results.values()) == {GOLDEN}


def test_aarch64_code_gives_the_same_bits(tmp_path):
    need("aarch64-linux-gnu-gcc", "qemu-aarch64")
    program = build(tmp_path, "aarch64-linux-gnu-gcc", "-O3", "-static")
    results = run("qemu-aarch64", program, "--no-pages")
    assert results == {"neon": GOLDEN, "plain": GOLDEN}
