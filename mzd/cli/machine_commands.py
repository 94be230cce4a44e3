"""Owns the commands that judge this machine: doctor, profile --measure and bench."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mzd.cli.output import Exit, Output, console, note

if TYPE_CHECKING:
    from mzd.daemon.doctor import Diagnosis


def doctor(arguments: Namespace, output: Output) -> int:
    """`mzd doctor`: what is missing here, and what to do. Exit status 1 when something is."""
    from mzd.daemon.config import load_config
    from mzd.daemon.doctor import diagnose

    found = diagnose(load_config(arguments.config, {}))
    output.result(asdict(found), lambda _: _show_diagnosis(found))
    return Exit.DONE if found.healthy else Exit.REFUSED


def _show_diagnosis(found: Diagnosis) -> None:
    from mzd.daemon.doctor_opencl import describe_device

    for check in found.checks:
        print(f"{'ok  ' if check.ok else 'MISS'} {check.name}: {check.detail}")
        if not check.ok and check.advice:
            print(f"     -> {check.advice}")
    for number, device in enumerate(found.devices, start=1):
        heading, *facts = describe_device(device)
        print(f"\ndevice {number}: {heading}")
        for fact in facts:
            print(f"     {fact}")
    if found.hints:
        print("\nfaster:")
    for hint in found.hints:
        print(f"     {hint}")


def measure_profile(arguments: Namespace, output: Output) -> int:
    """`mzd profile --measure`: measure this device anew, without a daemon; the next start of one uses it."""
    from mzd.daemon.config import load_config
    from mzd.daemon.profiling import profile_anew

    names = ("state", "model", "device", "codec")
    overrides = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    profile = profile_anew(load_config(arguments.config, overrides))
    output.result({"profile": asdict(profile)}, lambda shown: print(json.dumps(shown["profile"], indent=2)))
    return Exit.DONE


def bench(arguments: Namespace, output: Output) -> int:
    """`mzd bench NAME`: measure; a table, JSON on stdout or in a file, a picture."""
    from mzd.benchmarks.main import run_benchmark

    result = run_benchmark(arguments.name, quick=arguments.quick, report=note, workload=arguments.workload)
    if arguments.json not in (None, "-"):
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")
    if arguments.png is not None:
        from mzd.benchmarks.picture import draw_benchmark

        draw_benchmark(result, arguments.png)
    output.result(result, _show_rows)
    return Exit.DONE


def _show_rows(result: Mapping[str, Any]) -> None:
    from mzd.cli.tables import rows_table

    console().print(rows_table(result["rows"]))
    for key, value in result.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            print(f"{key}: {value:.4g}")
