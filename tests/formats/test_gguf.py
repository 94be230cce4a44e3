"""The GGUF reader: right files as the gguf package reads them, wrong ones refused before they cost."""

import io
import struct
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mzd.errors import FormatError
from mzd.formats.ggml_types import GgmlType
from mzd.formats.gguf import ARRAY_ITEMS_MAX, HEADER_BYTES_MAX, TENSORS_MAX, parse_gguf
from tests.formats.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Array,
    Gguf,
    Tensor,
    parse,
    string,
    tiny_llama,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
FILES = sorted(FIXTURES.glob("*.gguf"), key=lambda path: path.name)


def refusal(data, code="invalid_model"):
    """The error that `data` gets; it names the file, its size and its first bytes."""
    with pytest.raises(FormatError) as caught:
        parse(data, name="/models/bad.gguf")
    assert caught.value.code == code
    assert "/models/bad.gguf" in caught.value.message
    if code == "invalid_model":
        assert f"{len(data)} bytes" in caught.value.message
        assert (data[:4].hex(" ") or "none") in caught.value.message
    return caught.value.message


class TestRightFiles:
    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
    def test_headers_agree_with_the_gguf_package(self, path):
        found = parse(path.read_bytes(), name=str(path))
        oracle = gguf.GGUFReader(path)
        fields = {key: f for key, f in oracle.fields.items() if not key.startswith("GGUF.")}
        assert list(found.metadata) == list(fields)
        for key, expected in fields.items():
            value = found.metadata[key]
            assert (list(value) if isinstance(value, tuple) else value) == expected.contents(), key
        assert found.version == 3
        assert found.alignment == oracle.alignment
        assert found.data_offset_bytes == oracle.data_offset
        assert list(found.tensors) == [tensor.name for tensor in oracle.tensors]
        for tensor in oracle.tensors:
            mine = found.tensors[tensor.name]
            assert mine.dims == tuple(int(dim) for dim in tensor.shape)
            assert (mine.type, mine.offset_bytes, mine.size_bytes) == (
                tensor.tensor_type,
                tensor.data_offset,
                tensor.n_bytes,
            )
            assert mine.cols * mine.rows == tensor.n_elements

    def test_version_2_reads_like_version_3(self):
        data = tiny_llama().to_bytes()
        old = data[:4] + struct.pack("<I", 2) + data[8:]
        assert parse(old).version == 2
        assert parse(old).metadata == parse(data).metadata
        assert parse(old).tensors == parse(data).tensors

    def test_every_type_of_metadata(self):
        pairs = {
            "u8": (U8, 255),
            "i8": (I8, -128),
            "u16": (U16, 65535),
            "u32": (U32, 2**32 - 1),
            "u64": (U64, 2**64 - 1),
            "i64": (I64, -(2**63)),
            "f32": (F32, 0.5),
            "f64": (F64, 0.1),
            "yes": (BOOL, 1),
            "text": (STRING, "ä😀"),
            "none": (STRING, ""),
            "bools": (ARRAY, Array(BOOL, (0, 1))),
            "texts": (ARRAY, Array(STRING, ("", "x", "ü"))),
            "empty": (ARRAY, Array(U32, ())),
        }
        expected = {key: value for key, (_, value) in pairs.items()}
        expected |= {"yes": True, "bools": (False, True), "texts": ("", "x", "ü"), "empty": ()}
        metadata = parse(Gguf(pairs).to_bytes()).metadata
        assert metadata == expected
        assert metadata["yes"] is True

    def test_alignment_and_gaps_between_tensors_are_kept(self):
        tensors = (Tensor("b", (8, 2), offset=256), Tensor("a", (8, 1), offset=0))
        file = Gguf({"general.alignment": (U32, 128)}, tensors, alignment=128)
        found = parse(file.to_bytes() + bytes(512))
        assert found.alignment == 128
        assert found.data_offset_bytes % 128 == 0
        assert found.tensors["a"].offset_bytes == found.data_offset_bytes
        assert found.tensors["b"].offset_bytes == found.data_offset_bytes + 256
        assert list(found.tensors) == ["b", "a"]

    def test_a_large_vocabulary_crosses_many_buffers(self):
        tokens = tuple(f"token-{i}" * (i % 40) for i in range(150_000))
        data = Gguf({"tokens": (ARRAY, Array(STRING, tokens))}).to_bytes()
        reads = []

        def read_at(offset, size):
            reads.append(size)
            return data[offset : offset + size]

        assert parse_gguf(read_at, len(data), name="x").metadata["tokens"] == tokens
        assert len(reads) < len(data) / 100_000  # the buffer works; no read a string

    def test_a_string_larger_than_the_buffer(self):
        text = "x" * 1_000_000
        assert parse(Gguf({"text": (STRING, text)}).to_bytes()).metadata["text"] == text


