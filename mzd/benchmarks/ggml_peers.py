"""Owns llama.cpp in the bench `kernels`: its products of one matrix, in each kind of memory that it has."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mzd.benchmarks.ggml_library import GgmlLibrary
from mzd.benchmarks.ggml_matmul import GgmlMatmul
from mzd.benchmarks.kernel_work import INT8_TOLERANCE, PeerOperands, require_near
from mzd.benchmarks.llama_peer import import_binding
from mzd.errors import MzdError


class GgmlPeers:
    """ggml's CPU backend. Made by `find`; `close` ends it."""

    def __init__(self, library: GgmlLibrary, threads: int) -> None:
        self._library = library
        self._backend: int = library.functions.ggml_backend_cpu_init()
        library.functions.ggml_backend_cpu_set_n_threads(self._backend, threads)
        self._buffer_types = library.buffer_types(self._backend)

    @classmethod
    def find(cls, threads: int) -> GgmlPeers | None:
        """llama.cpp's kernels on `threads` threads, or None where its binding or they are missing."""
        binding = import_binding()
        try:
            return None if binding is None else cls(GgmlLibrary(binding), threads)
        except MzdError:
            return None

    @contextmanager
    def products(self, operands: PeerOperands, num_copies: int) -> Iterator[dict[str, GgmlMatmul]]:
        """The product by name, checked, in each kind of memory that has a kernel for it.

        Raises:
            MzdError: `device_lost`; llama.cpp computes something else than NumPy.
        """
        with ExitStack() as stack:
            found = {}
            for name, buffer_type in self._buffer_types.items():
                try:
                    product = self._product(operands, num_copies, buffer_type)
                except MzdError as error:
                    if error.code != "unsupported_type":
                        raise
                    continue
                stack.callback(product.close)
                product.run()
                what = f"llama.cpp {name} {operands.type.name}"
                require_near(what, product.result(), operands.expected, INT8_TOLERANCE)
                found[f"llama.cpp {name}"] = product
            yield found

    def _product(self, operands: PeerOperands, num_copies: int, buffer_type: int) -> GgmlMatmul:
        return GgmlMatmul(
            self._library,
            self._backend,
            operands.type,
            operands.raw,
            operands.x,
            num_copies=num_copies,
            buffer_type=buffer_type,
        )

    def close(self) -> None:
        """Free the backend."""
        self._library.functions.ggml_backend_free(self._backend)


def seconds(product: GgmlMatmul) -> float:
    """Seconds of the product with all copies."""
    start_s = time.perf_counter()
    product.run()
    return time.perf_counter() - start_s
