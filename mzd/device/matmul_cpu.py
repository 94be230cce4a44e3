"""Owns the matrix products of the CPU class: a work-group is one work-item, its vectors' lanes are rows."""

from __future__ import annotations

from mzd.device.kernel import BoundKernel
from mzd.device.matmul_shape import INT8_TYPES, Activations, Operands, WeightShape, divide_up
from mzd.device.opencl import Define, OpenClDevice, Program
from mzd.formats.architectures import Activation
from mzd.formats.ggml_types import GgmlType
from mzd.formats.weight_layout import group_layout

SCALED_WEIGHTS = {GgmlType.Q4_K: 32, GgmlType.Q5_K: 32, GgmlType.Q6_K: 16}
"""Weights with a scale of their own, of the types whose blocks have several."""

PAIR_ROWS = 16
"""Rows of one vector: two row groups (weights.cl)."""

TILE_TOKENS_MAX = 8
"""The most tokens that a kernel keeps in registers; blocks of tokens are multiples of it."""

GROUPS_PER_UNIT = 2
"""Work-groups per compute unit: 1 to 4 are level, but for int8 4 took 1.1-1.3 times the CPU time of 2 at
8 tokens (each rounds its x again); 48 took 1.2-1.8 times as long at one token."""

EXACT_NARROW_TOKENS_MAX = 8
EXACT_TILE_ROWS = 32
EXACT_TILE_COLS = 256
"""Weights unpacked at a time: 32 x 256 floats are 32 KiB, which leaves room in a 48 KiB L1."""

BLOCK_TOKENS_MAX = 64
"""Tokens of a work-group: x of one exact tile is 64 KiB and stays in L2; M=512: 0.87-0.93 of unblocked."""

INT8_RECORDS_BYTES = 128 * 1024
"""Rounded tokens that a work-group keeps in local memory, which is L2 on a CPU."""


class _CpuProduct:
    """One launch a product; subclasses choose the kernel."""

    def enqueue(self, operands: Operands) -> None:
        """See `Product.enqueue`."""
        kernel, global_size = self._choose(operands.num_tokens)
        kernel.set_address(0, operands.weights)
        kernel.set_address(1, operands.x)
        kernel.set_address(2, operands.y)
        kernel.set_int(5, int(operands.accumulate))
        kernel.enqueue(global_size, (1,) * len(global_size))

    def free(self) -> None:
        """Nothing was allocated."""

    def _choose(self, num_tokens: int) -> tuple[BoundKernel, tuple[int, ...]]:
        """Return the kernel for `num_tokens`, its own arguments set, and its global size."""
        raise NotImplementedError


class ExactCpuProduct(_CpuProduct):
    """matmul.cl: float activations."""

    def __init__(self, device: OpenClDevice, spec: WeightShape) -> None:
        program = _build_exact(device, spec)
        self._gemv = device.kernel(program, "gemv")
        self._narrow = device.kernel(program, "matmul_narrow")
        self._wide = device.kernel(program, "matmul_wide")
        _set_shape(spec, self._gemv, self._narrow, self._wide)
        self._gemv.set_local(6, _copy_bytes(spec))
        self._num_row_groups = _num_row_groups(device, spec)
        self._num_row_tiles = divide_up(spec.rows, EXACT_TILE_ROWS)

    def _choose(self, num_tokens: int) -> tuple[BoundKernel, tuple[int, ...]]:
        if num_tokens == 1:
            return self._gemv, (self._num_row_groups,)
        if num_tokens <= EXACT_NARROW_TOKENS_MAX:
            self._narrow.set_int(6, num_tokens)
            return self._narrow, (self._num_row_groups,)
        block_tokens = _block_tokens(num_tokens, BLOCK_TOKENS_MAX)
        self._wide.set_int(6, num_tokens)
        self._wide.set_int(7, block_tokens)
        return self._wide, (self._num_row_tiles, divide_up(num_tokens, block_tokens))


class Int8CpuProduct(_CpuProduct):
    """matmul_int8.cl: activations rounded to 8 bits inside each work-group."""

    def __init__(self, device: OpenClDevice, spec: WeightShape) -> None:
        program = _build_int8(device, spec)
        self._gemv = device.kernel(program, "gemv_int8")
        self._many = device.kernel(program, "matmul_int8")
        _set_shape(spec, self._gemv, self._many)
        self._record_bytes = _record_bytes(spec)
        self._gemv.set_local(6, self._record_bytes)
        block_tokens = INT8_RECORDS_BYTES // self._record_bytes // TILE_TOKENS_MAX * TILE_TOKENS_MAX
        self._block_tokens_max = min(max(block_tokens, TILE_TOKENS_MAX), BLOCK_TOKENS_MAX)
        self._num_row_groups = _num_row_groups(device, spec)
        self._num_pairs = _num_pairs(spec)
        self._num_groups = GROUPS_PER_UNIT * device.compute_units

    def _choose(self, num_tokens: int) -> tuple[BoundKernel, tuple[int, ...]]:
        if num_tokens == 1:
            return self._gemv, (self._num_row_groups,)
        block_tokens = _block_tokens(num_tokens, self._block_tokens_max)
        num_token_blocks = divide_up(num_tokens, block_tokens)
        self._many.set_local(6, block_tokens * self._record_bytes)
        self._many.set_int(7, num_tokens)
        self._many.set_int(8, block_tokens)
        # As few row groups as keep the device busy: each rounds its tokens again.
        num_row_groups = min(self._num_pairs, divide_up(self._num_groups, num_token_blocks))
        return self._many, (num_row_groups, num_token_blocks)


