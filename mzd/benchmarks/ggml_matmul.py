"""Owns the peer of a matrix product: `ggml_mul_mat` on the same weights, activations and threads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mzd.benchmarks.ggml_library import GgmlLibrary, InitParams
from mzd.errors import MzdError
from mzd.formats.ggml_types import GgmlType


class GgmlMatmul:
    """y = x W^T, once for each of some copies of W in one graph, as a model has one for each of its layers.

    Args:
        raw: (rows, row bytes) uint8, GGUF blocks of `type`.
        x: (tokens, cols) float32.
        num_copies: of W, so that it comes from memory as a model's would.
        buffer_type: in which kind of memory W lies, of `GgmlLibrary.buffer_types`.

    Raises:
        MzdError: `insufficient_memory`; `unsupported_type`, this kind of memory has no kernel for that.
    """

    def __init__(
        self,
        library: GgmlLibrary,
        backend: int,
        type: GgmlType,
        raw: NDArray[np.uint8],
        x: NDArray[np.float32],
        *,
        num_copies: int,
        buffer_type: int,
    ) -> None:
        self._ggml = library.functions
        self._backend = backend
        self._y_shape = len(x), len(raw)
        self._contexts: list[int] = []
        self._buffers: list[int] = []
        try:
            self._build(library, type, raw, x, num_copies, buffer_type)
        except MzdError:
            self.close()
            raise

    def _build(
        self,
        library: GgmlLibrary,
        type: GgmlType,
        raw: NDArray[np.uint8],
        x: NDArray[np.float32],
        num_copies: int,
        buffer_type: int,
    ) -> None:
        ggml, cols = self._ggml, x.shape[1]
        weights_context = self._context(num_copies)
        weights = [ggml.ggml_new_tensor_2d(weights_context, type, cols, len(raw)) for _ in range(num_copies)]
        self._allocate(weights_context, buffer_type)
        context = self._context(num_copies + 1, graph_nodes=num_copies)
        inputs = ggml.ggml_new_tensor_2d(context, GgmlType.F32, *x.shape[::-1])
        outputs = [ggml.ggml_mul_mat(context, matrix, inputs) for matrix in weights]
        if not ggml.ggml_backend_dev_supports_op(library.device, outputs[0]):
            raise MzdError("unsupported_type", f"llama.cpp has no kernel for {type.name} in this memory")
        self._graph = ggml.ggml_new_graph_custom(context, 2 * num_copies + 1, False)
        for output in outputs:
            ggml.ggml_build_forward_expand(self._graph, output)
        self._allocate(context, ggml.ggml_backend_get_default_buffer_type(self._backend))
        for matrix in weights:
            ggml.ggml_backend_tensor_set(matrix, raw.ctypes.data, 0, raw.nbytes)
        ggml.ggml_backend_tensor_set(inputs, x.ctypes.data, 0, x.nbytes)
        self._last = outputs[-1]

    def run(self) -> None:
        """Compute the product with every copy.

        Raises:
            MzdError: `internal`; ggml refused.
        """
        status = self._ggml.ggml_backend_graph_compute(self._backend, self._graph)
        if status:
            raise MzdError("internal", f"ggml_backend_graph_compute failed with {status}")

    def result(self) -> NDArray[np.float32]:
        """(tokens, rows) float32 of the last copy."""
        y = np.empty(self._y_shape, np.float32)
        self._ggml.ggml_backend_tensor_get(self._last, y.ctypes.data, 0, y.nbytes)
        return y

    def close(self) -> None:
        """Free everything but the backend."""
        for buffer in self._buffers:
            self._ggml.ggml_backend_buffer_free(buffer)
        for context in self._contexts:
            self._ggml.ggml_free(context)

    def _context(self, num_tensors: int, *, graph_nodes: int = 0) -> int:
        """A context for the descriptions of tensors and perhaps a graph; their data lie elsewhere."""
        size_bytes = (2 * num_tensors + 1) * self._ggml.ggml_tensor_overhead()
        if graph_nodes:
            size_bytes += self._ggml.ggml_graph_overhead_custom(2 * graph_nodes + 1, False)
        context: int = self._ggml.ggml_init(InitParams(size_bytes, None, True))
        self._contexts.append(context)
        return context

    def _allocate(self, context: int, buffer_type: int) -> None:
        """Give the tensors of a context memory."""
        buffer = self._ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
        if not buffer:
            raise MzdError("insufficient_memory", "llama.cpp has no room for the matrices")
        self._buffers.append(buffer)
