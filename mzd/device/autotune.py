"""Owns the measuring of launch shapes on a GPU, and the file that keeps what was found.

The rule of `matmul_choice` is near the best on the device that it was made on. Elsewhere a short search finds
what suits, once for each device, driver, kernel source and matrix shape.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from mzd.device.matmul_choice import (
    TILES,
    TOKEN_CLASSES,
    Choice,
    ProductKey,
    Tile,
    candidates,
    default_choice,
    product_key,
    token_class,
)
from mzd.device.matmul_gpu import GpuProduct, gpu_limits
from mzd.device.matmul_shape import INT8_TYPES, Activations, Operands, WeightShape
from mzd.device.opencl import OpenClDevice
from mzd.device.replay import Replay
from mzd.formats.ggml_types import GgmlType
from mzd.formats.weight_layout import packed_size_bytes, row_group_extent
from mzd.kernels import kernel_source

log = logging.getLogger(__name__)

BUDGET_S = 2.0
"""For all products of a model; what has not had its turn by then stays with the rule, for good."""

GAIN_MIN = 0.07
"""A choice other than the rule's must save this share of the time, or noise would choose."""

BATCHES = 3
BATCH_LAUNCHES = 8
"""The time of a choice is the best of the batches: launches in a row hide the wait for the last."""

WEIGHTS_BYTES_MAX = 32 << 20
"""Of larger matrices the first rows are measured: there are row groups enough to choose by."""

_FORMAT = 1
_SOURCES = ("matmul_gpu", "matmul_int8_gpu", "matmul_wide_gpu", "matmul_wide_int8_gpu")


@dataclass(frozen=True, slots=True)
class Shape:
    """A matrix to measure; a `WeightShape`."""

    type: GgmlType
    rows: int
    cols: int


def autotune(
    device: OpenClDevice,
    shapes: Iterable[WeightShape],
    *,
    tokens_max: int,
    activations: Activations,
    path: Path,
    budget_s: float = BUDGET_S,
) -> dict[ProductKey, Choice]:
    """Return choices for the products of `shapes`, for `Matmul`; measure those that `path` does not hold.

    The queue must be idle. Devices of the CPU class have no choice to make.

    Args:
        tokens_max: of one product.
        path: a file of this module; a damaged one counts as empty. It is replaced as a whole.

    Raises:
        OSError: the file cannot be written.
        MzdError: `insufficient_memory`.
    """
    if device.kernel_class != "gpu":
        return {}
    identity = _identity(device)
    known = load_choices(path, identity)
    wanted = _wanted(shapes, tokens_max, activations)
    missing = {key: shape for key, shape in wanted.items() if key not in known}
    if missing:
        known |= _search(device, missing, budget_s)
        save_choices(path, identity, known)
    return {key: known[key] for key in wanted}


def pick(default: Choice, times_s: Mapping[Choice, float]) -> Choice:
    """The fastest choice, or the default one unless that saves `GAIN_MIN`."""
    best = min(times_s, key=lambda choice: times_s[choice])
    return best if times_s[best] <= (1.0 - GAIN_MIN) * times_s[default] else default


def measure_while(
    allowed: Callable[[], bool], choices: Iterable[Choice], measure: Callable[[Choice], float]
) -> dict[Choice, float]:
    """Seconds of each choice, as far as `allowed` lets it go on."""
    times_s = {}
    for choice in choices:
        if not allowed():
            break
        times_s[choice] = measure(choice)
    return times_s


def load_choices(path: Path, identity: str) -> dict[ProductKey, Choice]:
    """What the file holds for `identity`; nothing if it is missing or damaged."""
    try:
        document = json.loads(path.read_bytes())
        entries = document["devices"].get(identity, {}) if document["format"] == _FORMAT else {}
        return {_decode_key(text): _decode_choice(value) for text, value in entries.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("launch shapes are measured anew, %s is damaged: %r", path, error)
        return {}


def save_choices(path: Path, identity: str, choices: Mapping[ProductKey, Choice]) -> None:
    """Replace the file: what it holds for other devices stays, as far as it is readable."""
    try:
        document = json.loads(path.read_bytes())
        devices = dict(document["devices"]) if document["format"] == _FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError):
        devices = {}
    devices[identity] = {_encode_key(key): _encode_choice(choice) for key, choice in choices.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"format": _FORMAT, "devices": devices}, indent=1))
    temporary.replace(path)


def _identity(device: OpenClDevice) -> str:
    """Device, driver and kernels: a measurement is worth nothing for others."""
    sources = hashlib.sha256("".join(kernel_source(name) for name in _SOURCES).encode()).hexdigest()
    return f"{device.name}, {device.driver}, {sources[:16]}"


