"""Owns the models directory: one directory a model, with its weight store and where it came from."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from mzd.errors import MzdError
from mzd.formats.gguf_split import model_stem, numbered_names, part_names
from mzd.model.atomic_file import PARTIAL_SUFFIX, AtomicFile, sync_directory
from mzd.model.importer import import_gguf
from mzd.model.source_file import Progress, source_paths
from mzd.model.weight_store import WeightStore

log = logging.getLogger(__name__)

GGUF_NAME = "model.gguf"
STORE_NAME = "weights.mzw"
ORIGIN_NAME = "source.json"
NAME_MAX = 64

_NAME = re.compile(
    rf"[A-Za-z0-9_](?!.*\.gguf$)[A-Za-z0-9._-]{{0,{NAME_MAX - 1}}}"
)  # a leading dot is our own, unfinished work; a leading dash an option, and .gguf a file
_STAGING_PREFIX = ".new-"
_ORIGIN_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """Where a model came from, and the GGUF file that its store was made of.

    Attributes:
        source: `pypi:REQUIREMENT`, `hf:OWNER/REPO/FILE`, or `file:PATH`; the first part of a split model.
        path: the GGUF file, or the first of its parts, which lie together; absolute if it lies outside the
            library, else a name in the model's directory.
        size_bytes, mtime_ns: of that file, to notice that it has changed; sums over the parts of a split
            one, so that a change of any shows.
        sha256: of its contents, or those of all parts one after another, in hex.
    """

    source: str
    path: str
    size_bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model in the library; its store may have to be made anew, which `ModelLibrary.resolve` sees to."""

    name: str
    directory: Path
    origin: ModelOrigin

    @property
    def store_path(self) -> Path:
        """The weight store."""
        return self.directory / STORE_NAME

    @property
    def gguf_path(self) -> Path:
        """The GGUF file (of several the first) that the store was made of.

        It may be gone if it lies outside the library.
        """
        return self.directory / self.origin.path  # an absolute path stays as it is


def models_directory(environ: Mapping[str, str]) -> Path:
    """`$MZD_HOME/models`, where MZD_HOME defaults to `$XDG_DATA_HOME/mzd`, else `~/.local/share/mzd`."""
    home = environ.get("MZD_HOME")
    if home:
        return Path(home) / "models"
    data = environ.get("XDG_DATA_HOME") or Path(environ.get("HOME") or Path.home()) / ".local/share"
    return Path(data) / "mzd" / "models"


def checked_name(name: str) -> str:
    """`name`, if a model may be called that. Raises MzdError `invalid_params`."""
    if not _NAME.fullmatch(name):
        raise MzdError(
            "invalid_params",
            f"{name!r:.80} is no name for a model: 1 to {NAME_MAX} letters, digits, dots, dashes or "
            "underscores, not beginning with a dot or dash and not ending in .gguf",
            name=name[:80],
        )
    return name


def own_gguf_names(num_parts: int) -> tuple[str, ...]:
    """What the files of a model in `num_parts` parts are called inside the library."""
    return (GGUF_NAME,) if num_parts == 1 else numbered_names(model_stem(GGUF_NAME), num_parts)


