"""The engine: golden values of small models, the NumPy reference, and what it refuses to run."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mzd.device.engine import Engine
from mzd.errors import MzdError
from tests.reference.golden import FIXTURES, disagreement, golden_models, wrong_where_clear
from tests.reference.loaded_model import LoadedModel
from tests.reference.model import ReferenceModel

REAL_MODEL = Path(os.environ.get("MZD_TEST_MODEL", ".models/SmolLM2-135M-Instruct.Q4_1.gguf"))

ROUNDED_FILES = ["llama-Q8_0", "llama-Q4_0", "llama-Q4_1"]
ROUNDED_FILES += ["llamawide-Q4_K", "llamawide-Q5_K", "llamawide-Q6_K"]
FILES = ["llama2l-F32", "llama-F16", "llama-BF16", *ROUNDED_FILES]


@pytest.fixture(scope="module", params=FILES)
def loaded(device, request):
    """Each small model with all units resident."""
    model = LoadedModel(device, FIXTURES / f"{request.param}.gguf", logit_rows=64)
    yield model
    model.close()


@pytest.fixture
def small(device):
    """One small model, for tests that leave it in a state of their own."""
    model = LoadedModel(device, FIXTURES / "llama-Q4_1.gguf", ubatch_tokens=64)
    yield model
    model.close()


@pytest.mark.parametrize("prompt", range(5))
async def test_golden_continuations(loaded, prompt):
    golden = golden_models()[loaded.name]
    assert await disagreement(loaded, golden["prompts"][prompt], golden) is None


@pytest.mark.parametrize("file", ROUNDED_FILES)
async def test_golden_steps_with_rounded_activations(device, file):
    """Activations in 8 bits move logits by up to one: wherever the margin is wider, the token is the same."""
    model = LoadedModel(device, FIXTURES / f"{file}.gguf", activations="int8")
    compared = 0
    for prompt in golden_models()[file]["prompts"]:
        clear, wrong = await wrong_where_clear(model, prompt)
        assert not wrong
        compared += len(clear)
    assert compared > 50
    model.close()


def chunk_of(model, layer):
    """The layer's first chunk, K and V as they lie there."""
    chunk = np.empty(model.file.config.kv_chunk_bytes(256) // 2, np.float16)
    model.device.allocations.copy_out(int(model.chunk_addresses[layer][0]), chunk.ctypes.data, chunk.nbytes)
    return chunk


async def test_rounded_activations_are_not_those_of_q_k_v_and_the_head(device):
    """K and V of the first layer, which come from the embedding, and the logits that follow from x."""
    models = {
        activations: LoadedModel(device, FIXTURES / "llama-Q8_0.gguf", activations=activations)
        for activations in ("f32", "int8")
    }
    logits = {name: await model.step(range(7, 47), 0) for name, model in models.items()}
    exact, rounded = models.values()
    assert np.array_equal(chunk_of(exact, 0), chunk_of(rounded, 0))
    assert not np.array_equal(chunk_of(exact, 1), chunk_of(rounded, 1))
    assert not np.array_equal(logits["f32"], logits["int8"])
    hidden = await rounded.hidden(39)
    expected = ReferenceModel(rounded.file).head(hidden)
    assert np.abs(logits["int8"][0] - expected).max() < 1e-4
    for model in models.values():
        model.close()


async def test_logits_agree_with_the_reference(loaded):
    tokens = np.arange(7, 7 + 40)
    expected = ReferenceModel(loaded.file).logits(tokens)
    logits = await loaded.step(tokens, 0, rows="all")
    assert np.abs(logits - expected).max() < 0.02  # a float16 of K or V that rounds the other way


async def test_any_split_into_steps_gives_the_same_logits(loaded):
    tokens = np.random.default_rng(3).integers(3, 300, 300)
    whole = await loaded.prefill(tokens)
    for ubatch in (1, 8, 100, 256):
        assert np.abs(await loaded.prefill(tokens, ubatch=ubatch) - whole).max() < 0.02


async def test_same_steps_give_the_same_bits(loaded):
    tokens = np.arange(3, 130)
    assert np.array_equal(await loaded.prefill(tokens), await loaded.prefill(tokens))


async def test_last_row_is_the_last_of_all(loaded):
    tokens = np.arange(3, 40)
    every = await loaded.step(tokens, 0, rows="all")
    last = await loaded.step(tokens, 0, rows="last")
    assert np.abs(every[-1] - last[0]).max() < 1e-4


async def test_embeddings_may_come_from_outside(small):
    tokens = np.arange(5, 25)
    expected = await small.step(tokens, 0)
    rows = small.file.values("token_embd.weight")[tokens]
    small.engine.unbind_all()
    small.bind(head=False)
    await small.step(tokens, 0, rows=None, embeddings=rows)
    small.engine.begin(tokens, 0, rows)
    for layer in range(small.engine.num_layers):
        small.engine.enqueue_layer(layer)
    small.engine.bind_head(small.head_address)  # the head unit came back in the meantime
    small.engine.enqueue_head("last")
    await small.engine.wait(small.engine.mark())
    assert np.abs(small.engine.logits() - expected).max() < 1e-5


async def test_context_up_to_its_last_token(small):
    tokens = np.random.default_rng(4).integers(3, 300, 1024)
    logits = await small.prefill(tokens, ubatch=64)
    assert np.isfinite(logits).all()
    with pytest.raises(ValueError, match="do not fit"):
        await small.step([5], 1024)


async def test_nothing_runs_over_units_that_are_not_bound(small):
    engine = small.engine
    engine.unbind_all()
    with pytest.raises(RuntimeError, match="head enqueued while its unit is not resident"):
        engine.begin(np.array([5], np.int32), 0)
    embeddings = np.zeros((1, small.file.config.hidden_size), np.float32)
    engine.begin(np.array([5], np.int32), 256, embeddings)
    with pytest.raises(RuntimeError, match="layer 0 has 0 chunks bound, needs 2"):
        engine.enqueue_layer(0)
    engine.bind_layer(0, small.layer_addresses[0], small.chunk_addresses[0][:1])
    with pytest.raises(RuntimeError, match="layer 0 has 1 chunks bound, needs 2"):
        engine.enqueue_layer(0)
    with pytest.raises(RuntimeError, match="layer 0 has 1 chunks bound, needs 2"):
        engine.enqueue_layers()
    small.bind(head=False)
    for layer in range(engine.num_layers):
        engine.enqueue_layer(layer)
    with pytest.raises(RuntimeError, match="head enqueued while its unit is not resident"):
        engine.enqueue_head("last")
    await engine.wait(engine.mark())


async def test_one_step_at_a_time_in_order(small):
    engine = small.engine
    tokens = np.array([5, 6], np.int32)
    engine.begin(tokens, 0)
    for call in (engine.unbind_all, engine.logits, engine.close, lambda: engine.begin(tokens, 0)):
        with pytest.raises(RuntimeError, match="a step is running"):
            call()
    with pytest.raises(RuntimeError, match="layer 1 enqueued, expected 0"):
        engine.enqueue_layer(1)
    engine.enqueue_layer(0)
    with pytest.raises(RuntimeError, match="layers enqueued at once, 1 of them again"):
        engine.enqueue_layers()
    with pytest.raises(RuntimeError, match="layer 0 bound again while a step uses it"):
        engine.bind_layer(0, small.layer_addresses[0], small.chunk_addresses[0])
    with pytest.raises(RuntimeError, match="head enqueued after 1 of"):
        engine.enqueue_head("last")
    await engine.wait(engine.mark())
    with pytest.raises(RuntimeError, match="computed no logits"):
        engine.logits()
    with pytest.raises(RuntimeError, match="expected 1 of a running step"):
        engine.enqueue_layer(0)


async def test_steps_out_of_bounds_are_refused(small):
    for tokens, position in (([], 0), ([5] * 65, 0), ([5], -1), ([-1], 0), ([10**6], 0)):
        with pytest.raises(ValueError, match="token"):
            small.engine.begin(np.array(tokens, np.int32), position)
    with pytest.raises(ValueError, match="10 rows of logits, at most 8"):
        await small.step(range(10), 0, rows="all")
    await small.engine.wait(small.engine.mark())
    with pytest.raises(ValueError, match="5 chunks, at most 4"):
        small.engine.bind_layer(0, small.layer_addresses[0], np.zeros(5, np.uint64))


def test_scratch_is_what_was_allocated(device, small, monkeypatch):
    sizes = []
    allocate = device.allocate_scratch
    monkeypatch.setattr(device, "allocate_scratch", lambda size: sizes.append(size) or allocate(size))
    engine = Engine(device, small.index, context_tokens_max=2048, ubatch_tokens_max=128)
    assert engine.scratch_bytes == sum(sizes)
    engine.close()


def test_head_sizes_that_kernels_cannot_take(device, small):
    config = small.index.config
    odd = replace(small.index, config=replace(config, head_dim=100))
    with pytest.raises(MzdError, match="head_dim 100") as raised:
        Engine(device, odd, context_tokens_max=256)
    assert raised.value.code == "unsupported_architecture"


@pytest.fixture(scope="module")
def real_path():
    """The file of SmolLM2-135M-Instruct, if it is there."""
    if not REAL_MODEL.exists():
        pytest.skip(f"{REAL_MODEL} is not there")
    return REAL_MODEL


@pytest.fixture(scope="module")
def real_model(device, real_path):
    """The real model with all units resident."""
    model = LoadedModel(device, real_path, context_tokens=2304, logit_rows=64)
    yield model
    model.close()


@pytest.fixture(scope="module")
def smollm2():
    """Golden values of the real model."""
    return json.loads((FIXTURES / "smollm2.json").read_text())


@pytest.mark.model
@pytest.mark.parametrize("case", range(6))
async def test_real_model_continues_as_expected(real_model, smollm2, case):
    prompt = smollm2["greedy"][case]
    assert await disagreement(real_model, prompt, prompt) is None


@pytest.mark.model
async def test_real_model_likelihood(real_model, smollm2):
    expected = smollm2["nll"][0]
    tokens = np.array(expected["tokens"])
    assert abs(await real_model.mean_loss(tokens) - expected["mean_nll"]) < 0.001


@pytest.mark.model
async def test_real_model_likelihood_with_rounded_activations(device, real_path, smollm2):
    model = LoadedModel(device, real_path, logit_rows=64, activations="int8")
    expected = smollm2["nll"][0]
    assert abs(await model.mean_loss(np.array(expected["tokens"])) - expected["mean_nll"]) < 0.005
    model.close()


async def log_probabilities(model, tokens):
    """Of every next token, (tokens, vocab) float64; the tokens are fed as they are, 64 a step."""
    parts = [
        await model.step(tokens[begin : begin + 64], begin, rows="all") for begin in range(0, len(tokens), 64)
    ]
    logits = np.concatenate(parts).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.model
async def test_what_rounded_activations_change_on_real_text(device, real_path, real_model, smollm2):
    """Seen over 768 tokens: 1.6 % other choices, a KL divergence of 0.0018."""
    tokens = np.array(smollm2["nll"][0]["tokens"][:768])
    model = LoadedModel(device, real_path, context_tokens=1024, logit_rows=64, activations="int8")
    exact, rounded = [await log_probabilities(each, tokens) for each in (real_model, model)]
    model.close()
    assert (exact.argmax(axis=1) == rounded.argmax(axis=1)).mean() >= 0.975
    assert (np.exp(exact) * (exact - rounded)).sum(axis=1).mean() < 0.003
    assert not np.array_equal(exact, rounded)
