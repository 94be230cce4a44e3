"""Builds `mzd._native`, the one C extension; everything else is declared in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("native")

# No -march: SIMD files carry their own target attributes and are chosen at run time. No contraction: every
# path must give the same bits, and gcc contracts by default on some CPUs.
COMPILER_FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]

setup(
    ext_modules=[
        Extension(
            "mzd._native",
            sources=sorted(str(path) for path in NATIVE.glob("*.c")),
            depends=sorted(str(path) for path in NATIVE.glob("*.h")),
            include_dirs=[str(NATIVE)],
            define_macros=[
                ("Py_LIMITED_API", "0x030B0000"),
                ("_GNU_SOURCE", "1"),
                ("_FILE_OFFSET_BITS", "64"),
            ],
            extra_compile_args=COMPILER_FLAGS,
            py_limited_api=True,
            optional=True,  # without a compiler the package still installs, on `mzd.native`'s NumPy paths
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
