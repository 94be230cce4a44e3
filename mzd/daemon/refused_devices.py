"""Owns what is said of a device that was not taken, and the note of it that `mzd doctor` reads.

Nothing here loads OpenCL: the doctor has to work where a driver does not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from mzd.errors import MzdError
from mzd.model.atomic_file import AtomicFile

log = logging.getLogger(__name__)

RECORD_FILE: Final = "refused-devices.json"
_BYTES_MAX: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Refusal:
    """A way to compute that was not taken.

    Attributes:
        device: as the driver says it.
        memory, kernels: how it was tried; see `MemoryKind` and `KernelClass`.
        kernel: what it computed wrongly; empty if it did not get as far.
        reason: one sentence.
    """

    device: str
    memory: str
    kernels: str
    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.device} (memory {self.memory}, {self.kernels} kernels): {self.reason}"


def keep_refusals(state: Path, refusals: Sequence[Refusal]) -> None:
    """Note what this start refused in place of what the last one did. A disk that is full is a warning."""
    if tuple(refusals) == last_refusals(state):
        return
    content = json.dumps([asdict(refusal) for refusal in refusals], indent=1).encode()
    try:
        with AtomicFile(state / RECORD_FILE) as file:
            file.write_at(0, content)
            file.commit()
    except MzdError as error:
        log.warning("refused devices are not noted: reason=%s", error)


def last_refusals(state: Path) -> tuple[Refusal, ...]:
    """What the last start refused; nothing where no start was, or the note cannot be read."""
    try:
        with (state / RECORD_FILE).open("rb") as file:
            entries = json.loads(file.read(_BYTES_MAX))
        return tuple(Refusal(**{key: str(value) for key, value in entry.items()}) for entry in entries)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        log.debug("%s cannot be read: %s", state / RECORD_FILE, error)
        return ()
