"""Scratch memory: what lives at the same time never overlaps."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mzd.device.step_buffers import StepLimits, place

sizes = st.lists(st.integers(0, 10_000), min_size=1, max_size=5)


def named(prefix, sizes):
    return {f"{prefix}{i}": size for i, size in enumerate(sizes)}


@given(sizes, st.lists(sizes, min_size=1, max_size=3))
def test_buffers_of_one_moment_do_not_overlap(kept, phases):
    kept = named("kept", kept)
    phases = [named(f"phase{i}.", phase) for i, phase in enumerate(phases)]
    offsets, size_bytes = place(kept, phases)
    for phase in phases:
        ranges = sorted((offsets[name], offsets[name] + size) for name, size in (kept | phase).items())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
        assert ranges[-1][1] <= size_bytes
    assert all(offset % 128 == 0 for offset in offsets.values())


@given(sizes, st.lists(sizes, min_size=1, max_size=3))
def test_phases_share_their_memory(kept, phases):
    _, size_bytes = place(named("kept", kept), [named(f"phase{i}.", p) for i, p in enumerate(phases)])
    rounded = [sum(-(-size // 128) * 128 for size in row) for row in (kept, *phases)]
    assert size_bytes == rounded[0] + max(rounded[1:])


def test_chunks_of_the_longest_context():
    assert StepLimits(tokens=1, context_tokens=256, logit_rows=1).chunks == 1
    assert StepLimits(tokens=1, context_tokens=257, logit_rows=1).chunks == 2
