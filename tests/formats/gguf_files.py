"""GGUF files made by hand, right or wrong in any field, so that each refusal can be provoked by itself."""

import struct
from dataclasses import dataclass, field, replace

from mzd.formats.ggml_types import GgmlType
from mzd.formats.gguf import parse_gguf

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q"}
_CODES[F64] = "d"


@dataclass(frozen=True)
class Array:
    """A metadata array, or its bytes; `count` lies about its length if given."""

    type: int
    items: tuple | bytes
    count: int | None = None


@dataclass(frozen=True)
class Tensor:
    """One entry of the tensor table."""

    name: str
    dims: tuple[int, ...]
    type: int = GgmlType.F32
    offset: int | None = None  # None: behind the tensor before

    @property
    def size_bytes(self):
        type = GgmlType(self.type)
        size = type.row_bytes(self.dims[0])
        for dim in self.dims[1:]:
            size *= dim
        return size


@dataclass(frozen=True)
class Gguf:
    """A file in parts. `metadata` maps a key to (type, value)."""

    metadata: dict = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()
    version: int = 3
    magic: bytes = b"GGUF"
    num_tensors: int | None = None
    num_pairs: int | None = None
    alignment: int = 32

    def with_metadata(self, **changes):
        """Other values for some keys, dots written as `__`; None leaves a key out."""
        named = {key.replace("__", "."): value for key, value in changes.items()}
        merged = {**self.metadata, **named}
        return replace(self, metadata={key: value for key, value in merged.items() if value is not None})

    def with_tensor(self, name, **changes):
        """One tensor changed; `dims=None` leaves it out."""
        tensors = [replace(t, **changes) if t.name == name else t for t in self.tensors]
        return replace(self, tensors=tuple(t for t in tensors if t.dims is not None))

    def header(self):
        pairs = b"".join(string(key) + value_bytes(*value) for key, value in self.metadata.items())
        num_pairs = len(self.metadata) if self.num_pairs is None else self.num_pairs
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        return self.magic + struct.pack("<IQQ", self.version, num_tensors, num_pairs) + pairs + self._table()

    def to_bytes(self):
        """The header, padded, and zeros for the tensors' data."""
        header = self.header()
        data_bytes = sum(aligned(t.size_bytes, self.alignment) for t in self.tensors)
        return header.ljust(aligned(len(header), self.alignment), b"\0") + bytes(data_bytes)

    def _table(self):
        table, end = b"", 0
        for tensor in self.tensors:
            offset = end if tensor.offset is None else tensor.offset
            table += string(tensor.name) + struct.pack("<I", len(tensor.dims))
            table += struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims)
            table += struct.pack("<IQ", tensor.type, offset)
            if tensor.offset is None:
                end = aligned(offset + tensor.size_bytes, self.alignment)
        return table


def aligned(size, alignment):
    return -(-size // alignment) * alignment


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value_bytes(type, value):
    if isinstance(value, Array):
        count = len(value.items) if value.count is None else value.count
        items = value.items
        if not isinstance(items, bytes):
            items = b"".join(item_bytes(value.type, item) for item in items)
        return struct.pack("<IIQ", ARRAY, value.type, count) + items
    return struct.pack("<I", type) + item_bytes(type, value)


def item_bytes(type, value):
    if type == STRING:
        return string(value)
    return struct.pack(f"<{_CODES.get(type, 'I')}", value)


def parse(data, name="test.gguf"):
    return parse_gguf(lambda offset, size: data[offset : offset + size], len(data), name=name)


def tiny_llama(*, layers=1, hidden=32, ffn=64, heads=2, kv_heads=1, vocab=8, matrix_type=GgmlType.F16):
    """The smallest whole llama: head_dim 16, tied output."""
    head_dim = hidden // heads
    shapes = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (hidden, kv_heads * head_dim),
        "attn_v": (hidden, kv_heads * head_dim),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (hidden, ffn),
        "ffn_up": (hidden, ffn),
        "ffn_down": (ffn, hidden),
    }
    tensors = [Tensor("token_embd.weight", (hidden, vocab), matrix_type)]
    for layer in range(layers):
        for role, dims in shapes.items():
            type = matrix_type if len(dims) == 2 else GgmlType.F32
            tensors.append(Tensor(f"blk.{layer}.{role}.weight", dims, type))
    tensors.append(Tensor("output_norm.weight", (hidden,)))
    metadata = {
        "general.architecture": (STRING, "llama"),
        "general.name": (STRING, "tiny"),
        "llama.block_count": (U32, layers),
        "llama.context_length": (U32, 128),
        "llama.embedding_length": (U32, hidden),
        "llama.feed_forward_length": (U32, ffn),
        "llama.attention.head_count": (U32, heads),
        "llama.attention.head_count_kv": (U32, kv_heads),
        "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.tokens": (ARRAY, Array(STRING, tuple("abcdefgh"))),
        "tokenizer.ggml.token_type": (ARRAY, Array(I32, (1,) * 8)),
        "tokenizer.ggml.merges": (ARRAY, Array(STRING, ())),
        "tokenizer.ggml.scores": (ARRAY, Array(F32, (0.5,) * 8)),
        "tokenizer.ggml.pre": (STRING, "gpt-2"),
    }
    return Gguf(metadata, tuple(tensors))
