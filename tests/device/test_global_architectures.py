"""Architectures whose layers see every token: golden values, and the NumPy reference."""

import numpy as np
import pytest

from tests.reference.golden import FIXTURES, disagreement, golden_models, wrong_where_clear
from tests.reference.loaded_model import LoadedModel
from tests.reference.model import ReferenceModel

ROUNDED_FILES = ["qwen2-Q4_1", "qwen3-Q4_0", "exaone4-Q8_0"]
FILES = ["qwen2-F16", "qwen3-F16", "exaone4-F16", *ROUNDED_FILES]


@pytest.fixture(scope="module", params=FILES)
def loaded(device, request):
    model = LoadedModel(device, FIXTURES / f"{request.param}.gguf", logit_rows=64)
    yield model
    model.close()


@pytest.mark.parametrize("prompt", range(5))
async def test_golden_continuations(loaded, prompt):
    golden = golden_models()[loaded.name]
    assert await disagreement(loaded, golden["prompts"][prompt], golden) is None


async def test_logits_agree_with_the_reference(loaded):
    tokens = np.arange(7, 7 + 40)
    expected = ReferenceModel(loaded.file).logits(tokens)
    logits = await loaded.step(tokens, 0, rows="all")
    assert np.abs(logits - expected).max() < 0.02  # a float16 of K or V that rounds the other way


@pytest.mark.parametrize("file", ROUNDED_FILES)
async def test_golden_steps_with_rounded_activations(device, file):
    model = LoadedModel(device, FIXTURES / f"{file}.gguf", activations="int8")
    for prompt in golden_models()[file]["prompts"][:3]:
        clear, wrong = await wrong_where_clear(model, prompt)
        assert len(clear) > 10
        assert not wrong
    model.close()
