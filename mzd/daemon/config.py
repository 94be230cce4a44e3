"""Owns the daemon's configuration: its keys, their defaults, and what is refused."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from mzd.errors import MzdError
from mzd.policy.pressure import PressurePolicy

AUTO = "auto"
"""Of `Config.memory` and `Config.kernels`: what suits the device."""


@dataclass(frozen=True, slots=True)
class ThreadsConfig:
    """Threads of restoration and eviction. `cores` empty: any core."""

    read: int = 2
    decompress: int = 2
    allocate: int = 1
    write: int = 1
    compress: int = 2
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PressureConfig:
    """When memory is given back unasked. 0 for `floor_bytes`: a tenth of memory, at most 1 GiB."""

    enabled: bool = True
    floor_bytes: int = 0
    step_fraction: float = 0.25
    poll_s: float = 0.25
    psi_some_avg10: float = 10.0

    def policy(self) -> PressurePolicy:
        """The thresholds, for the monitor and for a restore that asks for room."""
        return PressurePolicy(
            floor_bytes=self.floor_bytes,
            step_fraction=self.step_fraction,
            poll_s=self.poll_s,
            psi_some_avg10=self.psi_some_avg10,
        )


@dataclass(frozen=True, slots=True)
class SwapConfig:
    """The storage swap. 0 for `quota_bytes`: no limit but the file system's."""

    storage: bool = True
    quota_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Bounds on what clients may ask for."""

    frame_bytes: int = 16 * 1024 * 1024
    connections: int = 256
    waiting: int = 64
    contexts: int = 64


@dataclass(frozen=True, slots=True)
class Config:
    """All keys of the configuration file. Empty strings mean the default of the platform.

    `device`, `memory` and `kernels` narrow the choice among the ways to compute: what they name is taken, or
    the start fails. `overlap` and `eviction_order` exist for measurement; their defaults are the paper's
    design.
    """

    model: str = "smollm2-135m"
    socket: str = ""
    socket_group: str = ""
    state: str = ""
    context: int = 0
    device: str = ""
    memory: str = "auto"
    kernels: str = "auto"
    codec: str = "int8"
    activations: str = AUTO
    overlap: str = "mz_ARP"
    eviction_order: str = "backward-out"
    restore_wait_s: float = 5.0
    lock_memory: bool = False
    huge_pages: bool = True
    log_level: str = "info"
    threads: ThreadsConfig = field(default_factory=ThreadsConfig)
    pressure: PressureConfig = field(default_factory=PressureConfig)
    swap: SwapConfig = field(default_factory=SwapConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    @property
    def state_directory(self) -> Path:
        """`--state`, else the service's state directory, else the user's."""
        if self.state:
            return Path(self.state)
        if given := os.environ.get("STATE_DIRECTORY"):
            return Path(given.split(":")[0])
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(home) / "mzd"

    @property
    def narrowing(self) -> dict[str, str]:
        """The keys that leave fewer devices, or fewer ways to use them, with their values."""
        narrowing = {
            "device": (self.device, ""),
            "memory": (self.memory, AUTO),
            "kernels": (self.kernels, AUTO),
        }
        return {key: value for key, (value, default) in narrowing.items() if value != default}

    @property
    def socket_path(self) -> Path:
        """`--socket`, else the path that clients look at first."""
        from mzd.rpc.client import default_socket_path

        return Path(self.socket) if self.socket else Path(default_socket_path())


CHOICES: Mapping[str, tuple[str, ...]] = {
    "memory": (AUTO, "fine_svm", "coarse_svm", "staged", "buffers"),
    "kernels": (AUTO, "cpu", "gpu"),
    "codec": ("int8", "none"),
    "activations": (AUTO, "int8", "f32"),
    "overlap": ("mz_NO", "mz_AR", "mz_RP", "mz_ARP"),
    "log_level": ("debug", "info", "warning", "error"),
    "eviction_order": ("backward-out", "forward-out", "random-out"),
}


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> Config:
    """Read a TOML file (or none) and lay `overrides` over it; None in them means not given.

    Raises:
        MzdError: `invalid_params`, naming the key: unknown, of a wrong type, or out of range.
    """
    table = _read_toml(path) if path is not None else {}
    config: Config = _build(Config, table, "")
    given = {key: value for key, value in overrides.items() if value is not None}
    config = replace(config, **given)
    _check(config)
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise MzdError("not_found", f"the configuration {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MzdError("invalid_params", f"the configuration {path} is no TOML: {error}") from error


def _build(kind: type[Any], table: Mapping[str, Any], prefix: str) -> Any:
    hints = get_type_hints(kind)
    unknown = sorted(set(table) - {f.name for f in fields(kind)})
    if unknown:
        raise MzdError("invalid_params", f"the configuration has no key {prefix}{unknown[0]}", key=unknown[0])
    return kind(**{key: _value(hints[key], value, prefix + key) for key, value in table.items()})


def _value(kind: Any, value: Any, key: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise _wrong(key, "a table")
        return _build(kind, value, f"{key}.")
    if kind == tuple[int, ...]:
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise _wrong(key, "a list of integers")
        return tuple(value)
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is not kind:
        raise _wrong(key, " or ".join(CHOICES.get(key, (kind.__name__,))))
    return value


def _wrong(key: str, wanted: str) -> MzdError:
    return MzdError("invalid_params", f"the configuration key {key} must be {wanted}", key=key)


def _check_text(config: Config) -> None:
    """Names and paths end at a NUL byte wherever the system takes them."""
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, str) and "\0" in value:
            raise _wrong(f.name, "text without NUL bytes")


def _check(config: Config) -> None:
    _check_text(config)
    for key, choices in CHOICES.items():
        if getattr(config, key) not in choices:
            raise _wrong(key, " or ".join(choices))
    for table in (config.threads, config.limits):
        for f in fields(table):
            value = getattr(table, f.name)
            if isinstance(value, int) and value < 1:
                raise _wrong(f.name, "1 or more")
    numbers = {
        "context": config.context,
        "restore_wait_s": config.restore_wait_s,
        "pressure.psi_some_avg10": config.pressure.psi_some_avg10,
        "pressure.floor_bytes": config.pressure.floor_bytes,
        "swap.quota_bytes": config.swap.quota_bytes,
    }
    for key, number in numbers.items():
        if not 0 <= number < math.inf:  # NaN is in no range
            raise _wrong(key, "0 or more")
    if not 0 < config.pressure.step_fraction <= 1:
        raise _wrong("pressure.step_fraction", "above 0 and at most 1")
    if not 0 < config.pressure.poll_s <= 60:
        raise _wrong("pressure.poll_s", "above 0 and at most 60")
