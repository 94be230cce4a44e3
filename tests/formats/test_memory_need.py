"""How much memory a model needs: the sum of its units, at lengths that it has."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mzd.formats import memory_need as module
from mzd.formats.memory_need import CONTEXT_LENGTHS
from tests.formats.test_weight_store import example_index, indexes


def memory_need(index, *, chunk_tokens):
    return module.memory_need(index.config, index.layers, index.head, chunk_tokens=chunk_tokens)


def lengths(context_length):
    """Of the totals of a model with that context."""
    index = example_index()
    index = replace(index, config=replace(index.config, context_length=context_length))
    return [total.context_tokens for total in memory_need(index, chunk_tokens=256).totals]


@pytest.mark.parametrize(
    ("context_length", "expected"),
    [
        (1, [1]),
        (2048, [2048]),
        (4096, [2048, 4096]),
        (8192, [2048, 8192]),
        (32768, [2048, 8192, 32768]),
        (131072, [2048, 8192, 32768]),
    ],
)
def test_lengths_end_at_the_models_own(context_length, expected):
    assert lengths(context_length) == expected


@settings(max_examples=50, deadline=None)
@given(indexes(), st.sampled_from([1, 32, 256]))
def test_totals_are_sums_of_whole_units(index, chunk_tokens):
    need = memory_need(index, chunk_tokens=chunk_tokens)
    config = index.config
    assert need.weights_bytes == sum(layer.size_bytes for layer in index.layers)
    assert need.head_bytes == index.head.size_bytes
    assert need.kv_bytes_per_1k_tokens == 1024 * config.kv_bytes_per_token
    for total in need.totals:
        kv_bytes = total.total_bytes - need.weights_bytes - need.head_bytes
        assert kv_bytes % config.kv_chunk_bytes(chunk_tokens) == 0
        assert kv_bytes >= total.context_tokens * config.kv_bytes_per_token
        assert kv_bytes < (total.context_tokens + chunk_tokens) * config.kv_bytes_per_token
        assert total.context_tokens <= min(config.context_length, CONTEXT_LENGTHS[-1])


def test_a_model_by_hand():
    """Two layers of K and V for one head of 32 channels: 256 bytes a token."""
    index = example_index()
    config = replace(index.config, num_kv_heads=1, head_dim=32, context_length=3000)
    need = memory_need(replace(index, config=config), chunk_tokens=256)
    units_bytes = need.weights_bytes + need.head_bytes
    assert need.fields() == {
        "weights_bytes": sum(layer.size_bytes for layer in index.layers),
        "head_bytes": index.head.size_bytes,
        "kv_bytes_per_1k_tokens": 1024 * 256,
        "totals": [
            {"context_tokens": 2048, "total_bytes": units_bytes + 2048 * 256},
            {"context_tokens": 3000, "total_bytes": units_bytes + 3072 * 256},
        ],
    }
