"""Import: weights come back as the gguf package reads them, checksums are true, failures leave nothing."""

import errno
import hashlib
import os
import stat
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from mzd import _native
from mzd.errors import FormatError, MzdError
from mzd.formats.architectures import TensorRule
from mzd.formats.ggml_types import GgmlType
from mzd.formats.weight_layout import unpack
from mzd.formats.weight_store import model_id
from mzd.model import importer
from mzd.model.importer import import_gguf
from mzd.model.weight_store import WeightStore
from tests.formats.gguf_files import ARRAY, STRING, U32, Array, Gguf, Tensor, tiny_llama

FIXTURES = Path(__file__).parents[1] / "fixtures"
MODELS = [
    "llama2l-F32",
    "llama-F16",
    "llama-BF16",
    "llama-Q8_0",
    "llama-Q4_0",
    "llama-Q4_1",
    "qwen2-Q4_1",
    "gemma3-Q4_0",
]
MODELS += ["llamawide-Q4_K", "llamawide-Q5_K", "llamawide-Q6_K"]


@pytest.fixture(params=MODELS)
def source(request):
    return FIXTURES / f"{request.param}.gguf"


def values(spec, data):
    """Float32 values of a tensor out of its unit's bytes."""
    raw = data[spec.offset_bytes : spec.offset_bytes + spec.size_bytes]
    if spec.rows == 1:
        return raw.view("<f4")
    return unpack(spec.type, raw, spec.rows, spec.cols)


def expected_values(path):
    """Float32 values by tensor name, as the gguf package reads them."""
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors}


def units(store_path, index):
    """(name prefix in the GGUF file, extent, its bytes) of every unit."""
    data = np.fromfile(store_path, np.uint8)
    named = [(f"blk.{number}.", unit) for number, unit in enumerate(index.layers)] + [("", index.head)]
    return [(name, u, data[u.offset_bytes : u.offset_bytes + u.size_bytes]) for name, u in named]


def left_over(directory):
    """What an import left behind, temporary files included."""
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("slice_bytes", [1, 10_000, importer.SLICE_BYTES])
def test_every_weight_comes_back(source, tmp_path, monkeypatch, slice_bytes):
    monkeypatch.setattr(importer, "SLICE_BYTES", slice_bytes)
    index = import_gguf(source, tmp_path / "weights.mzw")
    expected = expected_values(source)
    expected.pop("rope_freqs.weight", None)
    for prefix, unit, data in units(tmp_path / "weights.mzw", index):
        for spec in unit.tensors:
            weights = expected.pop(prefix + TensorRule(spec.role, ()).file_name)
            assert np.array_equal(values(spec, data), weights), spec.role
    assert not expected  # each tensor has its place


def test_checksums_cover_whole_extents_and_padding_is_zero(source, tmp_path):
    index = import_gguf(source, tmp_path / "weights.mzw")
    for _, unit, data in units(tmp_path / "weights.mzw", index):
        assert _native.crc32c_buffer(data) == unit.crc32c
        used = np.zeros(unit.size_bytes, bool)
        for spec in unit.tensors:
            used[spec.offset_bytes : spec.offset_bytes + spec.size_bytes] = True
        assert not data[~used].any()


def test_checksums_cover_gaps_between_tensors(tmp_path):
    """A norm of 40 weights is no multiple of 64 bytes: zeros lie behind it."""
    (tmp_path / "a.gguf").write_bytes(tiny_llama(hidden=40).to_bytes())
    index = import_gguf(tmp_path / "a.gguf", tmp_path / "a.mzw")
    assert index.layers[0].tensor("attn_q").offset_bytes > index.layers[0].tensor("attn_norm").size_bytes
    for _, unit, data in units(tmp_path / "a.mzw", index):
        assert _native.crc32c_buffer(data) == unit.crc32c


def test_the_index_tells_the_source(tmp_path):
    source = FIXTURES / "llama-Q4_1.gguf"
    index = import_gguf(source, tmp_path / "weights.mzw")
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    assert index.source.name == "llama-Q4_1.gguf"
    assert index.source.size_bytes == source.stat().st_size
    assert index.source.sha256 == sha256
    assert index.model_id == model_id(sha256)
    assert index.config.ropes[0].freq_factors is not None
    assert len(index.tokenizer["tokenizer.ggml.tokens"]) == 320
    assert "tokenizer.chat_template" in index.tokenizer
    with WeightStore.open(tmp_path / "weights.mzw") as store:
        assert store.index == index


