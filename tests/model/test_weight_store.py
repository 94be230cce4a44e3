"""The open weight store: rows by themselves, direct reads, and what becomes of it under our feet."""

import errno
import mmap
import os
import shutil
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd import _native
from mzd.errors import FormatError, MzdError
from mzd.formats.weight_store import FORMAT_VERSION, StoreVersionError
from mzd.model import weight_store as module
from mzd.model.importer import import_gguf
from mzd.model.weight_store import WeightStore

FIXTURES = Path(__file__).parents[1] / "fixtures"
MODELS = ["llama2l-F32", "llama-F16", "llama-BF16", "llama-Q8_0", "llama-Q4_0", "llama-Q4_1"]
MODELS += ["llamawide-Q4_K", "llamawide-Q5_K", "llamawide-Q6_K"]


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Paths of the stores of all small models."""
    directory = tmp_path_factory.mktemp("stores")
    for name in MODELS:
        import_gguf(FIXTURES / f"{name}.gguf", directory / name)
    return {name: directory / name for name in MODELS}


@pytest.fixture
def path(imported, tmp_path):
    """A store to be ill-treated."""
    return Path(shutil.copy(imported["llama-Q4_1"], tmp_path / "weights.mzw"))


@pytest.fixture(scope="module")
def embedding():
    """The embedding of llama-Q4_1 as the gguf package reads it."""
    return matrix("llama-Q4_1", "token_embd.weight")


def matrix(model, name):
    (tensor,) = [t for t in gguf.GGUFReader(FIXTURES / f"{model}.gguf").tensors if t.name == name]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def refusal(path, code="weights_unavailable"):
    with pytest.raises(MzdError) as caught:
        WeightStore.open(path)
    assert caught.value.code == code
    assert str(path) in caught.value.message
    return caught.value


class TestRows:
    @pytest.mark.parametrize("model", MODELS)
    def test_all_rows_of_every_type(self, imported, model):
        with WeightStore.open(imported[model]) as store:
            rows = np.arange(320)
            assert np.array_equal(store.read_rows("token_embd", rows), matrix(model, "token_embd.weight"))
            if store.index.head.has("output"):
                assert np.array_equal(store.read_rows("output", rows), matrix(model, "output.weight"))

    @given(rows=st.lists(st.integers(0, 319), max_size=40))
    def test_any_order_and_repetition(self, imported, embedding, rows):
        with WeightStore.open(imported["llama-Q4_1"]) as store:
            found = store.read_rows("token_embd", rows)
            assert found.shape == (len(rows), 64)
            assert found.dtype == np.float32
            assert np.array_equal(found, embedding[np.array(rows, int)])

    @pytest.mark.parametrize("groups", [1, 3])
    def test_batches_meet_without_a_seam(self, imported, embedding, groups, monkeypatch):
        monkeypatch.setattr(module, "GROUPS_PER_BATCH", groups)
        rows = np.random.default_rng(0).integers(0, 320, 200)
        with WeightStore.open(imported["llama-Q4_1"]) as store:
            assert np.array_equal(store.read_rows("token_embd", rows), embedding[rows])

    def test_long_prompts_are_unpacked_in_batches(self, imported, monkeypatch):
        sizes = []
        unpack_blocks = module.unpack_blocks

        def watched(type, packed, rows, cols):
            sizes.append(rows)
            return unpack_blocks(type, packed, rows, cols)

        monkeypatch.setattr(module, "GROUPS_PER_BATCH", 3)
        monkeypatch.setattr(module, "unpack_blocks", watched)
        with WeightStore.open(imported["llama-Q4_1"]) as store:
            store.read_rows("token_embd", range(320))
        assert sizes == [24] * 13 + [8]

    def test_each_group_is_read_once(self, imported, monkeypatch):
        offsets = []
        pread = os.pread

        def counted(fd, size, offset):
            offsets.append(offset)
            return pread(fd, size, offset)

        with WeightStore.open(imported["llama-Q4_1"]) as store:
            monkeypatch.setattr(os, "pread", counted)
            store.read_rows("token_embd", [9, 300, 8, 9, 15, 0, 7])
        assert offsets == sorted(set(offsets))
        assert len(offsets) == 3

    @pytest.mark.parametrize("row", [-1, 320, 2**40])
    def test_rows_outside_are_refused(self, imported, row):
        with WeightStore.open(imported["llama-Q4_1"]) as store, pytest.raises(FormatError, match="of 320"):
            store.read_rows("token_embd", [0, row])

    def test_roles_that_are_not_there_are_refused(self, imported):
        with WeightStore.open(imported["llama2l-F32"]) as store, pytest.raises(FormatError, match="'output'"):
            store.read_rows("output", [0])

    def test_many_threads_read_at_once(self, imported, embedding):
        rows = np.random.default_rng(1).integers(0, 320, (8, 100))
        found = [None] * 8
        with WeightStore.open(imported["llama-Q4_1"]) as store:

            def read(i):
                found[i] = [store.read_rows("token_embd", rows[i]) for _ in range(10)]

            threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for i in range(8):
            assert all(np.array_equal(values, embedding[rows[i]]) for values in found[i])

    def test_short_reads_are_continued(self, imported, embedding, monkeypatch):
        pread = os.pread
        monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, max(size // 3, 1), offset))
        with WeightStore.open(imported["llama-Q4_1"]) as store:
            assert np.array_equal(store.read_rows("token_embd", [5]), embedding[[5]])

    def test_a_disk_error_is_told(self, imported, monkeypatch):
        def fails(fd, size, offset):
            raise OSError(errno.EIO, "Input/output error")

        with WeightStore.open(imported["llama-Q4_1"]) as store:
            monkeypatch.setattr(os, "pread", fails)
            with pytest.raises(MzdError, match="Input/output error") as caught:
                store.read_rows("token_embd", [5])
            assert caught.value.code == "weights_unavailable"


class TestDescriptor:
    def test_extents_can_be_read_directly(self, imported):
        """Offsets and sizes suit O_DIRECT, and the bytes are those that the checksum covers."""
        with WeightStore.open(imported["llama-Q8_0"]) as store:
            for unit in (*store.index.layers, store.index.head):
                with mmap.mmap(-1, unit.size_bytes) as buffer:
                    assert os.preadv(store.fd, [buffer], unit.offset_bytes) == unit.size_bytes
                    assert _native.crc32c_buffer(buffer) == unit.crc32c

    def test_without_direct_reads_the_cached_descriptor_serves(self, imported, embedding, monkeypatch):
        def refuse(fd, buffers, offset):
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(os, "preadv", refuse)
        with WeightStore.open(imported["llama-Q4_1"]) as store:
            assert not store.direct
            assert np.array_equal(store.read_rows("token_embd", [7]), embedding[[7]])
            assert os.pread(store.fd, 8, 0) == b"MZDWGHT\0"

    def test_closing_leaves_no_descriptor(self, imported):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            WeightStore.open(imported["llama-Q4_1"]).close()
        assert len(os.listdir("/proc/self/fd")) == before


class TestIdentity:
    def test_an_untouched_store_is_itself(self, path):
        with WeightStore.open(path) as store:
            store.read_rows("token_embd", [1])
            store.check_identity()

    def check(self, path, change, code):
        with WeightStore.open(path) as store:
            change()
            with pytest.raises(MzdError) as caught:
                store.check_identity()
        assert caught.value.code == code
        assert str(path) in caught.value.message

    def test_deleted(self, path):
        self.check(path, path.unlink, "weights_unavailable")

    def test_truncated(self, path):
        self.check(path, lambda: os.truncate(path, 8192), "weights_unavailable")

    def test_another_file_in_its_place(self, path, imported):
        def replace():
            shutil.copy(imported["llama-Q8_0"], path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)

        self.check(path, replace, "model_changed")

    def test_the_same_bytes_in_another_file(self, path, imported):
        """Another inode may become other bytes at any time: nothing vouches for it."""

        def replace():
            shutil.copy2(path, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)

        self.check(path, replace, "model_changed")

    def test_a_link_in_its_place(self, path, imported):
        def replace():
            path.unlink()
            path.symlink_to(imported["llama-Q4_1"])

        self.check(path, replace, "model_changed")

    def test_written_to(self, path):
        def write():
            with open(path, "r+b") as file:
                file.seek(5000)
                file.write(b"x")
            os.utime(path, ns=(1, 1))

        self.check(path, write, "model_changed")

    def test_reads_behind_the_end_of_a_truncated_store_are_errors_and_no_signal(self, path):
        with WeightStore.open(path) as store:
            os.truncate(path, 8192)
            with pytest.raises(MzdError, match="ends at byte") as caught:
                store.read_rows("token_embd", [0])
            assert caught.value.code == "weights_unavailable"


class TestRefusals:
    def test_missing_file_and_links(self, path, tmp_path):
        refusal(tmp_path / "none")
        (tmp_path / "link").symlink_to(path)
        refusal(tmp_path / "link")

    @pytest.mark.parametrize("size", [0, 7, 63, 64, 4095, 4096, 100_000])
    def test_cut_files(self, path, size):
        os.truncate(path, size)
        refusal(path)

    def test_a_damaged_index(self, path):
        with open(path, "r+b") as file:
            file.seek(-10, os.SEEK_END)
            file.write(b"x")
        assert "checksum" in refusal(path).message

    def test_a_gguf_file(self, path):
        shutil.copy(FIXTURES / "llama-Q4_1.gguf", path)
        assert "damaged weight store" in refusal(path).message

    def test_another_version_is_told_apart(self, path):
        with open(path, "r+b") as file:
            file.seek(8)
            file.write((FORMAT_VERSION + 1).to_bytes(4, "little"))
        assert isinstance(refusal(path), StoreVersionError)

    def test_refusals_leave_no_descriptor(self, path):
        os.truncate(path, 100)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            refusal(path)
        assert len(os.listdir("/proc/self/fd")) == before
