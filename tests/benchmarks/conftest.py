"""A tiny model in a library of its own, and directories that leave nothing behind."""

import os
from pathlib import Path

import pytest

from mzd.benchmarks.models import BenchModel
from mzd.model.library import ModelLibrary

FIXTURE = Path(__file__).parents[1] / "fixtures" / "llama-F16.gguf"


@pytest.fixture
def caches(monkeypatch, tmp_path):
    """The benches' cache directory; compiled kernels stay where all tests keep theirs."""
    kernels = os.environ.get("POCL_CACHE_DIR", str(Path.home() / ".cache" / "pocl" / "kcache"))
    monkeypatch.setenv("POCL_CACHE_DIR", kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def uncached(monkeypatch):
    """The page cache of the machine that runs the tests is not ours to drop."""
    monkeypatch.setattr("mzd.benchmarks.engine.drop_page_cache", lambda: False)
    monkeypatch.setattr("mzd.benchmarks.restore_bench.drop_page_cache", lambda: False)


@pytest.fixture
def tiny(caches, tmp_path):
    """A model of 4 layers, 320 tokens of vocabulary and a context of 1024."""
    root = tmp_path / "home" / "models"
    model = ModelLibrary(root).import_file(FIXTURE, "tiny")
    return BenchModel("tiny", root, model.store_path, FIXTURE, synthetic=False)