class FusedCpuProduct:
    """y = f(x) W^T, or y += f(x) W^T, of ONE token in one launch; f is an RMS norm or a gate.

    Args:
        activations: as `Matmul`'s; f(x) is what they say.
        norm_eps: f is the norm with this epsilon; None: the gate.
        activation: the gate's function.
    """

    def __init__(
        self,
        device: OpenClDevice,
        spec: WeightShape,
        *,
        activations: Activations,
        norm_eps: float | None = None,
        activation: Activation = "silu",
    ) -> None:
        defines: dict[str, Define] = {} if activation == "silu" else {f"GATE_{activation.upper()}": 1}
        name = "gemv_gated" if norm_eps is None else "gemv_normed"
        if activations == "int8" and spec.type in INT8_TYPES:
            self._kernel = device.kernel(_build_int8(device, spec, **defines), f"{name}_int8")
            self._kernel.set_local(7, _record_bytes(spec))
        else:
            self._kernel = device.kernel(_build_exact(device, spec, **defines), name)
            self._kernel.set_local(7, _copy_bytes(spec))
        self._kernel.set_int(4, spec.rows)
        self._kernel.set_int(5, spec.cols)
        if norm_eps is not None:
            self._kernel.set_float(8, norm_eps)
        self._global_size = (_num_row_groups(device, spec),)

    def enqueue(
        self,
        *,
        weights_address: int,
        x_address: int,
        other_address: int,
        y_address: int,
        accumulate: bool = False,
    ) -> None:
        """Enqueue the product; addresses as `Matmul.enqueue`'s.

        Args:
            other_address: the norm's weights, or what the gate is multiplied by: (cols,) float32.
        """
        addresses = (weights_address, x_address, y_address, other_address)
        for argument, address in enumerate(addresses):
            self._kernel.set_address(argument, address)
        self._kernel.set_int(6, int(accumulate))
        self._kernel.enqueue(self._global_size, (1,))


def _build_exact(device: OpenClDevice, spec: WeightShape, **defines: Define) -> Program:
    tiles: dict[str, Define] = {"TILE_ROWS": EXACT_TILE_ROWS, "TILE_COLS": EXACT_TILE_COLS}
    return device.build("matmul", **{f"WEIGHT_{spec.type.name}": 1}, **tiles, **defines)


def _build_int8(device: OpenClDevice, spec: WeightShape, **defines: Define) -> Program:
    return device.build("matmul_int8", **{f"WEIGHT_{spec.type.name}": 1}, **defines)


def _copy_bytes(spec: WeightShape) -> int:
    """Local memory for x of one token: its columns, and a sum for each block. Raises as `group_layout`."""
    return 4 * (spec.cols + _num_scaled_blocks(spec))


def _record_bytes(spec: WeightShape) -> int:
    """Local memory for one rounded token: with each block a scale and a sum. Raises as `group_layout`."""
    x_bytes = 2 if spec.type == GgmlType.Q8_0 else 1
    return spec.cols * x_bytes + _num_scaled_blocks(spec) * 8


def _num_row_groups(device: OpenClDevice, spec: WeightShape) -> int:
    """Work-groups that share the rows at one token."""
    return min(_num_pairs(spec), GROUPS_PER_UNIT * device.compute_units)


def _set_shape(spec: WeightShape, *kernels: BoundKernel) -> None:
    for kernel in kernels:
        kernel.set_int(3, spec.rows)
        kernel.set_int(4, spec.cols)


def _num_scaled_blocks(spec: WeightShape) -> int:
    """Runs of a row's columns that share one scale, the kernels' blocks. Raises as `group_layout`."""
    num_blocks = group_layout(spec.type, spec.cols).num_blocks
    return num_blocks * spec.type.block_weights // SCALED_WEIGHTS.get(spec.type, spec.type.block_weights)


def _num_pairs(spec: WeightShape) -> int:
    return divide_up(spec.rows, PAIR_ROWS)


def _block_tokens(num_tokens: int, block_tokens_max: int) -> int:
    """Tokens of a block, a multiple of `TILE_TOKENS_MAX`, so that all blocks have about equal work."""
    num_blocks = divide_up(num_tokens, block_tokens_max)
    return divide_up(divide_up(num_tokens, num_blocks), TILE_TOKENS_MAX) * TILE_TOKENS_MAX