def test_the_same_source_makes_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        import_gguf(FIXTURES / "llama-Q8_0.gguf", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_files_are_private_and_directories_are_made(tmp_path):
    path = tmp_path / "new" / "weights.mzw"
    import_gguf(FIXTURES / "llama-Q4_0.gguf", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert left_over(path.parent) == ["weights.mzw"]


def test_half_precision_norms_become_float32(tmp_path):
    file = tiny_llama().with_tensor("output_norm.weight", type=GgmlType.F16)
    data = bytearray(file.to_bytes())
    norm = np.arange(32, dtype="<f2")
    data[-64:] = norm.tobytes()
    (tmp_path / "a.gguf").write_bytes(data)
    index = import_gguf(tmp_path / "a.gguf", tmp_path / "a.mzw")
    (_, unit, head) = units(tmp_path / "a.mzw", index)[-1]
    assert np.array_equal(values(unit.tensor("output_norm"), head), norm.astype(np.float32))


def test_a_file_without_a_tokenizer_can_be_computed(tmp_path):
    """For measurements; `mzd serve` asks for one."""
    file = tiny_llama()
    metadata = {key: value for key, value in file.metadata.items() if not key.startswith("tokenizer.")}
    (tmp_path / "a.gguf").write_bytes(Gguf(metadata, file.tensors).to_bytes())
    assert import_gguf(tmp_path / "a.gguf", tmp_path / "w").tokenizer == {}


def test_progress_ends_with_the_whole_file_and_never_goes_back(tmp_path):
    source = FIXTURES / "llama-F16.gguf"
    told = []
    import_gguf(source, tmp_path / "w", progress=lambda done, total: told.append((done, total)))
    size = source.stat().st_size
    assert told[-1] == (size, size)
    assert told == sorted(told)


def test_memory_does_not_grow_with_the_matrix(tmp_path, monkeypatch):
    """An embedding of 20 MB in slices of 100 kB: far less than the matrix is ever held."""
    monkeypatch.setattr(importer, "SLICE_BYTES", 100_000)
    file = tiny_llama(vocab=320_000)
    (tmp_path / "a.gguf").write_bytes(file.to_bytes())
    tracemalloc.start()
    import_gguf(tmp_path / "a.gguf", tmp_path / "a.mzw")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 6_000_000  # reads of 4 MiB between tensors, and a few slices


class TestRefusedSources:
    def test_models_that_cannot_be_computed(self, tmp_path):
        file = tiny_llama().with_metadata(general__architecture=(STRING, "mamba"))
        (tmp_path / "a.gguf").write_bytes(file.to_bytes())
        with pytest.raises(FormatError, match="'mamba'") as caught:
            import_gguf(tmp_path / "a.gguf", tmp_path / "w")
        assert caught.value.code == "unsupported_architecture"
        assert left_over(tmp_path) == ["a.gguf"]

    def test_types_that_cannot_be_computed(self, tmp_path):
        file = tiny_llama(matrix_type=GgmlType.IQ4_NL)
        (tmp_path / "a.gguf").write_bytes(file.to_bytes())
        with pytest.raises(FormatError, match="IQ4_NL") as caught:
            import_gguf(tmp_path / "a.gguf", tmp_path / "w")
        assert caught.value.code == "unsupported_type"
        assert left_over(tmp_path) == ["a.gguf"]

    def test_files_that_are_missing_or_no_files(self, tmp_path):
        os.mkfifo(tmp_path / "fifo")
        for path, code in (("none", "not_found"), (".", "invalid_model"), ("fifo", "invalid_model")):
            with pytest.raises(MzdError) as caught:
                import_gguf(tmp_path / path, tmp_path / "w")
            assert caught.value.code == code
            assert str(tmp_path) in caught.value.message

    @pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
    def test_truncated_files(self, kept, tmp_path):
        data = (FIXTURES / "llama-Q8_0.gguf").read_bytes()
        (tmp_path / "cut.gguf").write_bytes(data[: int(len(data) * kept)])
        with pytest.raises(FormatError) as caught:
            import_gguf(tmp_path / "cut.gguf", tmp_path / "w")
        assert caught.value.code == "invalid_model"
        assert left_over(tmp_path) == ["cut.gguf"]

    @pytest.mark.parametrize("role", ["bos", "eos", "eot", "unknown", "padding"])
    def test_roles_for_tokens_that_are_not_there(self, role, tmp_path):
        file = tiny_llama().with_metadata(**{f"tokenizer__ggml__{role}_token_id": (U32, 8)})
        assert self.refusal_of_tokenizer(file, tmp_path) == f"tokenizer.ggml.{role}_token_id"

    def test_case_127_byte_pairs_without_merges(self, tmp_path):
        file = tiny_llama().with_metadata(tokenizer__ggml__merges=None)
        assert self.refusal_of_tokenizer(file, tmp_path) == "tokenizer.ggml.merges"

    def test_merges_that_lead_to_no_token(self, tmp_path):
        file = tiny_llama().with_metadata(tokenizer__ggml__merges=(ARRAY, Array(STRING, ("a b",))))
        assert self.refusal_of_tokenizer(file, tmp_path) == "tokenizer.ggml.merges"

    def refusal_of_tokenizer(self, file, tmp_path):
        """The key that the refusal names."""
        path = tmp_path / "a.gguf"
        path.write_bytes(file.to_bytes())
        with pytest.raises(FormatError) as caught:
            import_gguf(path, tmp_path / "w")
        assert caught.value.code == "invalid_model"
        assert caught.value.data["path"] == str(path)
        assert caught.value.data["key"] in caught.value.message
        assert caught.value.message.startswith(str(path))
        assert left_over(tmp_path) == ["a.gguf"]
        return caught.value.data["key"]

    def test_rope_factors_of_another_type(self, tmp_path):
        file = tiny_llama()
        file = Gguf(file.metadata, (*file.tensors, Tensor("rope_freqs.weight", (8,), GgmlType.F16)))
        (tmp_path / "a.gguf").write_bytes(file.to_bytes())
        with pytest.raises(FormatError, match=r"rope_freqs\.weight") as caught:
            import_gguf(tmp_path / "a.gguf", tmp_path / "w")
        assert caught.value.code == "unsupported_type"


class TestFailuresMidway:
    """The store that was there stays; nothing else is left."""

    @pytest.fixture
    def source(self, tmp_path):
        path = tmp_path / "source" / "a.gguf"
        path.parent.mkdir()
        path.write_bytes((FIXTURES / "llama-Q8_0.gguf").read_bytes())
        return path

    @pytest.fixture
    def store_path(self, tmp_path):
        path = tmp_path / "models" / "weights.mzw"
        path.parent.mkdir()
        path.write_bytes(b"the store before")
        return path

    @pytest.fixture(autouse=True)
    def _nothing_left(self, store_path):
        yield
        assert left_over(store_path.parent) == ["weights.mzw"]
        assert store_path.read_bytes() == b"the store before"

    def test_a_disk_that_is_full_from_the_start(self, source, store_path, monkeypatch):
        def full(fd, offset, size):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(MzdError, match="No space left on device") as caught:
            import_gguf(source, store_path)
        assert caught.value.code == "weights_unavailable"
        assert caught.value.data["needed_bytes"] > 200_000

    @pytest.mark.parametrize("nth", [1, 5, 30])
    def test_a_disk_that_becomes_full(self, nth, source, store_path, monkeypatch):
        """Where space cannot be reserved, writing finds out."""
        writes = iter(range(1, 1000))
        pwrite = os.pwrite

        def fails_at_nth(fd, data, offset):
            if next(writes) >= nth:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwrite(fd, data, offset)

        def unsupported(fd, offset, size):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(os, "posix_fallocate", unsupported)
        monkeypatch.setattr(os, "pwrite", fails_at_nth)
        with pytest.raises(MzdError, match="No space left on device"):
            import_gguf(source, store_path)

    def test_a_disk_that_fails_at_the_end(self, source, store_path, monkeypatch):
        def fails(fd):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", fails)
        with pytest.raises(MzdError, match="Input/output error"):
            import_gguf(source, store_path)

    def test_a_source_that_shrinks_meanwhile(self, source, store_path):
        def cut(done, total):
            os.truncate(source, 20_000)

        with pytest.raises(MzdError, match="ended at byte 20000") as caught:
            import_gguf(source, store_path, progress=cut)
        assert caught.value.code == "model_changed"

    def test_a_source_that_is_written_to_meanwhile(self, source, store_path):
        def touch(done, total):
            os.utime(source, ns=(0, done))

        with pytest.raises(MzdError, match="was written to") as caught:
            import_gguf(source, store_path, progress=touch)
        assert caught.value.code == "model_changed"

    def test_a_source_that_cannot_be_read(self, source, store_path, monkeypatch):
        pread = os.pread

        def bad_sector(fd, size, offset):
            if offset > 100_000:
                raise OSError(errno.EIO, "Input/output error")
            return pread(fd, size, offset)

        monkeypatch.setattr(os, "pread", bad_sector)
        with pytest.raises(FormatError, match="cannot be read at byte"):
            import_gguf(source, store_path)

    def test_progress_may_stop_it(self, source, store_path):
        def stop(done, total):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            import_gguf(source, store_path, progress=stop)


def test_short_reads_and_writes_change_nothing(tmp_path, monkeypatch):
    import_gguf(FIXTURES / "llama-Q4_1.gguf", tmp_path / "whole")
    pread, pwrite = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, max(size // 3, 1), offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: max(len(data) // 3, 1)], at))
    import_gguf(FIXTURES / "llama-Q4_1.gguf", tmp_path / "pieces")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_norms_that_are_no_finite_numbers_are_refused(tmp_path, value):
    data = bytearray((FIXTURES / "llama-F16.gguf").read_bytes())
    norm = next(
        t for t in gguf.GGUFReader(FIXTURES / "llama-F16.gguf").tensors if t.name.endswith("ffn_norm.weight")
    )
    data[norm.data_offset : norm.data_offset + 4] = np.float32(value).tobytes()
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(FormatError, match="ffn_norm") as caught:
        import_gguf(tmp_path / "bad.gguf", tmp_path / "weights.mzw")
    assert caught.value.code == "invalid_model"
    assert left_over(tmp_path) == ["bad.gguf"]
