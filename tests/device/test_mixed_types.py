"""Files whose matrices differ in type, as Q4_K_M has them: imported and computed like any other."""

from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from mzd.formats.ggml_types import GgmlType
from mzd.model.importer import import_gguf
from tests.formats.gguf_files import F32, STRING, U32, Gguf, Tensor, aligned
from tests.reference.loaded_model import LoadedModel
from tests.reference.model import ReferenceModel, read_model

FIXTURES = Path(__file__).parents[1] / "fixtures"
SOURCES = ["llamawide-Q4_K", "llamawide-Q6_K", "llamawide-Q5_K"]  # of one shape


def mixed_file():
    """The bytes of a model that takes its matrices from each source in turn."""
    models = [read_model(FIXTURES / f"{name}.gguf") for name in SOURCES]
    turn = cycle(models)
    tensors, data = [], b""
    for name, info in models[0].gguf.tensors.items():
        model = models[0] if info.type is GgmlType.F32 else next(turn)
        tensors.append(Tensor(name, info.dims, model.gguf.tensors[name].type))
        raw = model.raw(name).tobytes()
        data += raw.ljust(aligned(len(raw), 32), b"\0")
    kinds = {int: U32, float: F32, str: STRING}
    pairs = models[0].gguf.metadata.items()
    metadata = {
        key: (kinds[type(value)], value)
        for key, value in pairs
        if type(value) in kinds and not key.startswith("tokenizer.")
    }
    header = Gguf(metadata, tuple(tensors)).header()
    return header.ljust(aligned(len(header), 32), b"\0") + data


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    path.write_bytes(mixed_file())
    return path


def test_an_import_keeps_each_matrix_in_its_type(path, tmp_path):
    index = import_gguf(path, tmp_path / "weights.mzw")
    types = {spec.type for spec in index.layers[0].tensors}
    assert types == {GgmlType.F32, GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q6_K}


async def test_logits_agree_with_the_reference(device, path):
    model = LoadedModel(device, path, logit_rows=40)
    tokens = np.arange(7, 7 + 40)
    expected = ReferenceModel(model.file).logits(tokens)
    assert np.abs(await model.step(tokens, 0, rows="all") - expected).max() < 0.02
    first = await model.step(tokens[:1], 0)
    assert np.abs(first[0] - expected[0]).max() < 0.02
    model.close()
