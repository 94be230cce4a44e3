"""Owns `mzd doctor`: what this machine has, what it lacks, one advice for each lack, hints beyond that."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mzd import native
from mzd.daemon.config import Config
from mzd.daemon.doctor_opencl import Check, broken_driver, opencl_checks, speed_hints
from mzd.daemon.opencl_probe import DeviceReport, OpenClReport, ProbeFailedError, probe_opencl
from mzd.daemon.refused_devices import Refusal, last_refusals
from mzd.errors import MzdError
from mzd.memory.pressure_sources import PSI_HINT, PressureProbes
from mzd.model.library import ModelLibrary, models_directory
from mzd.model.pull import KNOWN_MODELS
from mzd.model.weight_store import WeightStore
from mzd.policy.pressure import PressureUnknown
from mzd.policy.units import PAGE_BYTES

PYTHON_MIN = (3, 11)
SOCKET_PATH_BYTES_MAX = 107
"""Of sockaddr_un, less its final zero."""

UNKNOWN_MODEL_BYTES = 1 << 30
"""Room that is asked for while no model says how much it needs."""

PSI_FILE = "proc/pressure/memory"
HUGE_PAGES_FILE = "sys/kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What the configured model takes, when it is installed.

    Attributes:
        weights_bytes: all layers and the head unit, resident.
        kv_bytes: FP16 KV of one context at its full length.
        context_length: what it was made for, in tokens.
        quantised: whether matrices of its layers are.
    """

    weights_bytes: int
    kv_bytes: int
    context_length: int
    quantised: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that the doctor finds.

    Attributes:
        devices: what OpenCL offers, best first.
        refused: what the last start refused.
        hints: what would make it faster.
    """

    checks: tuple[Check, ...]
    devices: tuple[DeviceReport, ...]
    refused: tuple[Refusal, ...]
    hints: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Nothing is missing."""
        return all(check.ok for check in self.checks)


Probe = Callable[[Config], OpenClReport]


def diagnose(
    config: Config | None = None, *, root: Path = Path("/"), probe: Probe = probe_opencl
) -> Diagnosis:
    """Look at everything that the daemon will need; leaves nothing behind.

    Args:
        config: what the daemon would run with; the defaults and the environment if not given.
        root: where /proc, /sys and /dev are.
        probe: asks OpenCL; dies in its own process if a driver does.
    """
    config = config or Config()
    needs = _model_needs(config, models_directory(os.environ))
    refused = last_refusals(config.state_directory)
    checks = [check_python(sys.version_info[:3]), check_native()]
    devices: tuple[DeviceReport, ...] = ()
    hints: list[str] = []
    try:
        report = probe(config)
        checks += opencl_checks(report, refused, config)
        devices = report.devices
        hints = speed_hints(config, report, root=root, quantised=needs is not None and needs.quantised)
    except ProbeFailedError as error:
        checks.append(broken_driver(error))
    checks += _machine_checks(config, needs, root)
    return Diagnosis(tuple(checks), devices, refused, tuple(hints))


def _machine_checks(config: Config, needs: ModelNeeds | None, root: Path) -> list[Check]:
    models = models_directory(os.environ)
    return [
        check_huge_pages(root),
        check_psi(root),
        check_memory_group(root, needs),
        check_writable("state directory", config.state_directory),
        check_direct_io(config.state_directory),
        check_free_space("state directory space", config.state_directory, _swap_bytes(needs)),
        check_free_space("models directory space", models, _models_bytes(config, needs)),
        check_memory_lock(config, needs),
        check_model(config, models, needs),
        check_context(config, needs),
        check_socket(config.socket_path),
    ]


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


# The interpreter and the C extension


def check_python(version: tuple[int, ...]) -> Check:
    """The interpreter is new enough."""
    wanted = ".".join(map(str, PYTHON_MIN))
    found = ".".join(map(str, version))
    return Check("Python", version >= PYTHON_MIN, found, f"install Python {wanted} or newer")


def check_native(backend: str = native.BACKEND, reason: str | None = native.FALLBACK_REASON) -> Check:
    """The C extension is loaded; without it NumPy gives the same bits, slowly and with the GIL held."""
    detail = f"int8: {native.int8_variants()[0]}, crc32c: {native.crc32c_variants()[0]}"
    if backend != "c":
        detail = f"not loaded, the slow NumPy paths are used: {reason}"
    advice = "install a C compiler and Python's headers, then reinstall mzd (make setup)"
    return Check("C extension", backend == "c", detail, advice)