def name_from_file(path: Path) -> str:
    """A valid model name from that of a GGUF file, the same from each part of a split one."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", model_stem(path.name)).lstrip(".-")[:NAME_MAX]
    while stem.endswith(".gguf"):
        stem = stem.removesuffix(".gguf")
    return stem or "model"


class ModelLibrary:
    """The models below one directory; several processes may use it at once.

    A directory is a model when its `source.json` is there, which is written last: an interrupted download
    or import is none. One change at a time, by a lock on the library's own directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def models(self) -> tuple[InstalledModel, ...]:
        """All models, by name."""
        if not self.root.is_dir():
            return ()
        names = sorted(entry.name for entry in self.root.iterdir() if _NAME.fullmatch(entry.name))
        return tuple(model for name in names if (model := self.get(name)) is not None)

    def get(self, name: str) -> InstalledModel | None:
        """The model of this name, if there is one. Raises MzdError `invalid_params`."""
        directory = self.root / checked_name(name)
        origin = _read_origin(directory / ORIGIN_NAME)
        return None if origin is None else InstalledModel(name, directory, origin)

    def find(self, name: str) -> InstalledModel:
        """The model of this name. Raises MzdError `not_found` naming those that there are."""
        model = self.get(name)
        if model is None:
            names = [model.name for model in self.models()]
            raise MzdError(
                "not_found",
                f"there is no model {name!r}; installed: {', '.join(names) or 'none'} (mzd pull, mzd import)",
                name=name,
                installed=names,
            )
        return model

    def resolve(self, name_or_path: str, *, progress: Progress | None = None) -> InstalledModel:
        """A model that is ready to open.

        Args:
            name_or_path: a name in the library, or a GGUF file (with a slash or ending in `.gguf`; any part
                of a split one), which is imported if it is new or has changed.
            progress: of an import, if one is needed: (done_bytes, total_bytes).

        Raises:
            MzdError: `not_found`; else as `import_gguf`.
        """
        if _is_path(name_or_path):
            return self._resolve_file(Path(name_or_path).absolute(), progress)
        model = self.find(name_or_path)
        return model if self.is_ready(model) else self._remake(model, progress)

    def open_store(self, name_or_path: str, *, progress: Progress | None = None) -> WeightStore:
        """Open the store of a model, made ready first; arguments and errors as `resolve`.

        The index of a store that is ready is read once: with its vocabulary it takes a while.
        """
        model = None if _is_path(name_or_path) else self.get(name_or_path)
        store = None if model is None else self._open_ready(model)
        return store or WeightStore.open(self.resolve(name_or_path, progress=progress).store_path)

    def import_file(
        self, path: Path, name: str | None = None, *, progress: Progress | None = None
    ) -> InstalledModel:
        """Import a GGUF file where it lies (it is not copied); another model of that name is replaced.

        Nothing is done where the model is there, its store whole by its checksums, and the file unchanged, so
        that a daemon that serves it keeps the store that it has open.

        Args:
            name: default: from the file's name, or, where a model from elsewhere has that, with a suffix.

        Raises:
            MzdError: `invalid_params` for the name; else as `import_gguf`.
        """
        path = source_paths(path.absolute())[0]
        name = self._free_name(path) if name is None else checked_name(name)
        with self.staging() as directory:
            model = self._made_from(path, name)  # perhaps by another process, while we waited for the lock
            if model is not None and self.is_whole(model):
                return model
            self._tell_of_replacement(name, f"file:{path}")
            return self.install(name, directory, f"file:{path}", path, progress=progress)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A new directory inside the library for what is to become a model, while the library is locked."""
        with _locked(self.root):
            self._remove_leftovers()
            directory = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=self.root))
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)

    def install(
        self,
        name: str,
        staging: Path,
        source: str,
        gguf_path: Path,
        *,
        sha256: str | None = None,
        progress: Progress | None = None,
    ) -> InstalledModel:
        """Make the store of `gguf_path` and turn the staging directory into the model `name`.

        Args:
            staging: from `staging()`; files in it that are called as `own_gguf_names` says become part of
                the model.
            source: as `ModelOrigin.source`.
            sha256: as `ModelOrigin.sha256`, if it is known what it must be.

        Raises:
            MzdError: `weights_unavailable` for other bytes than expected; else as `import_gguf`.
        """
        directory = self.root / name
        if directory.exists() and not directory.is_dir():
            raise MzdError(
                "weights_unavailable", f"{directory} is in the way: it is no directory", path=str(directory)
            )
        index = import_gguf(gguf_path, staging / STORE_NAME, progress=progress)
        _check_sha256(source, index.source.sha256, sha256)
        is_inside = gguf_path.parent in (staging, directory) and _is_own(gguf_path)
        path = gguf_path.name if is_inside else str(gguf_path)
        origin = ModelOrigin(source, path, *_stamp(gguf_path), index.source.sha256)
        _write_origin(staging / ORIGIN_NAME, origin)
        _publish(staging, directory)
        kept = part_names(path) if is_inside else ()
        for file in _own_files(directory):
            if file.name not in kept:  # of a model that had the name before
                file.unlink(missing_ok=True)
        return InstalledModel(name, directory, origin)

    def is_ready(self, model: InstalledModel) -> bool:
        """Whether the model's store opens, is of this version, and was made of the recorded file."""
        store = self._open_ready(model)
        if store is not None:
            store.close()
        return store is not None

    def is_whole(self, model: InstalledModel) -> bool:
        """Whether it is ready and all its weights have their checksums: every byte is read."""
        store = self._open_ready(model)
        if store is None:
            return False
        with store:
            try:
                store.check_contents()
            except MzdError:
                return False
        return True

    def _open_ready(self, model: InstalledModel) -> WeightStore | None:
        """The model's store, or None if it is not ready."""
        try:
            store = WeightStore.open(model.store_path)
        except MzdError:
            return None
        if store.index.source.sha256 == model.origin.sha256:
            return store
        store.close()
        return None

    def _resolve_file(self, path: Path, progress: Progress | None) -> InstalledModel:
        path = source_paths(path)[0]
        name = self._free_name(path)
        return self._made_from(path, name) or self.import_file(path, name, progress=progress)

    def _made_from(self, path: Path, name: str) -> InstalledModel | None:
        """The model `name` if it is ready and was made from the file as it is now."""
        model = self.get(name)
        if model is None or model.origin.source != f"file:{path}" or not _is_unchanged(path, model.origin):
            return None
        return model if self.is_ready(model) else None

    def _remake(self, model: InstalledModel, progress: Progress | None) -> InstalledModel:
        """Make a store anew that is missing, damaged or of another version."""
        if not model.gguf_path.is_file():
            raise MzdError(
                "weights_unavailable",
                f"the weight store of {model.name!r} must be made anew, and {model.gguf_path} is gone; "
                f"it came from {model.origin.source}",
                name=model.name,
                source=model.origin.source,
            )
        with self.staging() as directory:
            gguf_path = model.gguf_path
            return self.install(model.name, directory, model.origin.source, gguf_path, progress=progress)

    def _free_name(self, path: Path) -> str:
        """The name for a file: that of the model already made from it, else one that no other model has."""
        name = name_from_file(path)
        model = self.get(name)
        if model is None or model.origin.source == f"file:{path}":
            return name
        suffix = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
        return f"{name[: NAME_MAX - 9]}-{suffix}"

    def _tell_of_replacement(self, name: str, source: str) -> None:
        model = self.get(name)
        if model is not None and model.origin.source != source:
            log.warning("replaces the model %s, which came from %s", name, model.origin.source)

    def _remove_leftovers(self) -> None:
        """Delete what killed processes left; with the lock held nobody is using it."""
        for leftover in self.root.glob(f"{_STAGING_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.root.glob(f"*/.*{PARTIAL_SUFFIX}"):
            leftover.unlink(missing_ok=True)


def _is_path(name_or_path: str) -> bool:
    """Whether a file is meant, not a name in the library."""
    return "/" in name_or_path or name_or_path.endswith(".gguf")


def _check_sha256(source: str, found: str, expected: str | None) -> None:
    """Raise MzdError unless it is the expected one, or none is expected."""
    if expected is not None and found != expected:
        raise MzdError(
            "weights_unavailable",
            f"{source} has SHA-256 {found}, expected {expected}: not what was published or pulled before",
            source=source,
            found=found,
            expected=expected,
        )


def _publish(staging: Path, directory: Path) -> None:
    """Move a finished model into place: at once if it is new, else file by file, `source.json` last."""
    if directory.exists():
        for file in (*_own_files(staging), staging / STORE_NAME, staging / ORIGIN_NAME):
            file.replace(directory / file.name)
    else:
        staging.rename(directory)
    sync_directory(directory)
    sync_directory(directory.parent)


def _own_files(directory: Path) -> list[Path]:
    """The GGUF files that belong to a model of the library, or will."""
    return sorted(path for path in directory.glob("*.gguf") if _is_own(path))


def _is_own(path: Path) -> bool:
    return model_stem(path.name) == model_stem(GGUF_NAME)


def _stamp(path: Path) -> tuple[int, int]:
    """(size_bytes, mtime_ns) as `ModelOrigin` has them. Raises OSError."""
    found = [part.stat() for part in source_paths(path)]
    return sum(status.st_size for status in found), sum(status.st_mtime_ns for status in found)


def _is_unchanged(path: Path, origin: ModelOrigin) -> bool:
    try:
        return _stamp(path) == (origin.size_bytes, origin.mtime_ns)
    except OSError:
        return False  # importing it will say what is wrong


def _write_origin(path: Path, origin: ModelOrigin) -> None:
    with AtomicFile(path) as file:
        file.write_at(0, json.dumps(asdict(origin), indent=2).encode())
        file.commit()


def _read_origin(path: Path) -> ModelOrigin | None:
    """What `_write_origin` wrote, or None if that is not what lies there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with open(fd, "rb") as file:
        data = file.read(_ORIGIN_BYTES_MAX)
    try:
        fields = json.loads(data)
        return ModelOrigin(
            str(fields["source"]),
            str(fields["path"]),
            int(fields["size_bytes"]),
            int(fields["mtime_ns"]),
            str(fields["sha256"]),
        )
    except (ValueError, TypeError, KeyError):
        return None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the exclusive lock of a directory, made if missing; waits for other processes."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise MzdError(
            "weights_unavailable", f"cannot use {directory} for models: {error.strerror}", path=str(directory)
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
