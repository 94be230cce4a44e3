"""The device and the weight stores that the tests of this folder share."""

import json
from pathlib import Path

import pytest

from mzd.device.opencl import OpenClDevice
from mzd.model.importer import import_gguf
from tests.device.conftest import WAY
from tests.paths.synthetic import Shape, write_model

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="session")
def device():
    """The best, or what the environment asks for; see tests/device/conftest.py."""
    device = OpenClDevice.open(**WAY)
    yield device
    device.close()


@pytest.fixture(scope="session")
def fixture_store(tmp_path_factory):
    """The weight store of llama-F16.gguf."""
    path = tmp_path_factory.mktemp("store") / "weights.mzw"
    import_gguf(FIXTURES / "llama-F16.gguf", path)
    return path


@pytest.fixture(scope="session")
def golden():
    """Prompts and greedy continuations of llama-F16.gguf, up to the first doubtful token."""
    models = json.loads((FIXTURES / "expected.json").read_text())["models"]
    model = next(model for model in models if model["file"] == "llama-F16.gguf")
    return [(p["tokens"], p["continuation"][: p["compare_steps"]]) for p in model["prompts"]]


def imported(directory, shape, seed):
    write_model(directory / "model.gguf", FIXTURES / "llama-F16.gguf", shape, seed=seed)
    import_gguf(directory / "model.gguf", directory / "weights.mzw")
    return directory / "weights.mzw"


@pytest.fixture(scope="session")
def long_store(tmp_path_factory):
    """The weight store of a seeded model with six layers and 2048 tokens of context."""
    return imported(tmp_path_factory.mktemp("long"), Shape(), seed=7)


@pytest.fixture(scope="session")
def wide_store(tmp_path_factory):
    """Chunks of 512 KiB and layers of 2 MiB: large beside what Python itself allocates and frees."""
    shape = Shape(hidden=256, ffn=640, heads=8, kv_heads=8, head_dim=64)
    return imported(tmp_path_factory.mktemp("wide"), shape, seed=11)
