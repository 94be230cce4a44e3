"""Owns the description of gemma3: the text part of Gemma 3, of 270M to 27B."""

from mzd.formats.architectures.description import Architecture, SlidingWindow

# Converters store norm weights as 1 + w, so norms are the usual ones.
GEMMA3 = Architecture(
    rope_style="halves",
    norms="both",
    qk_norm=True,
    activation="gelu_tanh",
    scales_embedding=True,
    sliding=SlidingWindow(pattern=(True,) * 5 + (False,), rope_base=10_000.0),
    wide_query_layers=frozenset({62}),  # the 27B
)
