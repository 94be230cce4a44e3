"""The golden values notice every mistake in a description: each is planted here, and must show."""

from dataclasses import replace

import pytest

from mzd.formats.architectures import ARCHITECTURES
from tests.reference.golden import FIXTURES, disagreement, golden_models
from tests.reference.loaded_model import LoadedModel


def layers(change):
    """An edit of each layer of the model's shape."""
    return lambda index: facts(index, layers=tuple(change(layer) for layer in index.config.layers))


def facts(index, **changes):
    """The index with other facts about the model's shape."""
    return replace(index, config=replace(index.config, **changes))


def renamed(index, roles):
    """The index with the tensors of each layer in other roles."""

    def unit(extent):
        tensors = (replace(spec, role=roles.get(spec.role, spec.role)) for spec in extent.tensors)
        return replace(extent, tensors=tuple(tensors))

    return replace(index, layers=tuple(map(unit, index.layers)))


def wider(layer):
    return replace(layer, window=layer.window and layer.window + 1)


def narrower(layer):
    return replace(layer, window=layer.window and layer.window - 1)


FACTS = {
    "exaone4hybrid window + 1": ("exaone4hybrid-F16", layers(wider)),
    "gemma2 window + 1": ("gemma2-F16", layers(wider)),
    "gemma2 window - 1": ("gemma2-F16", layers(narrower)),
    "gemma3 window - 1": ("gemma3-F16", layers(narrower)),
    "gemma2 windows on odd layers": ("gemma2-F16", lambda i: facts(i, layers=i.config.layers[::-1])),
    "gemma3 without windows": ("gemma3-F16", layers(lambda layer: replace(layer, window=None))),
    "gemma3 one rotation": ("gemma3-F16", layers(lambda layer: replace(layer, rope=0))),
    "gemma3 rotations swapped": ("gemma3-F16", lambda i: facts(i, ropes=i.config.ropes[::-1])),
    "exaone4hybrid all rotate": ("exaone4hybrid-F16", layers(lambda layer: replace(layer, rope=0))),
    "exaone4 none rotates": ("exaone4-F16", layers(lambda layer: replace(layer, rope=None))),
    "gemma2 scores not capped": ("gemma2-F16", lambda i: facts(i, attention_softcap=None)),
    "gemma2 logits not capped": ("gemma2-F16", lambda i: facts(i, logit_softcap=None)),
    "gemma2 embedding not scaled": ("gemma2-F16", lambda i: facts(i, embedding_scale=1.0)),
    "qwen2 neighbours rotate": (
        "qwen2-F16",
        lambda i: facts(i, ropes=tuple(replace(rope, style="pairs") for rope in i.config.ropes)),
    ),
    "gemma2 norms of attention and MLP mixed up": (
        "gemma2-F16",
        lambda i: renamed(i, {"post_attention_norm": "ffn_norm", "ffn_norm": "post_attention_norm"}),
    ),
    "qwen3 norms of Q and K mixed up": (
        "qwen3-F16",
        lambda i: renamed(i, {"attn_q_norm": "attn_k_norm", "attn_k_norm": "attn_q_norm"}),
    ),
}

DESCRIPTIONS = {
    "qwen2 bias dropped": ("qwen2-F16", {"qkv_bias": False}),
    "qwen3 heads not normalised": ("qwen3-F16", {"qk_norm": False}),
    "gemma3 heads not normalised": ("gemma3-F16", {"qk_norm": False}),
    "gemma2 no norm after": ("gemma2-F16", {"norms": "before"}),
    "gemma3 no norm before": ("gemma3-F16", {"norms": "after"}),
    "gemma2 SiLU": ("gemma2-F16", {"activation": "silu"}),
    "qwen3 GELU": ("qwen3-F16", {"activation": "gelu_tanh"}),
}


async def shows(device, file, edit):
    """Whether a prompt longer than the windows, or a short one, tells the edited model from the right one."""
    model = LoadedModel(device, FIXTURES / f"{file}.gguf", edit=edit)
    golden = golden_models()[file]
    try:
        for prompt in (3, 1):
            if await disagreement(model, golden["prompts"][prompt], golden):
                return True
        return False
    finally:
        model.close()


@pytest.mark.parametrize("error", FACTS)
async def test_wrong_facts(device, error):
    file, edit = FACTS[error]
    assert await shows(device, file, edit)


@pytest.mark.parametrize("error", DESCRIPTIONS)
async def test_wrong_descriptions(device, monkeypatch, error):
    """The units are laid out as the file has them; then the graph is told something else."""
    file, changes = DESCRIPTIONS[error]

    def describe(index):
        name = index.config.architecture
        monkeypatch.setitem(ARCHITECTURES, name, replace(ARCHITECTURES[name], **changes))
        return index

    assert await shows(device, file, describe)


async def test_norm_before_instead_of_after(device, monkeypatch):
    """The usual order of norms, with the vectors that belong behind the blocks."""

    def reorder(index):
        monkeypatch.setitem(ARCHITECTURES, "exaone4", replace(ARCHITECTURES["exaone4"], norms="before"))
        return renamed(index, {"post_attention_norm": "attn_norm", "post_ffw_norm": "ffn_norm"})

    assert await shows(device, "exaone4-F16", reorder)


@pytest.mark.parametrize("file", ["qwen2-F16", "qwen3-F16", "exaone4-F16", "gemma2-F16", "gemma3-F16"])
async def test_nothing_shows_where_nothing_is_wrong(device, file):
    assert not await shows(device, file, lambda index: index)
