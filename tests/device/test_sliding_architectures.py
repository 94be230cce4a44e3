"""Architectures with layers that see a window only: golden values, and what a window must not depend on."""

import numpy as np
import pytest

from tests.reference.golden import FIXTURES, disagreement, golden_models, wrong_where_clear
from tests.reference.loaded_model import LoadedModel
from tests.reference.model import ReferenceModel

ROUNDED_FILES = ["gemma2-Q8_0", "gemma3-Q4_0"]
FILES = ["exaone4hybrid-F16", "gemma2-F16", "gemma3-F16", *ROUNDED_FILES]


@pytest.fixture(scope="module", params=FILES)
def loaded(device, request):
    model = LoadedModel(device, FIXTURES / f"{request.param}.gguf", logit_rows=96)
    yield model
    model.close()


@pytest.mark.parametrize("prompt", range(5))
async def test_golden_continuations(loaded, prompt):
    golden = golden_models()[loaded.name]
    assert await disagreement(loaded, golden["prompts"][prompt], golden) is None


async def test_logits_agree_with_the_reference(loaded):
    tokens = np.random.default_rng(5).integers(3, 300, 96)  # past the windows of 64
    expected = ReferenceModel(loaded.file).logits(tokens)
    logits = await loaded.step(tokens, 0, rows="all")
    assert np.abs(logits - expected).max() < 0.03  # a float16 of K or V that rounds the other way


async def test_any_split_into_steps_gives_the_same_logits(loaded):
    """A step at the end of a long context begins at a later chunk than one that holds all of it."""
    tokens = np.random.default_rng(3).integers(3, 300, 600)
    whole = await loaded.prefill(tokens, ubatch=600 // 2)
    assert np.abs(await loaded.prefill(tokens, ubatch=40) - whole).max() < 0.03


async def test_embeddings_may_come_from_outside(loaded):
    tokens = np.arange(5, 25)
    rows = loaded.file.values("token_embd.weight")[tokens]
    expected = await loaded.step(tokens, 0)
    assert np.abs(await loaded.step(tokens, 0, embeddings=rows) - expected).max() < 1e-4


@pytest.mark.parametrize("file", ROUNDED_FILES)
async def test_golden_steps_with_rounded_activations(device, file):
    model = LoadedModel(device, FIXTURES / f"{file}.gguf", activations="int8")
    for prompt in golden_models()[file]["prompts"][2:4]:
        clear, wrong = await wrong_where_clear(model, prompt)
        assert len(clear) > 10
        assert not wrong
    model.close()
