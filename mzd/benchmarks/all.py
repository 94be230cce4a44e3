"""Owns the one command that measures everything, each bench in a process of its own.

python -m mzd.benchmarks.all --out bench/results [--quick] [NAME ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mzd.benchmarks.main import BENCHES

_TIMEOUT_S: Final = 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run benches one after the other; exit status 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m mzd.benchmarks.all", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}; all by default")
    parser.add_argument("--out", type=Path, required=True, help="directory for NAME.json and NAME.png")
    parser.add_argument("--quick", action="store_true", help="fewer points and rounds")
    parser.add_argument("--png", action="store_true", help="draw the results too; needs matplotlib")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.names) - set(BENCHES))
    if unknown:
        parser.error(f"there is no bench {unknown[0]!r}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = arguments.names or list(BENCHES)
    failed = [name for name in names if not _run(name, arguments)]
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str, arguments: argparse.Namespace) -> bool:
    """One bench, as a user would run it."""
    command = [
        sys.executable,
        "-m",
        "mzd.cli.main",
        "bench",
        name,
        "--json",
        str(arguments.out / f"{name}.json"),
    ]
    command += ["--quick"] * arguments.quick
    command += ["--png", str(arguments.out / f"{name}.png")] if arguments.png else []
    return subprocess.run(command, timeout=_TIMEOUT_S, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
