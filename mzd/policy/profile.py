"""Owns what is known of a device's speed, and the times per unit that plans are made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class ProfileSource(StrEnum):
    """Where a profile's figures come from."""

    DEFAULT = "default"
    MEASURED = "measured"


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, not {value}")


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device's throughputs, measured once and kept; another model only rescales the times.

    Attributes:
        decode_bytes_per_s: FP16 bytes that come out of the codec, on all threads of a restore.
        read_bytes_per_s: sequential direct reads.
        write_bytes_per_s: sequential writes.
        populate_s_per_mb: seconds to make 10^6 bytes of fresh memory resident.

    Raises:
        ValueError: a figure is not a positive, finite number.
    """

    decode_bytes_per_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    populate_s_per_mb: float
    source: ProfileSource = ProfileSource.MEASURED

    def __post_init__(self) -> None:
        _check_positive("decode_bytes_per_s", self.decode_bytes_per_s)
        _check_positive("read_bytes_per_s", self.read_bytes_per_s)
        _check_positive("write_bytes_per_s", self.write_bytes_per_s)
        _check_positive("populate_s_per_mb", self.populate_s_per_mb)


DEFAULT_PROFILE: Final = DeviceProfile(
    decode_bytes_per_s=4e9,
    read_bytes_per_s=2e9,
    write_bytes_per_s=5e8,
    populate_s_per_mb=1e-3,
    source=ProfileSource.DEFAULT,
)
"""Until a device is measured: int8 on two cores of a phone, UFS 3.1, 4 KiB pages. A wrong figure
costs balance, never correctness."""


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds per unit, the inputs of Algorithm 1 (paper, 4.3).

    Attributes:
        t_dkv_s: decompress one KV chunk.
        t_rkv_s: read one KV chunk (FP16) from flash.
        t_rw_s: read one weight layer of mean size from flash.

    Raises:
        ValueError: a time is not a positive, finite number.
    """

    t_dkv_s: float
    t_rkv_s: float
    t_rw_s: float

    def __post_init__(self) -> None:
        _check_positive("t_dkv_s", self.t_dkv_s)
        _check_positive("t_rkv_s", self.t_rkv_s)
        _check_positive("t_rw_s", self.t_rw_s)

    def kv_threshold(self, num_layers: int) -> float:
        """T without the floor: the chunks that keep decompression busy while `num_layers` layers reload.

        The planner carries the remainder, so that layers of a few chunks' time stay balanced too.
        """
        return num_layers * self.t_rw_s / self.t_dkv_s

    def kv_threshold_floored(self, num_layers: int) -> int:
        """T as the paper writes it: `num_layers * floor(t_rW / t_dKV)`."""
        return num_layers * math.floor(self.t_rw_s / self.t_dkv_s)


def unit_times(profile: DeviceProfile, *, chunk_bytes: int, layer_bytes: float) -> UnitTimes:
    """Rescale a profile to a model.

    Args:
        chunk_bytes: FP16 bytes of one KV chunk.
        layer_bytes: mean bytes of one weight layer in the store.
    """
    return UnitTimes(
        t_dkv_s=chunk_bytes / profile.decode_bytes_per_s,
        t_rkv_s=chunk_bytes / profile.read_bytes_per_s,
        t_rw_s=layer_bytes / profile.read_bytes_per_s,
    )
