"""Owns the peer: llama.cpp through its Python binding, on the same file and the same number of threads."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mzd.errors import MzdError

BATCH_TOKENS: Final = 512
"""llama.cpp's own default for one pass (`n_ubatch`), and the engine's."""


def import_binding() -> ModuleType | None:
    """The module `llama_cpp`, or None where it is not installed or its library does not load."""
    try:
        import llama_cpp
    except (
        ImportError,
        OSError,
        RuntimeError,
    ):  # the binding wraps a library that is missing in the last two
        return None
    binding: ModuleType = llama_cpp
    return binding


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """What deviates from llama.cpp's defaults.

    Attributes:
        extra_buffers: its repacked and AMX kernels; on by default.
    """

    extra_buffers: bool = True


DEFAULT_OPTIONS: Final = PeerOptions()


class LlamaPeer:
    """A model and one context, driven through the binding's plain C calls: a wrapper costs it nothing.

    Everything that is not named here has llama.cpp's default.

    Args:
        threads: for short and long batches alike.

    Raises:
        MzdError: `invalid_model`; the library cannot load the file or make a context.
    """

    name: Final = "llama.cpp"

    def __init__(
        self,
        binding: ModuleType,
        path: Path,
        *,
        context_tokens: int,
        threads: int,
        options: PeerOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._api: Any = binding
        self._silence()
        binding.llama_backend_init()
        self._model = self._load(path, options)
        self._context = self._make_context(context_tokens, threads)
        vocab = binding.llama_model_get_vocab(self._model)
        self._vocab_size: int = binding.llama_vocab_n_tokens(vocab)

    def _silence(self) -> None:
        """Its log goes to stderr, hundreds of lines; the callback must outlive the library's use of it."""
        self._log: Any = self._api.llama_log_callback(lambda *_: None)
        self._api.llama_log_set(self._log, ctypes.c_void_p(0))

    def _load(self, path: Path, options: PeerOptions) -> Any:
        params = self._api.llama_model_default_params()
        params.use_extra_bufts = options.extra_buffers
        model = self._api.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise MzdError("invalid_model", f"llama.cpp cannot load {path}", path=str(path))
        return model

    def _make_context(self, context_tokens: int, threads: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = context_tokens
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            self._api.llama_model_free(self._model)
            raise MzdError("invalid_model", f"llama.cpp makes no context of {context_tokens} tokens")
        return context

    async def fill(self, tokens: NDArray[np.int32], start: int = 0) -> None:
        """Make `tokens` the context, whose first `start` tokens are there."""
        self._forget_from(start)
        self._decode(tokens[start:])

    async def answer(self, tokens: NDArray[np.int32], position: int) -> int:
        """Compute `tokens` at `position`, forget what lay behind, and return the greedy next id."""
        self._forget_from(position)
        self._decode(tokens)
        return int(self.logits().argmax())

    def logits(self) -> NDArray[np.float32]:
        """(vocab,) float32 of the last answer: a view, valid until the next one."""
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, shape=(self._vocab_size,))

    def _forget_from(self, position: int) -> None:
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_seq_rm(memory, 0, position, -1)

    def _decode(self, tokens: NDArray[np.int32]) -> None:
        for start in range(0, len(tokens), BATCH_TOKENS):
            part = np.ascontiguousarray(tokens[start : start + BATCH_TOKENS])
            pointer = part.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            batch = self._api.llama_batch_get_one(pointer, len(part))
            code = self._api.llama_decode(self._context, batch)
            if code:
                raise MzdError("internal", f"llama_decode failed with {code}", status=code)

    def close(self) -> None:
        """Free context and model."""
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)
