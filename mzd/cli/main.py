"""Owns the entry point: one command, its errors, its exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mzd.cli.arguments import parse_arguments
from mzd.cli.output import Exit, Output
from mzd.errors import MzdError

_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: without the program's name; `sys.argv` when not given.

    Returns:
        An `Exit`, or 130 after Ctrl-C.

    Raises:
        SystemExit: 2 for wrong use.
    """
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    output = Output(as_json=arguments.json is True or arguments.json == "-")
    try:
        return int(arguments.handler(arguments, output))
    except MzdError as error:
        return output.error(error)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return Exit.REFUSED


def _silence_stdout() -> None:
    """The reader of our output left: nothing more is written, at exit neither."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