# The kernel


def check_huge_pages(root: Path) -> Check:
    """Transparent huge pages can be asked for; fresh memory is the dearest part of a restore without them."""
    try:
        modes = (root / HUGE_PAGES_FILE).read_text().strip()
    except OSError as error:
        modes = f"none ({error.strerror})"
    ok = "[always]" in modes or "[madvise]" in modes
    return Check("huge pages", ok, modes, f"as root: echo madvise > /{HUGE_PAGES_FILE}")


def check_psi(root: Path) -> Check:
    """The kernel accounts memory stall; without it the monitor watches only what is available."""
    probes = PressureProbes.open(root)
    if probes.psi_off is not None:  # by the administrator's will, so nothing is missing
        return Check("memory pressure", True, probes.psi_off.reason, "")
    reading = probes.psi()
    if isinstance(reading, PressureUnknown):
        return Check("memory pressure", False, reading.reason, PSI_HINT)
    detail = f"/{PSI_FILE}: some avg10 {reading.some_avg10:g} %, full avg10 {reading.full_avg10:g} %"
    return Check("memory pressure", True, detail, PSI_HINT)


def check_memory_group(root: Path, needs: ModelNeeds | None) -> Check:
    """The memory group's limit, if there is one, holds the model."""
    reading = PressureProbes.open(root).cgroup_memory()
    if isinstance(reading, PressureUnknown):
        return Check("memory group", True, f"no limit is known: {reading.reason}", "")
    if reading.limit_bytes is None:
        return Check("memory group", True, f"{reading.group}: no limit", "")
    room_bytes = reading.available_in(reading.limit_bytes)
    weights_bytes = needs.weights_bytes if needs else 0
    return Check(
        "memory group",
        room_bytes >= weights_bytes,
        f"{reading.group}: {_mb(room_bytes)} of {_mb(reading.limit_bytes)} are left; "
        f"the weights take {_mb(weights_bytes)}",
        "raise the group's limit (MemoryMax= and MemoryHigh= of the unit), or take a smaller model",
    )


