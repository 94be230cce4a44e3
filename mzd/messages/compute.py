"""Owns the messages of computing: steps on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mzd.messages.reply import Reply


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step's result.

    `logits`: (rows, vocab) float32, a view that the next step overwrites; empty when the step
    asked for none. `first_layer_ns`, `end_ns`: monotonic.
    """

    logits: NDArray[np.float32]
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class StepTicket:
    """The asker's hold on a running step. `abandon` makes it end after the layers already enqueued."""

    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class RunStep:
    """Compute `tokens` (n,) int32 at `position` over the bound units.

    Layers of `restore_id` that are not bound yet are awaited one by one. `logits`: how many rows are
    wanted: 'none', 'last' or 'all'. An abandoned step answers with the error `cancelled`.
    """

    restore_id: int
    tokens: NDArray[np.int32]
    position: int
    logits: Literal["none", "last", "all"]
    ticket: StepTicket
    reply: Reply[StepDone]
    trace: bool = field(default=False)
