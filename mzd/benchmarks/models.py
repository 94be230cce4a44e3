"""Owns which models benches run on: the real one of the library, and geometries filled from a seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mzd.benchmarks.synthetic import Geometry, write_model
from mzd.formats.ggml_types import GgmlType
from mzd.model.library import GGUF_NAME, InstalledModel, ModelLibrary, models_directory

REAL_MODEL: Final = "smollm2-135m"
WEIGHTS_SEED: Final = 600
_SOURCE: Final = f"seed:{WEIGHTS_SEED}:2"
"""What a synthetic model is made of, and how: one of another source is made anew."""


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model that is ready to be opened.

    Attributes:
        library: the models directory that it lies in (`MZD_HOME/models`).
        gguf_path: for the peer; None where the file is gone.
    """

    name: str
    library: Path
    store_path: Path
    gguf_path: Path | None
    synthetic: bool


def real_model(name: str = REAL_MODEL) -> BenchModel:
    """The installed model of that name; its store is made anew if it has to be.

    Raises:
        MzdError: `not_found`, with what to do.
    """
    root = models_directory(os.environ)
    return _bench_model(ModelLibrary(root).resolve(name), root, synthetic=False)


def _bench_model(model: InstalledModel, root: Path, *, synthetic: bool) -> BenchModel:
    gguf_path = model.gguf_path if model.gguf_path.is_file() else None
    return BenchModel(model.name, root, model.store_path, gguf_path, synthetic)


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/mzd/bench`: synthetic models, compiled kernels, state of the runs. May be deleted."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(caches) / "mzd" / "bench"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def synthetic_model(
    geometry: Geometry, report: Callable[[str], None], type: GgmlType = GgmlType.F16
) -> BenchModel:
    """GGUF file and weight store of a geometry, made on first use and kept below the cache directory.

    Args:
        type: of the matrices; part of the model's name.

    Raises:
        MzdError: `weights_unavailable`; no room for the GGUF file and the store.
    """
    root = cache_directory() / "models"
    library = ModelLibrary(root)
    name = f"{geometry.name}-{type.name.lower()}"
    model = library.get(name)
    if model is None or model.origin.source != _SOURCE or not library.is_ready(model):
        report(f"making {name} from a seed")
        model = _make(library, name, geometry, type)
    return _bench_model(model, root, synthetic=True)


def _make(library: ModelLibrary, name: str, geometry: Geometry, type: GgmlType) -> InstalledModel:
    with library.staging() as directory:
        gguf_path = directory / GGUF_NAME
        write_model(gguf_path, geometry, seed=WEIGHTS_SEED, type=type)
        return library.install(name, directory, _SOURCE, gguf_path)
