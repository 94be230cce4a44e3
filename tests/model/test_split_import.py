"""Split models: imported as one from any part; a part that is missing or foreign is refused by name."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from mzd.errors import MzdError
from mzd.formats.weight_store import model_id
from mzd.model.importer import import_gguf
from mzd.model.library import ModelLibrary
from mzd.model.pull import pull
from mzd.model.weight_store import WeightStore
from tests.model.split_files import split

FIXTURES = Path(__file__).parents[1] / "fixtures"
SOURCE = FIXTURES / "llama-Q8_0.gguf"


@pytest.fixture
def parts(tmp_path):
    """A model in three files or more."""
    paths = split(SOURCE, tmp_path / "parts", tensors_per_part=15)
    assert len(paths) >= 3
    return paths


@pytest.fixture
def library(tmp_path):
    return ModelLibrary(tmp_path / "models")


def refusal(path, store_path, code="invalid_model"):
    with pytest.raises(MzdError) as caught:
        import_gguf(path, store_path)
    assert caught.value.code == code
    assert not store_path.exists()
    return caught.value.message


def source_of(model):
    with WeightStore.open(model.store_path) as store:
        return store.index.source


class TestImport:
    def test_weights_are_those_of_the_whole_file(self, parts, tmp_path):
        whole = import_gguf(SOURCE, tmp_path / "whole")
        index = import_gguf(parts[0], tmp_path / "joined")
        assert (index.layers, index.head) == (whole.layers, whole.head)  # checksums too
        assert (index.config, index.tokenizer) == (whole.config, whole.tokenizer)

    def test_case_123_any_part_gives_the_same_bytes(self, parts, tmp_path):
        stores = []
        for path in parts:
            import_gguf(path, tmp_path / "store")
            stores.append((tmp_path / "store").read_bytes())
        assert stores == [stores[0]] * len(parts)

    def test_the_source_is_all_parts_one_after_another(self, parts, tmp_path):
        told = []
        index = import_gguf(parts[1], tmp_path / "w", progress=lambda done, total: told.append((done, total)))
        data = b"".join(path.read_bytes() for path in parts)
        assert index.source.name == parts[0].name
        assert (index.source.size_bytes, index.source.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert index.model_id == model_id(index.source.sha256)
        assert told[-1] == (len(data), len(data))
        assert told == sorted(told)

    @pytest.mark.parametrize("missing", [0, 1, -1])
    def test_case_123_a_missing_part_is_named(self, parts, tmp_path, missing):
        gone = parts.pop(missing)
        gone.unlink()
        for path in parts:
            assert f"1 of the {len(parts) + 1} files of this model missing beside it: {gone.name}" in refusal(
                path, tmp_path / "w"
            )
        assert str(gone) in refusal(gone, tmp_path / "w", "not_found")

    def test_case_123_parts_that_were_renamed_to_each_other(self, parts, tmp_path):
        second, third = parts[1].read_bytes(), parts[2].read_bytes()
        parts[1].write_bytes(third)
        parts[2].write_bytes(second)
        assert f"{parts[1]}: it is called part 2 of" in refusal(parts[0], tmp_path / "w")

    def test_a_part_of_another_model(self, parts, tmp_path):
        others = split(FIXTURES / "llama-F16.gguf", tmp_path / "others", tensors_per_part=20)
        shutil.copy(others[0], parts[0])
        assert "is called part 1 of" in refusal(parts[1], tmp_path / "w")

    def test_a_part_that_is_cut_off_or_no_file(self, parts, tmp_path):
        os.truncate(parts[2], parts[2].stat().st_size - 100)
        message = refusal(parts[0], tmp_path / "w")
        assert message.startswith(f"{parts[2]}: ")
        assert "incomplete" in message
        parts[2].unlink()
        parts[2].mkdir()
        assert str(parts[2]) in refusal(parts[0], tmp_path / "w")

    @pytest.mark.parametrize("place", [0, 1, -1])
    def test_a_part_that_changes_meanwhile(self, parts, tmp_path, place):
        with pytest.raises(MzdError, match="was written to") as caught:
            import_gguf(
                parts[0], tmp_path / "w", progress=lambda done, _: os.utime(parts[place], ns=(0, done))
            )
        assert (caught.value.code, caught.value.data["path"]) == ("model_changed", str(parts[place]))

    def test_a_part_that_shrinks_meanwhile(self, parts, tmp_path):
        with pytest.raises(MzdError, match="ended at byte 5000 ") as caught:
            import_gguf(parts[0], tmp_path / "w", progress=lambda done, total: os.truncate(parts[1], 5000))
        assert (caught.value.code, caught.value.data["path"]) == ("model_changed", str(parts[1]))


class TestLibrary:
    def test_every_part_is_the_same_model(self, parts, library):
        model = library.import_file(parts[1])
        assert model.name == "big"
        assert model.origin.source == f"file:{parts[0]}"
        assert model.gguf_path == parts[0]
        assert source_of(model).sha256 == model.origin.sha256
        inode = model.store_path.stat().st_ino
        for path in parts:
            assert library.resolve(str(path)) == model
        assert model.store_path.stat().st_ino == inode  # nothing was imported again
        assert library.models() == (model,)

    def test_a_part_that_changed_is_imported_anew(self, parts, library):
        before = library.import_file(parts[0])
        for path in parts:
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))
            after = library.resolve(str(parts[0]))
            assert after.origin.mtime_ns == before.origin.mtime_ns - 10**9
            assert after.origin.sha256 == before.origin.sha256
            before = after

    def test_a_store_is_made_anew_while_all_parts_are_there(self, parts, library):
        model = library.import_file(parts[0])
        model.store_path.unlink()
        assert library.resolve("big") == model
        model.store_path.unlink()
        parts[2].unlink()
        with pytest.raises(MzdError, match=parts[2].name) as caught:
            library.resolve("big")
        assert caught.value.code == "invalid_model"


class TestPull:
    def fetcher(self, parts):
        def fetch(source, directory):
            file = Path(source.file)
            assert (source.repository, file.parent) == ("someone/big", Path("q8"))
            (directory / "q8").mkdir(exist_ok=True)
            return Path(shutil.copy(parts[0].with_name(file.name), directory / file))

        return fetch

    def test_all_parts_are_fetched_and_kept(self, parts, library):
        result = pull(f"hf:someone/big/q8/{parts[1].name}", library, fetch_hub_file=self.fetcher(parts))
        model = result.model
        assert (model.name, model.origin.source) == ("big", f"hf:someone/big/q8/{parts[0].name}")
        own = [path.name.replace("big", "model") for path in parts]
        names = sorted(path.name for path in model.directory.iterdir())
        assert names == sorted([*own, "source.json", "weights.mzw"])
        assert model.origin.path == own[0]
        again = pull(model.origin.source, library, fetch_hub_file=lambda *args: pytest.fail("fetched again"))
        assert (again.fetched, again.model) == (False, model)
        model.store_path.unlink()
        assert library.resolve("big") == model

    def test_another_model_of_the_name_leaves_no_part(self, parts, library):
        pulled = pull(f"hf:someone/big/q8/{parts[0].name}", library, fetch_hub_file=self.fetcher(parts)).model
        library.import_file(SOURCE, "big")
        assert sorted(path.name for path in pulled.directory.iterdir()) == ["source.json", "weights.mzw"]
