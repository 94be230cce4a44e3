"""Attention over chunk tables against float64, at every kind of edge: tiles, splits, chunks, masks."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mzd.device.attention import AttentionShape, AttentionTarget, partials_bytes, plan_attention
from tests.device.attention_context import Context, largest_error

TOLERANCE = 2e-5

FIXTURE = AttentionShape(4, 2, 32)
SMOLLM2 = AttentionShape(9, 3, 64)
WIDE = AttentionShape(8, 1, 128)
ODD = AttentionShape(7, 1, 40)


@pytest.mark.parametrize("shape", [FIXTURE, SMOLLM2, WIDE, ODD], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 13, 70])
@pytest.mark.parametrize("position", [0, 1, 200, 255, 256, 1100])
def test_agrees_with_float64(device, shape, num_tokens, position):
    assert largest_error(Context(device, shape, num_tokens, position + num_tokens)) < TOLERANCE


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("position", [0, 255, 700])
def test_any_width_of_vectors(device, monkeypatch, lanes, num_tokens, position):
    monkeypatch.setattr(device, "float_lanes", lanes)
    assert largest_error(Context(device, SMOLLM2, num_tokens, position + num_tokens)) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 8])
@pytest.mark.parametrize("compute_units", [1, 3, 16, 200])
def test_any_number_of_splits(device, num_tokens, compute_units):
    context = Context(device, SMOLLM2, num_tokens, 2300, compute_units=compute_units)
    assert largest_error(context) < TOLERANCE


def test_split_that_early_tokens_do_not_see(device):
    """The tile's first tokens see nothing of the last chunk, which is a split by itself."""
    context = Context(device, SMOLLM2, 8, 516, compute_units=16)
    assert context.plan.num_splits == 3
    assert largest_error(context) < TOLERANCE


SCALED = AttentionShape(4, 2, 32, scale=0.11)
CAPPED = AttentionShape(4, 2, 32, softcap=1.5)
BOTH = AttentionShape(6, 2, 40, scale=0.3, softcap=4.0, window=100)


@pytest.mark.parametrize("shape", [SCALED, CAPPED, BOTH], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 13])
@pytest.mark.parametrize("position", [0, 90, 700])
def test_scale_cap_and_window(device, shape, num_tokens, position):
    assert largest_error(Context(device, shape, num_tokens, position + num_tokens)) < TOLERANCE


@pytest.mark.parametrize("lanes", [8, 16])
def test_a_cap_far_exceeded(device, monkeypatch, lanes):
    """Scores of thousands, all of which the cap makes one of two."""
    monkeypatch.setattr(device, "float_lanes", lanes)
    context = Context(device, AttentionShape(9, 3, 64, softcap=50.0), 8, 600, scale=60.0)
    assert largest_error(context) < 1e-4  # a cap of 50 leaves float an ulp of 4e-6 in the exponent


@pytest.mark.parametrize("window", [1, 2, 64, 255, 256, 257, 600, 5000])
@pytest.mark.parametrize("num_tokens", [1, 8, 70])
@pytest.mark.parametrize("position", [0, 63, 255, 256, 300, 1100])
def test_windows_of_any_length(device, window, num_tokens, position):
    shape = AttentionShape(4, 2, 32, window=window)
    assert largest_error(Context(device, shape, num_tokens, position + num_tokens)) < TOLERANCE


@pytest.mark.parametrize("compute_units", [1, 16, 200])
def test_chunks_before_the_window_are_no_part_of_any_split(device, compute_units):
    shape = AttentionShape(8, 1, 128, window=300)
    context = Context(device, shape, 1, 2300, compute_units=compute_units)
    assert context.plan.first_chunk == 2000 // 256
    assert context.plan.num_splits <= 2
    assert largest_error(context) < TOLERANCE


