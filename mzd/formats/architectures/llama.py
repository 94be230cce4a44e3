"""Owns the description of llama: Llama 3.2, SmolLM2 and their kin."""

from mzd.formats.architectures.description import Architecture

# Converters permute the rows of Q and K, so that neighbours rotate together.
LLAMA = Architecture(rope_style="pairs")
