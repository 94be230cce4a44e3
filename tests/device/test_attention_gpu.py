"""Attention by work-groups that cooperate, against float64: every block shape, and every kind of edge.

A CPU plays such work-groups slowly, so the long contexts are few.
"""

import pytest

from mzd.device.attention import AttentionShape
from mzd.device.attention_blocks import GpuBlocks, gpu_tile_tokens
from tests.device.attention_context import Context, largest_error

TOLERANCE = 2e-5

FIXTURE = AttentionShape(4, 2, 32)
SMOLLM2 = AttentionShape(9, 3, 64)
LLAMA = AttentionShape(32, 8, 64)
QWEN3 = AttentionShape(16, 8, 128)
GEMMA2 = AttentionShape(8, 4, 256, scale=0.0625, softcap=50.0, window=300)
ODD = AttentionShape(7, 1, 40, window=100)
WIDE = AttentionShape(16, 1, 96)


def case_id(value):
    """Heads and channels of a shape; numbers as they are."""
    if isinstance(value, AttentionShape):
        return f"{value.num_heads}/{value.num_kv_heads}x{value.head_dim}"
    return str(value)


CASES = [
    *((SMOLLM2, 1, context) for context in (1, 255, 256, 257, 1000, 8191)),
    *((SMOLLM2, tokens, 1000) for tokens in (2, 8, 32, 33)),
    *((FIXTURE, tokens, 600) for tokens in (1, 7, 513)),
    *((LLAMA, tokens, 257) for tokens in (1, 8)),
    *((QWEN3, tokens, 300) for tokens in (1, 8, 40)),
    *((GEMMA2, tokens, 700) for tokens in (1, 8)),
    *((ODD, tokens, 700) for tokens in (1, 13)),
    (WIDE, 3, 600),
]


@pytest.mark.parametrize(("shape", "num_tokens", "context"), CASES, ids=case_id)
def test_agrees_with_float64(device, shape, num_tokens, context):
    assert largest_error(Context(device, shape, num_tokens, context, kernel_class="gpu")) < TOLERANCE


@pytest.mark.parametrize("compute_units", [1, 16, 200])
def test_any_number_of_splits(device, compute_units):
    context = Context(device, FIXTURE, 8, 2300, kernel_class="gpu", compute_units=compute_units)
    assert largest_error(context) < TOLERANCE


@pytest.mark.parametrize("window", [1, 256])
@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize("context", [256, 600])
def test_windows_of_any_length(device, window, num_tokens, context):
    shape = AttentionShape(4, 2, 32, window=window)
    assert largest_error(Context(device, shape, num_tokens, context, kernel_class="gpu")) < TOLERANCE


@pytest.mark.parametrize(
    ("shape", "num_tokens", "context"),
    [(SMOLLM2, 1, 255), (SMOLLM2, 8, 2600), (FIXTURE, 1, 5000), (FIXTURE, 70, 2600), (GEMMA2, 8, 700)],
    ids=case_id,
)
@pytest.mark.usefixtures("with_shared_memory")
def test_chunks_as_arguments(device, shape, num_tokens, context):
    case = Context(device, shape, num_tokens, context, kernel_class="gpu", chunk_arguments=True)
    assert largest_error(case) < TOLERANCE


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("size", ["one", "few", "many"])
def test_blocks_divide_the_work_and_fit_local_memory(group, head_dim, size):
    tile = 1 if size == "one" else gpu_tile_tokens(group, head_dim)
    blocks = GpuBlocks.choose(tile * group, head_dim, size)
    token_lanes = blocks.pass_tokens // blocks.tokens_a_lane
    assert tile * group <= blocks.queries
    assert blocks.group_lanes % token_lanes == 0
    assert head_dim % (blocks.group_lanes // token_lanes) == 0
    assert head_dim % blocks.channels_a_lane == 0
    assert head_dim // blocks.channels_a_lane <= blocks.group_lanes
    assert blocks.query_lanes * blocks.queries <= blocks.group_lanes
    weights = blocks.pass_tokens * (blocks.queries + 4) + blocks.pass_tokens // 2
    floats = head_dim * blocks.queries + weights + blocks.queries + blocks.group_lanes
    assert 4 * floats <= 36 * 1024  # of which the padding, counted in full here, may be 4 KiB
