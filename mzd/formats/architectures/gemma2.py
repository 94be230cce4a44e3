"""Owns the description of gemma2: Gemma 2 of 2B, 9B and 27B."""

from mzd.formats.architectures.description import Architecture, SlidingWindow

# Converters store norm weights as 1 + w, so norms are the usual ones.
GEMMA2 = Architecture(
    rope_style="halves",
    norms="both",
    activation="gelu_tanh",
    scales_embedding=True,
    attention_softcap=50.0,
    logit_softcap=30.0,
    sliding=SlidingWindow(pattern=(True, False), default_tokens=4096),
    wide_query_layers=frozenset({46}),  # the 27B
)
