"""Owns the description of exaone4: EXAONE 4.0, of 1.2B with global layers only, of 32B with sliding ones."""

from mzd.formats.architectures.description import Architecture, SlidingWindow

EXAONE4 = Architecture(
    rope_style="halves",
    norms="after",
    qk_norm=True,
    sliding=SlidingWindow(pattern=(True, True, True, False), global_rope=False),
)
