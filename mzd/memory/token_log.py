"""Owns the token log of one context: what is left of it when everything else is gone."""

from __future__ import annotations

import errno
from array import array

import numpy as np
from numpy.typing import NDArray

from mzd.formats import token_record
from mzd.memory.context_directory import TOKEN_LOG, ContextDirectory, OpenFile, storage_error, write_all

_WASTE_BYTES_MAX = 256 * 1024
"""What forgotten tokens and record heads may cost before the log is written anew."""


class TokenLog:
    """The ids of a context's tokens, in a file that survives SIGKILL at any moment.

    A record is in the page cache when `append` returns: it outlives the process. It is not synced: a
    power cut may lose the last seconds, and the checksums show where. One owner; not for several threads.
    """

    def __init__(
        self, contexts: ContextDirectory, context: str, file: OpenFile, content: token_record.TokenLogContent
    ) -> None:
        self._contexts = contexts
        self._context = context
        self._file = file
        self._tokens = array("I", content.tokens.tobytes())
        self._model_id = content.model_id
        self._end_bytes = content.valid_bytes
        self._crc = content.crc

    @classmethod
    def create(cls, contexts: ContextDirectory, context: str, *, model_id: str) -> TokenLog:
        """Begin an empty log; one that is there already is replaced.

        Raises:
            MzdError: `swap_full`; there is no space. `invalid_params`; no name for a context.
        """
        header = token_record.encode_header(context=context, model_id=model_id)
        file = contexts.replace_file(context, TOKEN_LOG, header)
        return cls(contexts, context, file, token_record.decode_log(header, context=context))

    @classmethod
    def open(cls, contexts: ContextDirectory, context: str) -> TokenLog:
        """Open a log. A torn tail is overwritten by the next record, and outlawed by its CRC.

        Raises:
            FileNotFoundError: the context has no log.
            FormatError: `corrupt_chunk`; the header is damaged: the context is lost.
        """
        content = token_record.decode_log(contexts.read_file(context, TOKEN_LOG), context=context)
        return cls(contexts, context, contexts.open_file(context, TOKEN_LOG, create=False), content)

    @property
    def model_id(self) -> str:
        """The model whose tokens these are."""
        return self._model_id

    @property
    def num_tokens(self) -> int:
        """Tokens in the log."""
        return len(self._tokens)

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self._end_bytes

    def tokens(self) -> NDArray[np.uint32]:
        """(num_tokens,) uint32, a copy."""
        return np.array(self._tokens, dtype=np.uint32)

    def append(self, tokens: NDArray[np.uint32]) -> None:
        """Add tokens at the end.

        Raises:
            MzdError: `swap_full` or `internal`; nothing is added. The caller may go on without, and add
                all that is missing (from `num_tokens` on) the next time.
        """
        if len(tokens):
            self._write(self.num_tokens, tokens)

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens from `num_tokens` on.

        Raises:
            MzdError: `swap_full` or `internal`; nothing is forgotten.
            ValueError: there are fewer.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot cut {self.num_tokens} tokens to {num_tokens}")
        if num_tokens < self.num_tokens:
            self._write(num_tokens, np.empty(0, np.uint32))
            self._compact_if_wasteful()

    def _write(self, position: int, tokens: NDArray[np.uint32]) -> None:
        record, crc = token_record.encode_record(position, tokens, previous_crc=self._crc)
        try:
            write_all(self._file.fd, record, self._end_bytes)
        except OSError as error:
            raise storage_error(f"the token log of {self._context}", error.errno or errno.EIO) from error
        self._end_bytes += len(record)
        self._crc = crc
        del self._tokens[position:]
        self._tokens.frombytes(np.ascontiguousarray(tokens, dtype=np.uint32).tobytes())

    def _compact_if_wasteful(self) -> None:
        live_bytes = self.num_tokens * token_record.TOKEN_BYTES
        if self._end_bytes - live_bytes > live_bytes + _WASTE_BYTES_MAX:
            self.compact()

    def compact(self) -> None:
        """Write the log anew as one record, by rename.

        Raises:
            MzdError: `swap_full` or `internal`; the log is as it was.
        """
        header = token_record.encode_header(context=self._context, model_id=self._model_id)
        record, crc = token_record.encode_record(
            0, self.tokens(), previous_crc=token_record.header_crc(header)
        )
        self._file = self._contexts.replace_file(self._context, TOKEN_LOG, header + record)
        self._end_bytes = len(header) + len(record)
        self._crc = crc