def _wanted(
    shapes: Iterable[WeightShape], tokens_max: int, activations: Activations
) -> dict[ProductKey, WeightShape]:
    """Each product to choose for, once; those of one token first, since they are most of a device's time."""
    shapes = list(shapes)
    last = TOKEN_CLASSES.index(token_class(tokens_max))
    return {
        product_key(shape, tokens, int8=activations == "int8" and shape.type in INT8_TYPES): shape
        for tokens in TOKEN_CLASSES[: last + 1]
        for shape in shapes
    }


def _search(
    device: OpenClDevice, missing: Mapping[ProductKey, WeightShape], budget_s: float
) -> dict[ProductKey, Choice]:
    """Measure the candidates of each product until the budget is spent."""
    limits = gpu_limits(device)
    deadline_s = time.monotonic() + budget_s
    found = {}
    for key, shape in missing.items():
        found[key] = default_choice(limits, shape, key.tokens_class, int8=key.int8)
        if time.monotonic() < deadline_s:
            with _Bench(device, key, shape) as bench:
                tried = candidates(limits, shape, key.tokens_class, int8=key.int8)
                times_s = measure_while(lambda: time.monotonic() < deadline_s, tried, bench.time_s)
            if found[key] in times_s:
                found[key] = pick(found[key], times_s)
    log.info(
        "measured launch shapes of %d products in %.1f s",
        len(found),
        time.monotonic() - deadline_s + budget_s,
    )
    return found


class _Bench:
    """Memory for one product, and the time that a choice takes on it. A context: leaving frees the memory."""

    def __init__(self, device: OpenClDevice, key: ProductKey, shape: WeightShape) -> None:
        _, group_bytes = row_group_extent(shape.type, shape.rows, shape.cols, 0)
        rows = min(shape.rows, max(1, WEIGHTS_BYTES_MAX // group_bytes) * 8)
        self._device = device
        self._key = key
        self._shape = Shape(shape.type, rows, shape.cols)
        self._memory = ExitStack()

    def __enter__(self) -> _Bench:
        shape, tokens = self._shape, self._key.tokens_class
        sizes = (
            packed_size_bytes(shape.type, shape.rows, shape.cols),
            4 * tokens * shape.cols,
            4 * tokens * shape.rows,
        )
        weights, x, y = (self._allocate(size_bytes) for size_bytes in sizes)
        self._operands = Operands(weights, x, y, tokens, accumulate=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._device.finish()
        self._memory.close()

    def _allocate(self, size_bytes: int) -> int:
        buffer = self._device.allocate_scratch(size_bytes)
        self._memory.callback(buffer.free)
        return buffer.address

    def time_s(self, choice: Choice) -> float:
        """Seconds of one product, the best of a few batches; not of the first, which may compile."""
        key = product_key(self._shape, self._key.tokens_class, int8=self._key.int8)
        product = GpuProduct(
            self._device,
            self._shape,
            tokens_max=self._key.tokens_class,
            int8=self._key.int8,
            choices={key: choice},
        )
        self._memory.callback(product.free)
        row = Replay(self._device.kernel_queue)  # from Python each launch may take longer than it runs
        self._run(row, product)
        return min(self._run(row, product) for _ in range(BATCHES)) / BATCH_LAUNCHES

    def _run(self, row: Replay, product: GpuProduct) -> float:
        """Seconds that a batch takes until the queue is empty."""

        def enqueue() -> None:
            for _ in range(BATCH_LAUNCHES):
                product.enqueue(self._operands)

        begin_s = time.perf_counter()
        row.run(product, enqueue)
        self._device.finish()
        return time.perf_counter() - begin_s


def _encode_key(key: ProductKey) -> str:
    activations = "int8" if key.int8 else "f32"
    return f"{key.type.name} {key.rows_class} {key.cols} {key.tokens_class} {activations}"


def _decode_key(text: str) -> ProductKey:
    type_name, rows_class, cols, tokens_class, activations = text.split()
    return ProductKey(
        GgmlType[type_name], int(rows_class), int(cols), int(tokens_class), activations == "int8"
    )


def _encode_choice(choice: Choice) -> dict[str, Any]:
    return {"lanes": choice.lanes, "tile": None if choice.tile is None else list(astuple(choice.tile))}


def _decode_choice(value: Mapping[str, Any]) -> Choice:
    """Raise ValueError, KeyError or TypeError for what no choice can be."""
    lanes = value["lanes"]
    if type(lanes) is not int or lanes < 2 or lanes & (lanes - 1):
        raise ValueError(f"lanes {lanes!r}")
    if value["tile"] is None:
        return Choice(lanes)
    tile = Tile(*value["tile"])
    if tile not in TILES:
        raise ValueError(f"tile {tile!r}")
    return Choice(lanes, tile)