def check_memory_lock(config: Config, needs: ModelNeeds | None) -> Check:
    """RLIMIT_MEMLOCK holds all that `lock_memory` would lock."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit_bytes == resource.RLIM_INFINITY
    needed_bytes = needs.weights_bytes + needs.kv_bytes if needs else UNKNOWN_MODEL_BYTES
    enough = unlimited or limit_bytes >= needed_bytes
    limit = "unlimited" if unlimited else _mb(limit_bytes)
    switch = "on" if config.lock_memory else "off"
    return Check(
        "memory lock",
        enough or not config.lock_memory,
        f"RLIMIT_MEMLOCK is {limit}; lock_memory ({switch}) needs {_mb(needed_bytes)} "
        "for the model with one full context",
        f"LimitMEMLOCK={needed_bytes} in the unit, or ulimit -l {-(-needed_bytes // 1024)}",
    )


# Directories


def nearest_directory(path: Path) -> Path:
    """The path itself, or what exists of it: the directory that decides whether the rest can be made."""
    path = path.absolute()
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def check_writable(name: str, path: Path) -> Check:
    """The directory can be made and written to."""
    nearest = nearest_directory(path)
    ok = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    advice = f"make {path} and give it to user {os.geteuid()}, or choose another"
    return Check(name, ok, f"{path}{'' if nearest == path else ' (will be made)'}", advice)


def check_direct_io(path: Path) -> Check:
    """Reads and writes there can bypass the page cache; else each restore fills memory twice."""
    directory = nearest_directory(path)
    advice = "keep state on a file system with O_DIRECT (ext4, xfs, btrfs, f2fs), not on tmpfs or a network"
    try:
        _write_directly(directory)
    except OSError as error:
        return Check("direct I/O", False, f"{directory}: {error.strerror}", advice)
    return Check("direct I/O", True, f"{directory}: O_DIRECT works", advice)


def _write_directly(directory: Path) -> None:
    """Write one page past the page cache and read it back, in a file that is gone afterwards."""
    fd, name = tempfile.mkstemp(prefix=".mzd-doctor-", dir=directory)
    os.close(fd)
    try:
        fd = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            with mmap.mmap(-1, PAGE_BYTES) as page:  # page-aligned, as direct I/O asks
                os.pwritev(fd, [page], 0)
                os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    finally:
        os.unlink(name)


def check_free_space(name: str, path: Path, needed_bytes: int) -> Check:
    """There is room for what will be written there."""
    directory = nearest_directory(path)
    free_bytes = shutil.disk_usage(directory).free
    detail = f"{directory}: {_mb(free_bytes)} free, {_mb(needed_bytes)} wanted"
    return Check(name, free_bytes >= needed_bytes, detail, f"free space below {directory}, or choose another")


def _swap_bytes(needs: ModelNeeds | None) -> int:
    return needs.kv_bytes if needs else UNKNOWN_MODEL_BYTES


def _models_bytes(config: Config, needs: ModelNeeds | None) -> int:
    """Nothing if the model is there; else its download, its GGUF file and its weight store."""
    if needs is not None:
        return 0
    known = KNOWN_MODELS.get(config.model)
    return known.wheel_bytes + 2 * known.size_bytes if known else UNKNOWN_MODEL_BYTES


# The model and the socket


def _model_needs(config: Config, models: Path) -> ModelNeeds | None:
    """None while the model is not installed, or its store cannot be opened."""
    try:
        model = ModelLibrary(models).get(config.model)
        if model is None:
            return None
        with WeightStore.open(model.store_path) as store:
            index = store.index
    except MzdError:
        return None
    weights_bytes = sum(extent.size_bytes for extent in (*index.layers, index.head))
    tokens = config.context or index.config.context_length
    quantised = any(tensor.type.block_weights > 1 for tensor in index.layers[0].tensors)
    kv_bytes = tokens * index.config.kv_bytes_per_token
    return ModelNeeds(weights_bytes, kv_bytes, index.config.context_length, quantised)


def check_context(config: Config, needs: ModelNeeds | None) -> Check:
    """The model can have contexts as long as configured."""
    if needs is None:
        return Check("context", True, "how long it can be is known once the model is installed", "")
    most = needs.context_length
    wanted = f"{config.context} tokens" if config.context else "the model's own length"
    return Check(
        "context",
        config.context <= most,
        f"{wanted}; {config.model} was made for {most}",
        f"set context to {most} or less, or to 0, which is the model's own length",
    )


def check_model(config: Config, models: Path, needs: ModelNeeds | None) -> Check:
    """The configured model is installed, its weight store opens, and every weight has its checksum."""
    library = ModelLibrary(models)
    installed = ", ".join(model.name for model in library.models()) or "none"
    detail = f"{config.model} is not ready in {models}; installed: {installed}"
    damage = None
    if needs is not None:
        weights, kv = _mb(needs.weights_bytes), _mb(needs.kv_bytes)
        damage = _damage(library, config.model)
        detail = damage or f"{config.model}: {weights} of weights, {kv} of KV in one full context"
    ok = needs is not None and damage is None
    return Check("model", ok, detail, _model_advice(library, config.model))


def _model_advice(library: ModelLibrary, name: str) -> str:
    """The command that gets or mends the model."""
    if name in KNOWN_MODELS:
        return f"mzd pull {name}"
    try:
        kind, _, place = library.find(name).origin.source.partition(":")
    except MzdError:
        return "mzd import FILE.gguf"
    return f"mzd import {place} --name {name}" if kind == "file" else f"mzd pull {kind}:{place}"


def _damage(library: ModelLibrary, name: str) -> str | None:
    """What is wrong with the weights of an installed model."""
    try:
        with WeightStore.open(library.find(name).store_path) as store:
            store.check_contents()
    except MzdError as error:
        return error.message
    return None


def check_socket(path: Path) -> Check:
    """The daemon answers at the socket already, or can make it."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        detail = f"{path} is longer than {SOCKET_PATH_BYTES_MAX} bytes"
        return Check("socket", False, detail, "set MZD_SOCKET, or --socket, to a shorter path")
    if _answers(path):
        return Check("socket", True, f"a daemon listens at {path}", "")
    found = check_writable("socket", path.parent)
    advice = "set MZD_SOCKET, or --socket, to a path in a directory of yours; or start the service as root"
    return Check("socket", found.ok, str(path), advice)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(os.fspath(path)) == 0
