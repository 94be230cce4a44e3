"""Owns the typed ctypes view of ggml, llama.cpp's kernels, as its Python binding bundles it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from mzd.errors import MzdError

REPACKED: Final = "CPU_REPACK"
"""The buffer type in which llama.cpp lays weights out anew for its fastest kernels, where a type has some."""


class InitParams(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_log_set": (None, [c_void_p, c_void_p]),
    "ggml_init": (c_void_p, [InitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead_custom": (c_size_t, [c_size_t, c_bool]),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph_custom": (c_void_p, [c_void_p, c_size_t, c_bool]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_get_default_buffer_type": (c_void_p, [c_void_p]),
    "ggml_backend_buft_name": (c_char_p, [c_void_p]),
    "ggml_backend_reg_dev_get": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_dev_supports_op": (c_bool, [c_void_p, c_void_p]),
    "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
    "ggml_backend_free": (None, [c_void_p]),
    "ggml_backend_cpu_init": (c_void_p, []),
    "ggml_backend_cpu_reg": (c_void_p, []),
    "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
}


class GgmlLibrary:
    """ggml's functions, tensors as well as the CPU backend, in `functions`.

    They are looked up through llama.cpp's own library, which depends on ggml's: a wheel cannot hold links, so
    what has several names in it is several files, and loading another one would be a second ggml.

    Raises:
        MzdError: `not_found`; the binding does not bundle them, or loads backends as it needs them.
    """

    def __init__(self, binding: ModuleType) -> None:
        self.functions: Any = _open(Path(str(binding.__file__)).parent / "lib")
        self._log = _LogCallback(lambda *_: None)  # a line a matrix on stderr, else; must outlive its use
        self.functions.ggml_log_set(self._log, None)

    def buffer_types(self, backend: int) -> dict[str, int]:
        """Handles of the buffer types that llama.cpp might give weights, by name; its default first.

        Its AMX type is left out: builds die of an illegal instruction in it on some machines (`llama_probe`).
        """
        default = self.functions.ggml_backend_get_default_buffer_type(backend)
        found = [default, *self._extra_buffer_types()]
        named = {self.functions.ggml_backend_buft_name(handle).decode(): handle for handle in found}
        return {name: handle for name, handle in named.items() if handle == default or name == REPACKED}

    @property
    def device(self) -> int:
        """Handle of the CPU as a device of ggml."""
        handle: int = self.functions.ggml_backend_reg_dev_get(self.functions.ggml_backend_cpu_reg(), 0)
        return handle

    def _extra_buffer_types(self) -> Iterator[int]:
        """Handles of the CPU's buffer types beside its default."""
        registry = self.functions.ggml_backend_cpu_reg()
        name = b"ggml_backend_dev_get_extra_bufts"
        address = self.functions.ggml_backend_reg_get_proc_address(registry, name)
        if not address:
            return
        handles = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(self.device)
        number = 0
        while handles and (handle := handles[number]):
            yield handle
            number += 1


def _open(directory: Path) -> ctypes.CDLL:
    paths = [directory / f"libllama{suffix}" for suffix in (".so", ".dylib")]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise MzdError("not_found", f"llama.cpp's binding has no libllama in {directory}")
    library = ctypes.CDLL(str(path))
    for name, (restype, argtypes) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise MzdError("not_found", f"{path} has no {name}: another build or version than is known here")
        function.restype, function.argtypes = restype, argtypes
    return library
