"""Owns the list of models that can be pulled by name: what each is, and what it would need here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from mzd.cli.sizes import format_bytes

if TYPE_CHECKING:
    from mzd.model.known_models import KnownModel
    from mzd.model.library import ModelLibrary

_SHOWN_LENGTHS: Final = (2048, 8192)  # tokens
_ROW: Final = "{:<14}{:>9}  {:<7}{:>10}{:>10}  {:<10}{}"
_TITLES: Final = ("name", "file", "type", "at 2k", "at 8k", "verified", "licence")
_FOOTNOTE: Final = (
    "at 2k, 8k: memory with a context of so many tokens, beside the program itself.\n"
    "verified: mzd itself answered with `run`; of `checksum` the bytes are pinned, but not tried."
)


def known_models(library: ModelLibrary) -> dict[str, Any]:
    """Every model that `mzd pull` knows by name, as JSON shows it."""
    from mzd.model.known_models import KNOWN_MODELS

    return {"models": [_fields(name, model, library) for name, model in KNOWN_MODELS.items()]}


def _fields(name: str, model: KnownModel, library: ModelLibrary) -> dict[str, Any]:
    from mzd.policy.units import CHUNK_TOKENS

    return {
        "name": name,
        "source": model.source.label,
        "size_bytes": model.size_bytes,
        "sha256": model.sha256,
        "verified": "run" if model.is_tried else "checksum",
        "type": model.shape.types.name,
        "architecture": model.shape.architecture,
        "license": model.license,
        "installed": library.get(name) is not None,
        "memory": model.shape.memory_need(chunk_tokens=CHUNK_TOKENS).fields(),
    }


def show_known_models(shown: Mapping[str, Any]) -> None:
    """Two lines a model: what there is to compare, and where it comes from."""
    print(_ROW.format(*_TITLES).rstrip())
    for model in shown["models"]:
        sizes = [format_bytes(_total_bytes(model["memory"]["totals"], tokens)) for tokens in _SHOWN_LENGTHS]
        columns = (model["type"], *sizes, model["verified"], model["license"])
        print(_ROW.format(model["name"], format_bytes(model["size_bytes"]), *columns))
        print(f"    {model['source']}{' (installed)' if model['installed'] else ''}")
    print(_FOOTNOTE)


def _total_bytes(totals: Iterable[Mapping[str, Any]], context_tokens: int) -> int:
    """The need at a length, or at the model's own where that is the shorter."""
    needs: list[int] = [t["total_bytes"] for t in totals if t["context_tokens"] <= context_tokens]
    return max(needs)
