"""Owns a seeded llama model with more and larger units than the fixtures have, made when a test needs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

TOKENIZER_FIELDS = ("tokens", "token_type", "merges")


@dataclass(frozen=True)
class Shape:
    """A model's sizes. With these a chunk has 128 KiB, a weight layer 320 KiB, all KV of a context 6 MiB."""

    num_layers: int = 6
    hidden: int = 128
    ffn: int = 256
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    context: int = 2048


def write_model(path: Path, tokenizer_from: Path, shape: Shape, *, seed: int) -> None:
    """Write a GGUF file of random F16 weights with the tokenizer of another file."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    _write_sizes(writer, shape)
    vocab = _copy_tokenizer(writer, gguf.GGUFReader(tokenizer_from))

    def matrix(name: str, rows: int, cols: int, scale: float = 1.0) -> None:
        values = rng.standard_normal((rows, cols)) * scale / np.sqrt(cols)
        writer.add_tensor(name, values.astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(name, rng.uniform(0.5, 1.5, shape.hidden).astype(np.float32))

    matrix("token_embd.weight", vocab, shape.hidden, 8.0)
    for layer in range(shape.num_layers):
        kv = shape.kv_heads * shape.head_dim
        matrix(f"blk.{layer}.attn_q.weight", shape.heads * shape.head_dim, shape.hidden, 2.0)
        matrix(f"blk.{layer}.attn_k.weight", kv, shape.hidden, 2.0)
        matrix(f"blk.{layer}.attn_v.weight", kv, shape.hidden)
        matrix(f"blk.{layer}.attn_output.weight", shape.hidden, shape.heads * shape.head_dim)
        matrix(f"blk.{layer}.ffn_gate.weight", shape.ffn, shape.hidden)
        matrix(f"blk.{layer}.ffn_up.weight", shape.ffn, shape.hidden)
        matrix(f"blk.{layer}.ffn_down.weight", shape.hidden, shape.ffn)
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
    norm("output_norm.weight")
    matrix("output.weight", vocab, shape.hidden, 4.0)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def _write_sizes(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name("synthetic llama")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)


def _copy_tokenizer(writer: gguf.GGUFWriter, reader: gguf.GGUFReader) -> int:
    """Copy the tokenizer's fields; returns the size of the vocabulary."""
    tokens, types, merges = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in TOKENIZER_FIELDS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(4)
    writer.add_vocab_size(len(tokens))
    return len(tokens)