def test_chunks_before_the_window_are_not_read(device):
    """What lies there may be anything: a NaN would spoil every sum that it is part of."""
    shape = AttentionShape(4, 2, 32, window=40)
    context = Context(device, shape, 70, 700)
    context.k[:, :512] = context.v[:, :512] = np.nan  # the first token sees 591 to 630
    context._store_chunks()
    assert np.abs(context.run() - Context(device, shape, 70, 700).run()).max() == 0


@pytest.mark.parametrize(
    ("shape", "num_tokens", "context"),
    [(SMOLLM2, 1, 1), (SMOLLM2, 1, 256), (SMOLLM2, 1, 8191), (SMOLLM2, 8, 2600), (BOTH, 70, 5000)],
    ids=str,
)
@pytest.mark.parametrize("compute_units", [1, 16])
@pytest.mark.usefixtures("with_shared_memory")
def test_chunks_as_arguments(device, shape, num_tokens, context, compute_units):
    case = Context(
        device,
        shape,
        num_tokens,
        context,
        kernel_class="cpu",
        chunk_arguments=True,
        compute_units=compute_units,
    )
    assert largest_error(case) < TOLERANCE


def test_whole_ubatch(device):
    assert largest_error(Context(device, FIXTURE, 512, 700)) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_huge_scores_stay_finite(device, num_tokens):
    """|q.k| near 7e4: the softmax is a maximum, and what it picks is right."""
    context = Context(device, SMOLLM2, num_tokens, 600, scale=60.0)
    result = context.run()
    scores = np.abs(np.einsum("thd,td->th", context.q[:, :3], context.k[0, :num_tokens].astype(np.float32)))
    assert scores.max() > 1e4
    assert np.isfinite(result).all()
    assert np.abs(result - context.expected()).max() < 0.05  # scores in float have an ulp of 0.004 there


shapes = st.builds(
    lambda kv, group, dim, window: AttentionShape(kv * group, kv, dim, window=window),
    st.integers(1, 16),
    st.integers(1, 8),
    st.sampled_from([32, 64, 128]),
    st.none() | st.integers(1, 9000),
)


targets = st.builds(AttentionTarget, st.integers(1, 64), st.sampled_from(["cpu", "gpu"]), st.booleans())


@given(shapes, st.integers(1, 512), st.integers(0, 8000), targets)
def test_plan_covers_everything_once(shape, num_tokens, position, target):
    context = position + num_tokens
    plan = plan_attention(shape, target, num_tokens=num_tokens, context_tokens=context)
    first = 0 if shape.window is None else max(position - shape.window + 1, 0)  # that any token sees
    chunks = -(-context // 256) - first // 256
    assert plan.first_chunk == first // 256
    assert (plan.num_tiles - 1) * plan.tile_tokens < num_tokens <= plan.num_tiles * plan.tile_tokens
    last = first // 256 + chunks - plan.launches[-1]  # chunks of the last launch
    if target.chunk_arguments:
        assert last <= 8
        assert len(plan.launches) == 1 or plan.num_splits * plan.split_chunks == 8
    else:
        assert len(plan.launches) == 1
        assert (plan.num_splits - 1) * plan.split_chunks < last
    assert 0 < last <= plan.num_splits * plan.split_chunks


@example(SMOLLM2, 1, 1280, AttentionTarget(3), 1, 1024)  # four chunks in four splits, five only in three
@given(shapes, st.integers(1, 64), st.integers(64, 4000), targets, st.integers(1, 64), st.integers(1, 4000))
def test_partials_have_room(shape, tokens_max, context_max, target, num_tokens, context):
    num_tokens = min(num_tokens, tokens_max, context)
    context = min(context, context_max)
    plan = plan_attention(shape, target, num_tokens=num_tokens, context_tokens=context)
    room = partials_bytes(shape, target, tokens_max=tokens_max, context_tokens_max=context_max)
    if plan.num_splits > 1 or len(plan.launches) > 1:
        assert plan.num_splits * num_tokens * shape.num_heads * (2 + shape.head_dim) * 4 <= room
