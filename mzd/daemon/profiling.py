"""Owns the profile of the device: kept from an earlier start, else measured, in about a second."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Final

import trio

from mzd import __version__
from mzd.codec import Codec, codec_by_name
from mzd.daemon.config import Config, ThreadsConfig
from mzd.daemon.device_choice import choose_device
from mzd.daemon.profiling_steps import (
    TRANSFER_BYTES,
    PieceFile,
    decoders,
    mapped_area,
    piece_file,
    rates,
    readers,
    set_direct,
    time_pages,
    writers,
)
from mzd.daemon.wiring import worker_groups
from mzd.device.opencl import OpenClDevice
from mzd.errors import MzdError
from mzd.memory.device_profile_store import PROFILE_FILE, DeviceProfileStore, MeasuredProfile, ProfileKey
from mzd.memory.huge_pages import has_huge_pages
from mzd.model.library import ModelLibrary, models_directory
from mzd.model.weight_store import WeightStore
from mzd.policy.profile import DEFAULT_PROFILE, DeviceProfile

log = logging.getLogger(__name__)

_WRITE_S: Final = 0.2
_READ_S: Final = 0.15
_BOTH_S: Final = 0.15
_BOTH_ROUNDS: Final = 3
"""Medians of a few rounds: somebody else's burst of work must not become the device's speed."""


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The weight store, open for reading at multiples of a page; `direct` if it bypasses the page cache."""

    path: Path
    fd: int
    direct: bool


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured.

    Attributes:
        device, driver: as OpenCL says them.
        codec: whose decoding is timed.
        threads: how many restoration uses, and on which cores.
        huge_pages: whether memory is asked for in huge pages.
        state: directory of the swap and of the kept profiles.
        weights: read from it; None: read from a temporary file in `state`.
    """

    device: str
    driver: str
    codec: Codec
    threads: ThreadsConfig
    huge_pages: bool
    state: Path
    weights: WeightsFile | None

    def key(self) -> ProfileKey:
        """What the profile depends on.

        Raises:
            OSError: the state directory or the weights are gone.
        """
        threads = asdict(self.threads)
        cores = threads.pop("cores")
        places = [self.state] if self.weights is None else [self.weights.path, self.state]
        return ProfileKey(
            device=self.device,
            driver=self.driver,
            codec=self.codec.name,
            codec_version=self.codec.version,
            program_version=__version__,
            threads=threads,
            cores=cores,
            huge_pages=self.huge_pages,
            file_systems=tuple(os.statvfs(place).f_fsid for place in places),
        )


def subject_of(config: Config, device: OpenClDevice, store: WeightStore | None) -> Subject:
    """What a daemon of this configuration works on."""
    return Subject(
        device=device.name,
        driver=device.driver,
        codec=codec_by_name(config.codec),
        threads=config.threads,
        huge_pages=config.huge_pages and has_huge_pages(),
        state=config.state_directory,
        weights=None if store is None else WeightsFile(store.path, store.fd, store.direct),
    )


async def load_or_measure(subject: Subject) -> DeviceProfile:
    """The kept profile; without one, measure and keep. A device that cannot be measured has the default."""
    try:
        kept = DeviceProfileStore(subject.state / PROFILE_FILE).load(subject.key())
        return await measure_and_keep(subject) if kept is None else kept
    except (MzdError, OSError, MemoryError) as error:
        log.warning("profile: the device cannot be measured, so the default serves: reason=%s", error)
        return DEFAULT_PROFILE


async def measure_and_keep(subject: Subject) -> MeasuredProfile:
    """Measure anew, and put the result in place of what was kept.

    A profile that cannot be kept is still good; the next start measures again.

    Raises:
        OSError, MzdError: as `measure`.
    """
    start_s = time.perf_counter()
    profile = await measure(subject)
    log.info("profile: measured: seconds=%.2f %s", time.perf_counter() - start_s, _figures(profile))
    try:
        DeviceProfileStore(subject.state / PROFILE_FILE).save(subject.key(), profile)
    except MzdError as error:
        log.warning("profile: not kept: reason=%s", error)
    return profile


def _figures(profile: MeasuredProfile) -> str:
    return " ".join(f"{name}={value:.3g}" for name, value in asdict(profile).items() if name != "source")


async def measure(subject: Subject) -> MeasuredProfile:
    """Measure in the threads that restoration uses, with little memory, leaving nothing behind.

    Decoding and reads are timed together, because a restore runs them together and they take cores and
    memory bandwidth from each other: balance is a matter of what they reach then.

    Raises:
        OSError: too little memory, or a file that cannot be written or read.
        MzdError: `internal`; the codec does not take ordinary values.
    """
    threads, groups = subject.threads, worker_groups(subject.threads)
    # Without a name from the start (or nearly, on file systems that cannot): not even SIGKILL leaves it.
    with mapped_area() as area, tempfile.TemporaryFile(dir=subject.state, buffering=0) as file:
        populate_s, release_s = await groups["allocate"].run(time_pages, area, subject.huge_pages)
        decode = await groups["decompress"].run(decoders, subject.codec, area, threads.decompress)
        new = piece_file(file.fileno(), set_direct(file.fileno()), TRANSFER_BYTES, threads.write)
        written = await rates([(groups["write"], writers(new, area, threads.write))], _WRITE_S)
        read = readers(_to_read(subject, file, new.direct), area, threads.read)
        alone = await rates([(groups["read"], read)], _READ_S)
        both = [(groups["decompress"], decode), (groups["read"], read)]
        rounds = [await rates(both, _BOTH_S) for _ in range(_BOTH_ROUNDS)]
    return MeasuredProfile(
        decode_bytes_per_s=median(decoded for decoded, _ in rounds),
        read_bytes_per_s=median(reads for _, reads in rounds),
        write_bytes_per_s=written[0],
        populate_s_per_mb=populate_s,
        read_alone_bytes_per_s=alone[0],
        release_s_per_mb=release_s,
    )


def _to_read(subject: Subject, file: IO[bytes], direct: bool) -> PieceFile:
    """The weight store; a store too small for long reads, or none, gives way to the temporary file."""
    weights, threads = subject.weights, subject.threads.read
    if weights is not None and (size_bytes := os.fstat(weights.fd).st_size) >= TRANSFER_BYTES:
        return piece_file(weights.fd, weights.direct, size_bytes, threads)
    return piece_file(file.fileno(), direct, os.fstat(file.fileno()).st_size, threads)


def profile_anew(config: Config) -> MeasuredProfile:
    """Measure without a daemon, for `mzd profile --measure`; the next start of one finds the result.

    Raises:
        MzdError: `device_lost`, `insufficient_memory`, `internal`, or as the model's store says.
    """
    state = config.state_directory
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Without its self-test: only what the device is called matters here.
        chosen = choose_device(config, partial(OpenClDevice, cache_dir=None), lambda device: None)
        with contextlib.closing(chosen.device), _store_of(config) as store:
            return trio.run(measure_and_keep, subject_of(config, chosen.device, store))
    except (OSError, MemoryError) as error:
        raise MzdError("internal", f"the device cannot be measured: {error}") from error


@contextlib.contextmanager
def _store_of(config: Config) -> Iterator[WeightStore | None]:
    """The configured model's store; None where that model is not installed."""
    try:
        path = ModelLibrary(models_directory(os.environ)).resolve(config.model).store_path
    except MzdError as error:
        if error.code != "not_found":
            raise
        yield None
        return
    with WeightStore.open(path) as store:
        yield store
