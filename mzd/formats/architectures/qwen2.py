"""Owns the description of qwen2: Qwen 2 and 2.5."""

from mzd.formats.architectures.description import Architecture

QWEN2 = Architecture(rope_style="halves", qkv_bias=True)
