"""Owns what was said in a named context, so that `mzd run --context NAME` goes on where it stopped.

The daemon keeps tokens, not turns; whoever talks to it keeps the turns, as a chat client does. One file a
context, readable by its user only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from mzd.errors import MzdError

Messages = list[dict[str, str]]


class Transcript:
    """The turns of one context of one daemon.

    Args:
        socket: the daemon's; contexts of two daemons may share a name.
        context: its name.

    Attributes:
        path: of the file.
    """

    def __init__(self, socket: str, context: str) -> None:
        home = os.environ.get("XDG_STATE_HOME") or os.path.join(Path.home(), ".local", "state")
        daemon = hashlib.sha256(os.path.abspath(socket).encode()).hexdigest()[:12]
        self.path = Path(home) / "mzd" / "transcripts" / f"{daemon}-{context}.json"

    def messages(self) -> Messages:
        """What was said; nothing if nothing is kept.

        Raises:
            MzdError: `invalid_params`: the file is damaged; it names the file.
        """
        try:
            turns = json.loads(self.path.read_text())
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise self._damaged() from error
        if not isinstance(turns, list) or not all(_is_turn(turn) for turn in turns):
            raise self._damaged()
        return turns

    def keep(self, messages: Sequence[dict[str, str]]) -> None:
        """Replace what is kept. Raises OSError."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self.path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(list(messages), file)
        fresh.replace(self.path)

    def forget(self) -> bool:
        """Remove what is kept; False if nothing was."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True

    def _damaged(self) -> MzdError:
        return MzdError("invalid_params", f"{self.path} holds no conversation; remove it to begin anew")


def _is_turn(turn: object) -> bool:
    return (
        isinstance(turn, dict)
        and set(turn) == {"role", "content"}
        and all(isinstance(value, str) for value in turn.values())
    )
