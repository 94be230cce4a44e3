"""The models directory: names, what counts as a model, and when a store is made anew."""

import json
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.errors import MzdError
from mzd.formats.weight_store import FORMAT_VERSION
from mzd.model.library import (
    GGUF_NAME,
    ModelLibrary,
    checked_name,
    models_directory,
    name_from_file,
)
from mzd.model.weight_store import WeightStore
from tests.formats.gguf_files import STRING, tiny_llama

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture
def library(tmp_path):
    return ModelLibrary(tmp_path / "home" / "models")


@pytest.fixture
def gguf_path(tmp_path):
    """A GGUF file outside the library."""
    return Path(shutil.copy(FIXTURES / "llama-Q4_1.gguf", tmp_path / "small model.gguf"))


def code_of(call, *args, **kwargs):
    with pytest.raises(MzdError) as caught:
        call(*args, **kwargs)
    return caught.value.code


def flip_byte(path, offset_bytes):
    with open(path, "r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 1]))


def source_of(model):
    with WeightStore.open(model.store_path) as store:
        return store.index.source.sha256


class TestNames:
    @pytest.mark.parametrize("name", ["a", "SmolLM2-135M.Q4_1", "_", "x" * 64])
    def test_right_names(self, name):
        assert checked_name(name) == name

    @pytest.mark.parametrize(
        "name", ["", ".", "..", ".hidden", "a/b", "../x", "x" * 65, "a b", "ä", "a\n", "a\0", "-x", "x.gguf"]
    )
    def test_wrong_names(self, name, library):
        assert code_of(checked_name, name) == "invalid_params"
        assert code_of(library.find, name) == "invalid_params"

    @given(st.text(max_size=100))
    def test_any_file_gives_a_right_name(self, stem):
        assert checked_name(name_from_file(Path("/models") / f"{stem.replace('/', '')}.gguf"))

    def test_directories(self):
        assert models_directory({"MZD_HOME": "/m", "XDG_DATA_HOME": "/d"}) == Path("/m/models")
        assert models_directory({"XDG_DATA_HOME": "/d", "HOME": "/h"}) == Path("/d/mzd/models")
        assert models_directory({"HOME": "/h"}) == Path("/h/.local/share/mzd/models")
        assert models_directory({"MZD_HOME": "", "HOME": "/h"}) == Path("/h/.local/share/mzd/models")


class TestImport:
    def test_a_file_becomes_a_model_and_is_not_copied(self, library, gguf_path):
        model = library.import_file(gguf_path)
        assert model.name == "small-model"
        assert library.models() == (model,)
        assert library.find("small-model") == model
        assert library.resolve("small-model") == model
        assert model.gguf_path == gguf_path
        assert sorted(path.name for path in model.directory.iterdir()) == ["source.json", "weights.mzw"]
        assert source_of(model) == model.origin.sha256

    def test_what_is_written_is_private(self, library, gguf_path):
        model = library.import_file(gguf_path)
        for directory in (library.root, model.directory):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for path in model.directory.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_a_name_may_be_given(self, library, gguf_path):
        assert library.import_file(gguf_path, "mine").name == "mine"
        assert code_of(library.import_file, gguf_path, "../mine") == "invalid_params"

    def test_a_second_file_of_the_same_name_gets_another(self, library, gguf_path, tmp_path):
        other = tmp_path / "elsewhere" / gguf_path.name
        other.parent.mkdir()
        shutil.copy(FIXTURES / "llama-F16.gguf", other)
        first, second = library.import_file(gguf_path), library.import_file(other)
        assert first.name != second.name
        assert library.resolve(str(gguf_path)) == first
        assert library.resolve(str(other)) == second

    def test_an_unchanged_file_is_not_imported_again(self, library, gguf_path):
        inode = library.import_file(gguf_path).store_path.stat().st_ino
        assert library.import_file(gguf_path).store_path.stat().st_ino == inode

    def test_an_import_mends_one_wrong_byte_of_any_unit(self, library, gguf_path):
        model = library.import_file(gguf_path)
        with WeightStore.open(model.store_path) as store:
            units = (*store.index.layers, store.index.head)
        for unit in units:
            flip_byte(model.store_path, unit.offset_bytes + unit.size_bytes // 3)
            assert library.is_ready(model)  # the index does not show it
            assert not library.is_whole(model)
            library.import_file(gguf_path)
            assert library.is_whole(model)

    def test_a_refused_file_leaves_no_model(self, library, tmp_path):
        refused = tmp_path / "refused.gguf"
        refused.write_bytes(tiny_llama().with_metadata(general__architecture=(STRING, "mamba")).to_bytes())
        assert code_of(library.import_file, refused) == "unsupported_architecture"
        assert list(library.root.iterdir()) == []

    def test_any_bytes_may_be_a_files_name(self, library, gguf_path):
        odd = Path(os.fsdecode(os.fsencode(gguf_path.parent) + b"/\xff-odd.gguf.gguf"))
        model = library.import_file(Path(shutil.copy(gguf_path, odd)))
        assert model.name == "odd"
        assert library.import_file(odd) == model

    def test_a_file_in_the_place_of_a_model_is_told(self, library, gguf_path):
        library.root.mkdir(parents=True)
        (library.root / "x").write_text("")
        with pytest.raises(MzdError, match="no directory"):
            library.import_file(gguf_path, "x")

    def test_another_model_of_the_name_is_replaced_whole(self, library, gguf_path, caplog):
        with library.staging() as staging:
            shutil.copy(FIXTURES / "llama-F16.gguf", staging / GGUF_NAME)
            library.install("x", staging, "pypi:x", staging / GGUF_NAME)
        model = library.import_file(gguf_path, "x")
        assert "replaces the model x, which came from pypi:x" in caplog.text
        assert not (model.directory / GGUF_NAME).exists()
        assert source_of(model) == model.origin.sha256
        assert library.find("x") == model


class TestResolve:
    def test_unknown_names_tell_the_known_ones(self, library, gguf_path):
        with pytest.raises(MzdError, match="installed: none") as caught:
            library.find("x")
        assert caught.value.code == "not_found"
        library.import_file(gguf_path, "here")
        with pytest.raises(MzdError, match="installed: here"):
            library.resolve("x")

    def test_a_path_is_imported_once(self, library, gguf_path):
        told = []
        model = library.resolve(str(gguf_path), progress=lambda done, total: told.append(done))
        assert told
        told.clear()
        assert library.resolve(str(gguf_path), progress=lambda done, total: told.append(done)) == model
        assert not told

    def test_a_relative_path_is_the_same_file(self, library, gguf_path, monkeypatch):
        model = library.resolve(str(gguf_path))
        monkeypatch.chdir(gguf_path.parent)
        assert library.resolve(gguf_path.name) == model

    def test_a_changed_file_is_imported_anew_under_its_name(self, library, gguf_path):
        before = library.resolve(str(gguf_path))
        shutil.copy(FIXTURES / "llama-F16.gguf", gguf_path)
        after = library.resolve(str(gguf_path))
        assert after.name == before.name
        assert after.origin.sha256 != before.origin.sha256
        assert source_of(after) == after.origin.sha256
        assert len(library.models()) == 1

    def test_a_file_that_is_gone(self, library, gguf_path):
        library.resolve(str(gguf_path))
        gguf_path.unlink()
        assert code_of(library.resolve, str(gguf_path)) == "not_found"
        assert library.resolve("small-model").name == "small-model"  # its store is whole

    def damage(self, model, how):
        if how == "missing":
            model.store_path.unlink()
        elif how == "damaged":
            os.truncate(model.store_path, 10_000)
        else:
            with open(model.store_path, "r+b") as file:
                file.seek(8)
                file.write((FORMAT_VERSION + 1).to_bytes(4, "little"))

    @pytest.mark.parametrize("how", ["missing", "damaged", "another version"])
    def test_a_store_is_made_anew_from_the_file(self, how, library, gguf_path):
        model = library.import_file(gguf_path)
        self.damage(model, how)
        assert not library.is_ready(model)
        again = library.resolve(model.name)
        assert library.is_ready(again)
        assert again == model
        self.damage(model, how)
        assert library.resolve(str(gguf_path)) == model
        assert library.is_ready(model)

    def test_a_store_is_made_anew_from_the_model_file_inside(self, library):
        with library.staging() as staging:
            shutil.copy(FIXTURES / "llama-F16.gguf", staging / GGUF_NAME)
            model = library.install("x", staging, "pypi:x", staging / GGUF_NAME)
        self.damage(model, "another version")
        again = library.resolve("x")
        assert again == model
        assert again.origin.path == GGUF_NAME
        assert (again.directory / GGUF_NAME).is_file()
        assert library.is_ready(again)

    def test_without_the_file_it_says_where_the_model_came_from(self, library, gguf_path):
        model = library.import_file(gguf_path)
        self.damage(model, "missing")
        gguf_path.unlink()
        with pytest.raises(MzdError, match="is gone; it came from file:") as caught:
            library.resolve(model.name)
        assert caught.value.code == "weights_unavailable"

    def test_a_store_that_was_made_of_another_file_is_not_ready(self, library, gguf_path, tmp_path):
        """As after a crash between the two renames of a replacement."""
        model = library.import_file(gguf_path)
        shutil.copy(FIXTURES / "llama-F16.gguf", tmp_path / "other.gguf")
        other = library.import_file(tmp_path / "other.gguf")
        shutil.copy(other.store_path, model.store_path)
        assert not library.is_ready(model)
        assert library.is_ready(library.resolve(model.name))


class TestDirectory:
    def test_what_is_no_model_is_not_listed(self, library, gguf_path):
        model = library.import_file(gguf_path)
        (library.root / "empty").mkdir()
        (library.root / "a file").write_text("x")
        for name, text in (("json", "{"), ("fields", "{}"), ("list", "[]"), ("types", '{"source": 1}')):
            (library.root / name).mkdir()
            (library.root / name / "source.json").write_text(text)
        (library.root / "link").mkdir()
        (library.root / "link" / "source.json").symlink_to(model.directory / "source.json")
        assert library.models() == (model,)

    def test_an_empty_library_may_not_exist(self, library):
        assert library.models() == ()
        assert not library.root.exists()

    def test_leftovers_of_killed_processes_go_with_the_next_change(self, library, gguf_path):
        model = library.import_file(gguf_path)
        (library.root / ".new-killed").mkdir()
        (library.root / ".new-killed" / "big").write_bytes(b"x")
        (model.directory / ".weights.mzw.abc.partial").write_bytes(b"x")
        assert library.models() == (model,)
        with library.staging():
            pass
        assert list(library.root.iterdir()) == [model.directory]
        assert not list(model.directory.glob(".*"))

    def test_a_place_that_cannot_be_used_is_told(self, tmp_path, gguf_path):
        (tmp_path / "file").write_text("x")
        library = ModelLibrary(tmp_path / "file" / "models")
        with pytest.raises(MzdError, match="cannot use") as caught:
            library.import_file(gguf_path)
        assert caught.value.code == "weights_unavailable"

    def test_importers_of_one_file_wait_for_each_other_and_agree(self, library, gguf_path):
        """The second finds the first one's store and leaves it: a daemon may have it open."""
        found = []
        threads = [
            threading.Thread(
                target=lambda: found.append(library.resolve(str(gguf_path)).store_path.stat().st_ino)
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len(set(found)) == 1

    def test_the_record_is_plain_json(self, library, gguf_path):
        model = library.import_file(gguf_path)
        record = json.loads((model.directory / "source.json").read_text())
        assert record == {
            "source": f"file:{gguf_path}",
            "path": str(gguf_path),
            "size_bytes": gguf_path.stat().st_size,
            "mtime_ns": gguf_path.stat().st_mtime_ns,
            "sha256": model.origin.sha256,
        }
