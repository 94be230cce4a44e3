"""Owns the command line's grammar: every command, its flags, the function that does it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn, TypeAlias

from mzd import __version__
from mzd.cli import (
    machine_commands,
    memory_commands,
    model_commands,
    report_commands,
    run_command,
    serve_command,
)
from mzd.cli.output import Exit, Output
from mzd.cli.sizes import AMOUNT_HELP, evict_amount, unsigned_64
from mzd.errors import MzdError
from mzd.rpc.endpoint import default_socket_path

Handler = Callable[[argparse.Namespace, Output], int]
BENCHES: Final = (
    "ttft", "breakdown", "overlap", "order", "swap", "codec",
    "pressure", "evict", "kernels", "engine", "idle",
)  # fmt: skip


class _JsonParser(argparse.ArgumentParser):
    """argparse that tells wrong use as JSON: for lines with `--json`."""

    def error(self, message: str) -> NoReturn:
        Output(as_json=True).error(MzdError("invalid_params", f"{self.prog}: {message}"))
        self.exit(Exit.WRONG_USE)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; `handler` in the result does the work.

    Raises:
        SystemExit: 2 for wrong use, 0 after `--help` and `--version`.
    """
    # Before parsing: an error in the line must know it. `--` ends the flags.
    flags = argv[: argv.index("--")] if "--" in argv else argv
    return build_parser(as_json="--json" in flags).parse_args(argv)


def build_parser(*, as_json: bool = False) -> argparse.ArgumentParser:
    """The whole grammar. `as_json`: wrong use is told as JSON."""
    about = "A language model that gives its memory back, and returns in time."
    kind = _JsonParser if as_json else argparse.ArgumentParser
    parser = kind(prog="mzd", description=about)
    parser.add_argument("--version", action="version", version=f"mzd {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_generation, _add_memory, _add_reports, _add_models, _add_machine):
        add(commands)
    return parser


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _command(
    commands: _Commands, name: str, handler: Handler, *, own_json: bool = False
) -> argparse.ArgumentParser:
    doc = (handler.__doc__ or "").partition(": ")[2]
    summary = doc[:1].upper() + doc[1:]
    parser = commands.add_parser(name, help=summary.partition(".")[0].replace("%", "%%"), description=summary)
    parser.set_defaults(handler=handler)
    if not own_json:
        parser.add_argument("--json", action="store_true", help="print the result, or the error, as JSON")
    return parser


def _client_command(commands: _Commands, name: str, handler: Handler) -> argparse.ArgumentParser:
    parser = _command(commands, name, handler)
    parser.add_argument(
        "--socket", default=default_socket_path(), metavar="PATH", help="the daemon's socket (%(default)s)"
    )
    return parser


def _add_generation(commands: _Commands) -> None:
    run = _client_command(commands, "run", run_command.run)
    run.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from standard input")
    how = run.add_mutually_exclusive_group()
    how.add_argument(
        "--raw", action="store_true", help="continue the context with the text, without a chat template"
    )
    how.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    chat = _client_command(commands, "chat", run_command.chat)
    chat.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    for parser in (run, chat):
        _add_sampling(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--context", metavar="NAME", help="the context to use; a new name makes one")
    parser.add_argument("--max-tokens", type=unsigned_64, metavar="N", help="tokens to produce at most")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token always")
    parser.add_argument("--top-k", type=unsigned_64, metavar="K", help="choose among the K likeliest; 0: all")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="choose among the likeliest tokens that make up P"
    )
    parser.add_argument(
        "--min-p", type=float, metavar="P", help="drop tokens less likely than P times the likeliest"
    )
    parser.add_argument("--seed", type=unsigned_64, metavar="N", help="the same seed gives the same choices")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )


def _add_memory(commands: _Commands) -> None:
    evict = _client_command(commands, "evict", memory_commands.evict)
    evict.add_argument("amount", type=evict_amount, metavar="AMOUNT", help=AMOUNT_HELP.replace("%", "%%"))
    evict.add_argument("--context", metavar="NAME", help="only this context's KV")
    evict.add_argument("--dry-run", action="store_true", help="show the steps, do nothing")
    trim = _client_command(commands, "trim", memory_commands.trim)
    trim.add_argument("level", metavar="LEVEL", help="a name or number of Android's onTrimMemory")
    restore = _client_command(commands, "restore", memory_commands.restore)
    restore.add_argument("context", nargs="?", metavar="CONTEXT", help="the context used last if not given")
    pin = _client_command(commands, "pin", memory_commands.pin)
    target = pin.add_mutually_exclusive_group(required=True)
    target.add_argument("context", nargs="?", metavar="CONTEXT", help="a context to keep in memory")
    target.add_argument("--model", action="store_true", help="keep the model's weights in memory")
    pin.add_argument("--off", action="store_true", help="no longer")
    drop = _client_command(commands, "drop", memory_commands.drop)
    drop.add_argument("context", metavar="CONTEXT")


