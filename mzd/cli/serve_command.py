"""Owns `mzd serve`: flags over the configuration file, then the daemon itself."""

from __future__ import annotations

from argparse import Namespace

from mzd.cli.output import Exit, Output


def serve(arguments: Namespace, _output: Output) -> int:
    """`mzd serve`: run the daemon until it is told to end; its exit status."""
    from mzd.daemon.config import load_config
    from mzd.daemon.main import run_daemon

    names = ("socket", "state", "model", "context", "device", "memory", "kernels", "codec", "activations")
    overrides = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    run_daemon(load_config(arguments.config, overrides))
    return Exit.DONE