class TestOtherFiles:
    @pytest.mark.parametrize("size", range(65))
    def test_case_109_files_of_every_small_size(self, size):
        refusal(b"GGUF"[:size])
        refusal(tiny_llama().to_bytes()[:size])
        refusal(bytes(size))
        refusal((b"GGUF" + b"\xff" * 60)[:size])
        refusal((b"GGUF\x03\0\0\0" + b"\xff" * 60)[:size])

    def test_case_120_what_the_file_looks_like(self):
        wheel = io.BytesIO()
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("a", "b")
        assert "zip archive" in refusal(wheel.getvalue())
        assert "HTML page" in refusal(b"\n<!DOCTYPE html><html><body>404 Not Found")
        assert "HTML page" in refusal(b"<html>\n<head>")
        assert "JSON" in refusal(b'{"error": "Repository not found"}')
        assert "Git LFS pointer" in refusal(b"version https://git-lfs.github.com/spec/v1\noid sha256:")
        assert "safetensors" in refusal(struct.pack("<Q", 40) + b'{"__metadata__":{}}' + bytes(40))
        assert "before GGUF" in refusal(b"tjgg" + bytes(30))
        assert "an empty file" in refusal(b"")
        assert "unfinished download" in refusal(bytes(4096))
        assert "other kind" in refusal(b"\x7fELF" + bytes(60))

    def test_case_124_a_refusal_has_path_size_and_first_bytes(self):
        assert refusal(b"\x7fELF\x02\x01\x01").startswith("/models/bad.gguf")
        assert "7 bytes" in refusal(b"\x7fELF\x02\x01\x01")
        assert "7f 45 4c 46 02 01 01" in refusal(b"\x7fELF\x02\x01\x01")
        assert "none" in refusal(b"")

    @pytest.mark.parametrize("number", [0, 4, 17])
    def test_unknown_versions_are_told(self, number):
        assert f"version {number}" in refusal(Gguf(version=number).to_bytes())

    def test_version_1_is_too_old(self):
        assert "too old" in refusal(Gguf(version=1).to_bytes())

    @pytest.mark.parametrize("number", [2, 3])
    def test_big_endian_is_told(self, number):
        data = b"GGUF" + struct.pack(">IQQ", number, 0, 0)
        assert "big-endian" in refusal(data)


