"""Owns matrix products with packed weights: one object per call site, the kernel chosen by token count."""

from __future__ import annotations

from typing import Protocol

from mzd.device.kernel import BoundKernel
from mzd.device.opencl import OpenClDevice
from mzd.formats.ggml_types import GgmlType
from mzd.formats.weight_layout import group_layout

NARROW_TOKENS_MAX = 8
TILE_ROWS = 32  # weights unpacked together: 32 x 256 floats are 32 KiB, which leaves room in a 48 KiB L1
TILE_COLS = 256
WIDE_BLOCK_TOKENS = 64  # their x for one tile is 64 KiB and stays in L2; M=512: 0.87-0.93 of unblocked
_PAIR_ROWS = 16  # two row groups are one vector (weights.cl)
_WIDE_STEP_TOKENS = 8  # the largest WIDE_TOKENS of matmul.cl
_GROUPS_PER_UNIT = 4  # work-groups per compute unit at few tokens: 1-4 are best, 48 cost 1.2-1.8x


class WeightShape(Protocol):
    """What a product needs to know of a matrix; `TensorSpec` has it."""

    @property
    def type(self) -> GgmlType: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...


class Matmul:
    """y = x W^T, or y += x W^T, for one matrix shape at one call site.

    Kernel objects are this call site's own, so that a launch sets only the arguments that changed.

    Args:
        spec: element type, rows (outputs) and cols (inputs) of W.
        tokens_max: the largest `num_tokens` of `enqueue`.

    Raises:
        FormatError: `unsupported_type`, or `cols` is no multiple of the type's block.
    """

    def __init__(self, device: OpenClDevice, spec: WeightShape, *, tokens_max: int) -> None:
        num_blocks = group_layout(spec.type, spec.cols).num_blocks
        self._rows = spec.rows
        self._tokens_max = tokens_max
        self._num_pairs = -(-spec.rows // _PAIR_ROWS)
        self._num_groups = min(self._num_pairs, _GROUPS_PER_UNIT * device.compute_units)
        program = device.build(
            "matmul", TILE_ROWS=TILE_ROWS, TILE_COLS=TILE_COLS, **{f"WEIGHT_{spec.type.name}": 1}
        )
        self._gemv = device.kernel(program, "gemv")
        self._narrow = device.kernel(program, "matmul_narrow")
        self._wide = device.kernel(program, "matmul_wide")
        for kernel in (self._gemv, self._narrow, self._wide):
            kernel.set_int(3, spec.rows)
            kernel.set_int(4, spec.cols)
        self._gemv.set_local(6, 4 * num_blocks)

    def enqueue(
        self,
        *,
        weights_address: int,
        x_address: int,
        y_address: int,
        num_tokens: int,
        accumulate: bool = False,
    ) -> None:
        """Enqueue the product of `num_tokens` rows of x; nothing happens for none.

        Args:
            weights_address: of the packed matrix, a multiple of 64; resident until the launch is over.
            x_address: (num_tokens, cols) float32, C-contiguous.
            y_address: (num_tokens, rows) float32, C-contiguous; may not overlap x.
            accumulate: add to y instead of replacing it.

        Raises:
            ValueError: `num_tokens` is negative or above `tokens_max`.
        """
        if not 0 <= num_tokens <= self._tokens_max:
            raise ValueError(f"{num_tokens} tokens, at most {self._tokens_max}")
        if num_tokens == 0:
            return
        kernel, global_size = self._choose(num_tokens)
        kernel.set_address(0, weights_address)
        kernel.set_address(1, x_address)
        kernel.set_address(2, y_address)
        kernel.set_int(5, int(accumulate))
        kernel.enqueue(global_size, (1,) * len(global_size))

    def _choose(self, num_tokens: int) -> tuple[BoundKernel, tuple[int, ...]]:
        """The kernel for `num_tokens`, its own arguments set, and its global size."""
        if num_tokens == 1:
            return self._gemv, (self._num_groups,)
        if num_tokens <= NARROW_TOKENS_MAX:
            self._narrow.set_int(6, num_tokens)
            return self._narrow, (self._num_groups,)
        num_blocks = -(-num_tokens // WIDE_BLOCK_TOKENS)
        block_tokens = _round_up(-(-num_tokens // num_blocks), _WIDE_STEP_TOKENS)  # blocks of equal work
        self._wide.set_int(6, num_tokens)
        self._wide.set_int(7, block_tokens)
        return self._wide, (-(-self._rows // TILE_ROWS), -(-num_tokens // block_tokens))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
