"""Owns the question whether the peer survives here; asked in a process of its own, which may die of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import trio

from mzd.benchmarks.llama_peer import LlamaPeer, PeerOptions, import_binding
from mzd.errors import MzdError

_TIMEOUT_S: Final = 120.0
_PROMPT_TOKENS: Final = 16
"""Long enough for the matrix kernels: a single token takes other paths."""


def working_options(path: Path, *, threads: int) -> PeerOptions:
    """The first options that survive a short prompt: the peer's defaults, then without its AMX kernels.

    Builds of llama.cpp with AMX die of an illegal instruction on some machines that have it (its pull request
    26954). Only its extra buffer types use AMX, and they can be left out; for types that have no other
    extra kernels (Q4_1) nothing else changes.

    Raises:
        MzdError: `internal`; it survives neither.
    """
    for options in (PeerOptions(), PeerOptions(extra_buffers=False)):
        if _survives(path, options, threads):
            return options
    raise MzdError("internal", f"llama.cpp cannot compute a prompt of {path} on this machine", path=str(path))


def _survives(path: Path, options: PeerOptions, threads: int) -> bool:
    words = [sys.executable, "-m", __name__, str(path), str(threads), str(int(options.extra_buffers))]
    try:
        return subprocess.run(words, capture_output=True, timeout=_TIMEOUT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main(arguments: list[str]) -> int:
    """Compute a prompt of zeros: PATH THREADS EXTRA_BUFFERS (0 or 1)."""
    path, threads, extra_buffers = arguments
    binding = import_binding()
    if binding is None:
        return 1
    options = PeerOptions(extra_buffers=extra_buffers == "1")
    peer = LlamaPeer(
        binding, Path(path), context_tokens=2 * _PROMPT_TOKENS, threads=int(threads), options=options
    )
    trio.run(peer.answer, np.zeros(_PROMPT_TOKENS, np.int32), 0)
    peer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