class TestHostileHeaders:
    @pytest.mark.parametrize("count", [100, 1000, 2**31, 2**63, 2**64 - 1])
    def test_case_111_counts_are_bounded_by_the_file(self, count):
        refusal(Gguf(num_tensors=count).to_bytes())
        refusal(Gguf(num_pairs=count).to_bytes())
        for type in (U8, U32, U64, F32, STRING):
            refusal(Gguf({"a": (ARRAY, Array(type, (), count=count))}).to_bytes())
        lying = string("key") + struct.pack("<IQ", STRING, count)
        refusal(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + lying)

    @pytest.mark.parametrize(("type", "item_bytes"), [(U8, 1), (F64, 8), (STRING, 8)])
    def test_a_count_is_refused_before_the_first_item_is_read(self, type, item_bytes):
        file = Gguf({"a": (ARRAY, Array(type, bytes(800), count=1000))})
        left_bytes = len(file.to_bytes()) - 49  # magic, version, two counts; key, two types, count
        assert f"'a' at byte 49 needs {1000 * item_bytes} bytes, {left_bytes} are left" in refusal(
            file.to_bytes()
        )

    def test_case_111_a_small_file_costs_little(self):
        """160 bytes that announce gigabytes."""
        files = [
            Gguf({"a": (ARRAY, Array(type, (), count=count))}).to_bytes().ljust(160, b"\0")
            for type in (U8, F32, STRING)
            for count in (2**20, 2**31, 2**40)
        ]
        tracemalloc.start()
        for data in files:
            refusal(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 1024**2

    def test_a_huge_sparse_file_costs_no_more_than_a_model(self):
        """A header must end within a bound, however large the file says it is."""
        head = Gguf({"a": (ARRAY, Array(U8, (), count=2**40))}).header()
        largest = 0

        def read_at(offset, size):
            nonlocal largest
            largest = max(largest, size)
            return head[offset : offset + size].ljust(size, b"\0")

        with pytest.raises(FormatError):
            parse_gguf(read_at, 2**50, name="sparse")
        assert largest <= HEADER_BYTES_MAX

    def test_array_items_are_bounded_together(self):
        half = Array(U8, bytes(ARRAY_ITEMS_MAX // 2 + 1))
        file = Gguf({"a": (ARRAY, half), "b": (ARRAY, half)})
        assert "all arrays together" in refusal(file.to_bytes())

    def test_a_file_that_shrinks_meanwhile_is_told(self):
        data = tiny_llama().to_bytes()
        with pytest.raises(FormatError, match="ended early"):
            parse_gguf(lambda offset, size: data[:300][offset : offset + size], len(data), name="x")

    def test_absurd_tensor_counts_are_refused_whatever_the_file_size(self):
        head = Gguf(num_tensors=TENSORS_MAX + 1).header()
        with pytest.raises(FormatError, match="beyond any model"):
            parse_gguf(lambda o, s: head[o : o + s].ljust(s, b"\0"), 2**40, name="x")

    @pytest.mark.parametrize(("position", "num_dims"), [(p, n) for n in range(1, 5) for p in range(n)])
    def test_case_112_dimension_zero_names_the_tensor(self, position, num_dims):
        dims = tuple(0 if i == position else 32 for i in range(num_dims))
        file = Gguf({}, (Tensor("bad.weight", dims, offset=0),))
        assert "'bad.weight' has a dimension of zero" in refusal(file.header() + bytes(4096))

    @pytest.mark.parametrize("num_dims", [0, 5, 1_000_000, 2**32 - 1])
    def test_case_114_numbers_of_dimensions_are_bounded(self, num_dims):
        table = string("bad.weight") + struct.pack("<I", num_dims) + bytes(64)
        data = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + table
        message = refusal(data)
        assert f"{num_dims} dimensions" in message
        assert "'bad.weight'" in message

    @pytest.mark.parametrize("dims", [(2**32, 2**32), (2**63, 2), (32, 2**64 - 1, 2**64 - 1, 2**64 - 1)])
    def test_case_114_products_that_wrap_64_bits_are_past_the_end(self, dims):
        file = Gguf({}, (Tensor("wrap", dims, offset=0),))
        assert "'wrap'" in refusal(file.header() + bytes(64))

    def test_case_117_tensors_past_the_end_are_named_and_incomplete(self):
        data = tiny_llama().to_bytes()
        message = refusal(data[:-128])
        assert "'output_norm.weight'" in message
        assert "incomplete" in message
        refusal(Gguf({}, (Tensor("far", (8,), offset=2**63),)).header() + bytes(64))

    def test_case_117_overlapping_tensors_are_refused_by_name(self):
        file = Gguf({}, (Tensor("a", (16,), offset=0), Tensor("b", (16,), offset=32)))
        assert "'a' and 'b' overlap" in refusal(file.header() + bytes(4096))

    def test_unaligned_tensors_are_refused(self):
        file = Gguf({}, (Tensor("a", (8,), offset=4),))
        assert "multiple of 32" in refusal(file.header() + bytes(4096))

    @pytest.mark.parametrize("value", [(U32, 0), (U32, 24), (STRING, "32"), (F32, 32.0), (BOOL, 1)])
    def test_alignment_is_a_power_of_two(self, value):
        assert "general.alignment" in refusal(Gguf({"general.alignment": value}).to_bytes())

    def test_names_there_twice_are_refused(self):
        twice = (Tensor("a", (8,)), Tensor("a", (8,)))
        assert "'a' is there twice" in refusal(Gguf({}, twice).to_bytes())
        pair = string("key") + struct.pack("<II", U32, 1)
        data = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair + pair
        assert "'key' is there twice" in refusal(data)

    def test_unknown_tensor_types_are_unsupported_and_named(self):
        file = Gguf({}, (Tensor("a.weight", (32,), type=250, offset=0),))
        message = refusal(file.header() + bytes(4096), code="unsupported_type")
        assert "'a.weight'" in message
        assert "250" in message

    def test_rows_that_are_no_whole_blocks_are_refused(self):
        file = Gguf({}, (Tensor("a", (48, 2), type=GgmlType.Q8_0, offset=0),))
        assert "not a multiple of Q8_0's 32" in refusal(file.header() + bytes(4096))

    def test_arrays_of_arrays_are_refused(self):
        inner = struct.pack("<IQ", ARRAY, 1)
        data = (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("deep") + struct.pack("<I", ARRAY) + inner * 1000
        )
        assert "array of arrays" in refusal(data)

    def test_unknown_metadata_types_name_the_key(self):
        assert "'odd' has the unknown type 77" in refusal(Gguf({"odd": (77, 1)}).to_bytes())

    def test_booleans_are_0_or_1(self):
        assert "boolean" in refusal(Gguf({"flag": (BOOL, 2)}).to_bytes())

    @pytest.mark.parametrize("text", [b"\xff\xfe", b"a\xc3"])
    def test_text_that_is_not_utf8_is_refused(self, text):
        assert "UTF-8" in refusal(Gguf({"text": (STRING, text)}).to_bytes())
        assert "UTF-8" in refusal(Gguf({"texts": (ARRAY, Array(STRING, ("a", text)))}).to_bytes())
        assert "UTF-8" in refusal(Gguf({text: (U8, 1)}).to_bytes())

    def test_names_in_messages_are_printable_and_short(self):
        file = Gguf({}, (Tensor("\x1b[31m\n" + "x" * 5000, (0,), offset=0),))
        message = refusal(file.header())
        assert "\x1b" not in message
        assert "\n" not in message
        assert len(message) < 400


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_behind_the_magic_are_refused(tail):
    data = b"GGUF\x03\0\0\0" + tail
    with suppress(FormatError):
        assert not parse(data).tensors  # only files without tensors come through


def test_a_tensor_is_where_its_bytes_are():
    """Offsets are absolute: the bytes there are those that the gguf package reads."""
    path = FIXTURES / "llama-Q8_0.gguf"
    data = path.read_bytes()
    found = parse(data)
    for tensor in gguf.GGUFReader(path).tensors:
        mine = found.tensors[tensor.name]
        raw = np.frombuffer(data, np.uint8, mine.size_bytes, mine.offset_bytes)
        assert np.array_equal(raw, tensor.data.view(np.uint8).reshape(-1))
