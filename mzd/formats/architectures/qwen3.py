"""Owns the description of qwen3: the dense models of Qwen 3."""

from mzd.formats.architectures.description import Architecture

QWEN3 = Architecture(rope_style="halves", qk_norm=True)
