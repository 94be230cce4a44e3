"""Owns the choice of the device by proof: the best way to compute that passes its self-test is taken."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import pyopencl as cl

from mzd.daemon.config import Config
from mzd.daemon.kernel_cache import KernelCache
from mzd.daemon.refused_devices import Refusal
from mzd.device.opencl import OpenClDevice
from mzd.device.selection import KERNEL_CLASSES, MEMORY_KINDS, Candidate, candidates
from mzd.errors import MzdError

log = logging.getLogger(__name__)

OpenDevice = Callable[[Candidate], OpenClDevice]
Prove = Callable[[OpenClDevice], None]
"""Raises a `MzdError` where the device computes wrongly."""

_DEVICE_FAULTS = frozenset({"device_lost", "internal", "insufficient_memory"})
"""Codes that speak against a device or its driver (one that does not build a kernel gives ``internal``);
others, such as an unsupported model, would be the same on any."""


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """The device that computes, open, and what was refused before it."""

    device: OpenClDevice
    refusals: tuple[Refusal, ...]


def ways_to_compute(config: Config) -> list[Candidate]:
    """All devices and ways to use them that `config` allows, best first.

    Raises:
        MzdError: ``device_lost``: there is none; says which keys to change, where keys narrow the choice.
    """
    memory = next((kind for kind in MEMORY_KINDS if kind == config.memory), None)
    kernels = next((kind for kind in KERNEL_CLASSES if kind == config.kernels), None)
    try:
        return candidates(config.device or None, memory, kernels)
    except MzdError as error:
        raise MzdError(error.code, f"{error.message}; {_advice(config)}", **error.data) from error


def choose_device(
    config: Config,
    open_device: OpenDevice,
    prove: Prove,
    *,
    refusals: list[Refusal] | None = None,
    cache: KernelCache | None = None,
) -> ChosenDevice:
    """Open and try one way to compute after the other, until one is right.

    Args:
        refusals: an empty list, for those who want to know them in any case.
        cache: of compiled kernels; a refusal that may come of its damage empties it, and the way to compute
            is tried again.

    Raises:
        MzdError: ``device_lost``: none is left, with each refusal in the message and in ``data``; or what
            `prove` says against the model.
    """
    refusals = [] if refusals is None else refusals
    for candidate in ways_to_compute(config):
        try:
            device = _proven_anew(candidate, open_device, prove, cache)
        except MzdError as error:
            if error.code not in _DEVICE_FAULTS:
                raise
            refusals.append(_refusal(candidate, error))
            log.warning("device refused: %s", refusals[-1])
            continue
        _log_choice(device, len(refusals))
        return ChosenDevice(device, tuple(refusals))
    raise _none_left(config, refusals)


def _proven_anew(
    candidate: Candidate, open_device: OpenDevice, prove: Prove, cache: KernelCache | None
) -> OpenClDevice:
    """Open and try; once more where compiled kernels were damaged."""
    try:
        return _proven(candidate, open_device, prove)
    except MzdError as error:
        if cache is None or not cache.empty_after(_refusal(candidate, error), error):
            raise
    return _proven(candidate, open_device, prove)


def _proven(candidate: Candidate, open_device: OpenDevice, prove: Prove) -> OpenClDevice:
    """Open and try; a device that fails is closed."""
    try:
        device = open_device(candidate)
    except cl.Error as error:
        raise MzdError("device_lost", f"it cannot be opened: {error}") from error
    try:
        prove(device)
    except BaseException:
        with contextlib.suppress(MzdError):  # what it failed with says more
            device.close()
        raise
    return device


def _refusal(candidate: Candidate, error: MzdError) -> Refusal:
    return Refusal(
        device=candidate.name,
        memory=candidate.memory_kind,
        kernels=candidate.kernel_class,
        kernel=str(error.data.get("kernel", "")),
        reason=error.message.splitlines()[0],  # a compiler's log goes on for pages
    )


def _log_choice(device: OpenClDevice, num_refused: int) -> None:
    log.info(
        "device: name=%s driver=%s memory=%s kernels=%s refused=%d",
        device.name,
        device.driver,
        device.memory_kind,
        device.kernel_class,
        num_refused,
    )


def _none_left(config: Config, refusals: Sequence[Refusal]) -> MzdError:
    told = "; ".join(map(str, refusals))
    message = f"no device computes right: {told}; {_advice(config)}"
    return MzdError("device_lost", message, refusals=[asdict(refusal) for refusal in refusals])


def _advice(config: Config) -> str:
    """What to change: the keys that narrow the choice, else the drivers."""
    narrowed = [f'{key} = "{value}"' for key, value in config.narrowing.items()]
    if narrowed:
        return f"the configuration allows nothing else: change or leave out {', '.join(narrowed)}"
    return "install another OpenCL driver, for the CPU pocl-opencl-icd (mzd doctor shows what there is)"