def _add_reports(commands: _Commands) -> None:
    for name, handler in (
        ("status", report_commands.status),
        ("contexts", report_commands.contexts),
        ("metrics", report_commands.metrics),
    ):
        _client_command(commands, name, handler)
    _add_profile(commands)
    top = _client_command(commands, "top", report_commands.top)
    top.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks")
    trace = _client_command(commands, "trace", report_commands.trace)
    trace.add_argument("request", nargs="?", metavar="REQUEST", help="the last restore if not given")
    trace.add_argument("--png", type=Path, metavar="FILE", help="draw the lanes instead of printing events")


def _add_profile(commands: _Commands) -> None:
    profile = _client_command(commands, "profile", report_commands.profile)
    profile.add_argument(
        "--measure",
        dest="handler",
        action="store_const",
        const=machine_commands.measure_profile,
        help="measure anew, best without a daemon at work; its next start uses the result",
    )
    as_served = profile.add_argument_group("with --measure, as for serve")
    as_served.add_argument("--config", type=Path, metavar="FILE")
    for flag, metavar in (("state", "DIR"), ("model", "NAME"), ("device", "NAME"), ("codec", "NAME")):
        as_served.add_argument(f"--{flag}", metavar=metavar)


def _seconds(text: str) -> float:
    if not 0.1 <= (seconds := float(text)) <= 3600:
        raise argparse.ArgumentTypeError("from 0.1 to 3600 seconds")
    return seconds


def _add_models(commands: _Commands) -> None:
    pull = _command(commands, "pull", model_commands.pull)
    what = pull.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?", metavar="NAME", help="a known name, or hf:OWNER/REPO/FILE")
    what.add_argument("--list", action="store_true", help="show the known names, and what each needs")
    importer = _command(commands, "import", model_commands.import_model)
    importer.add_argument("file", type=Path, metavar="FILE", help="a GGUF file")
    importer.add_argument("--name", metavar="NAME", help="the model's name; else the file's")


def _add_machine(commands: _Commands) -> None:
    serve = _command(commands, "serve", serve_command.serve)
    serve.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML; its keys have the names of the flags"
    )
    serve.add_argument("--socket", metavar="PATH", help="where to listen; else where clients look")
    serve.add_argument("--state", metavar="DIR", help="swap, token logs, profile, kernel cache")
    serve.add_argument(
        "--model", metavar="NAME", help="a model of the library, or a GGUF file to import first"
    )
    serve.add_argument("--context", type=int, metavar="TOKENS", help="longest context; 0: the model's own")
    serve.add_argument("--device", metavar="NAME", help="part of an OpenCL device's name")
    serve.add_argument(
        "--memory",
        choices=("auto", "fine_svm", "coarse_svm", "staged", "buffers"),
        help="kind of memory for units; auto: what suits the device",
    )
    serve.add_argument(
        "--kernels", choices=("auto", "cpu", "gpu"), help="class of kernels; auto: what suits the device"
    )
    serve.add_argument("--codec", metavar="NAME", help="how KV is compressed in memory: int8, none")
    serve.add_argument("--activations", choices=("auto", "int8", "f32"), help="f32 is the exact path")
    doctor = _command(commands, "doctor", machine_commands.doctor)
    doctor.add_argument("--config", type=Path, metavar="FILE", help="as for serve")
    _add_bench(commands)


def _add_bench(commands: _Commands) -> None:
    bench = _command(commands, "bench", machine_commands.bench, own_json=True)
    bench.add_argument("name", choices=BENCHES, metavar="NAME", help=", ".join(BENCHES))
    bench.add_argument(
        "--quick", action="store_true", help="fewer points and rounds, meant for under 3 minutes"
    )
    bench.add_argument(
        "--workload", metavar="NAME", help="one of the bench's models, or all; kernels and engine have some"
    )
    bench.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="JSON to FILE, or to standard output in place of the table",
    )
    bench.add_argument("--png", type=Path, metavar="FILE", help="draw the result")
