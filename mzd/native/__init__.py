"""Owns the one decision between the C extension and its NumPy stand-in; everyone imports `mzd.native`.

Both sides have the same functions, take the same arguments and give the same bits. Addresses are plain
integers, batches are contiguous one-dimensional arrays of unsigned integers (`array.array("Q")`, NumPy):

========================================  ==========================================================
`int8_encode_batch`, `int8_decode_batch`  FP16 chunk <-> payload; format in `mzd/native/int8_numpy.py`
`int8_encode_release_batch`               encode, and give each source back before the next chunk
`read_extents`, `write_extents`           whole extents or a named failure: 0, -errno, `EXTENT_SHORT`
`crc32c`, `crc32c_buffer`                 CRC-32C, continued from a seed
`populate`, `release`, `lock`, `unlock`   whole pages: 0 or -errno
`resident_bytes`                          what of a range is in memory
`fill`, `copy`                            bytes
`trim_heap`, `set_mmap_threshold`         the C library's heap; False where it has no such call
`enqueue_launches`                        OpenCL kernels, their arguments set, in one call
========================================  ==========================================================
"""

from __future__ import annotations

__all__ = [
    "BACKEND",
    "EXTENT_SHORT",
    "FALLBACK_REASON",
    "INT8_GROUP",
    "INT8_NOT_FINITE",
    "INT8_NOT_RELEASED",
    "INT8_OK",
    "PAGE_BYTES",
    "copy",
    "crc32c",
    "crc32c_buffer",
    "crc32c_variants",
    "enqueue_launches",
    "fill",
    "int8_decode_batch",
    "int8_encode_batch",
    "int8_encode_release_batch",
    "int8_payload_bytes",
    "int8_variants",
    "lock",
    "populate",
    "read_extents",
    "release",
    "resident_bytes",
    "set_mmap_threshold",
    "trim_heap",
    "unlock",
    "write_extents",
]

BACKEND: str
"""``c`` or ``numpy``."""

FALLBACK_REASON: str | None
"""Why the extension could not be loaded, for `mzd doctor`; None if it was."""

try:
    from mzd._native import (
        EXTENT_SHORT,
        INT8_GROUP,
        INT8_NOT_FINITE,
        INT8_NOT_RELEASED,
        INT8_OK,
        PAGE_BYTES,
        copy,
        crc32c,
        crc32c_buffer,
        crc32c_variants,
        enqueue_launches,
        fill,
        int8_decode_batch,
        int8_encode_batch,
        int8_encode_release_batch,
        int8_payload_bytes,
        int8_variants,
        lock,
        populate,
        read_extents,
        release,
        resident_bytes,
        set_mmap_threshold,
        trim_heap,
        unlock,
        write_extents,
    )

    BACKEND, FALLBACK_REASON = "c", None
except ImportError as missing:
    from mzd.native.crc32c_numpy import crc32c, crc32c_buffer, crc32c_variants
    from mzd.native.extents_python import EXTENT_SHORT, read_extents, write_extents
    from mzd.native.int8_numpy import (
        INT8_GROUP,
        INT8_NOT_FINITE,
        INT8_NOT_RELEASED,
        INT8_OK,
        int8_decode_batch,
        int8_encode_batch,
        int8_encode_release_batch,
        int8_payload_bytes,
        int8_variants,
    )
    from mzd.native.launches_ctypes import enqueue_launches
    from mzd.native.pages_ctypes import (
        PAGE_BYTES,
        copy,
        fill,
        lock,
        populate,
        release,
        resident_bytes,
        set_mmap_threshold,
        trim_heap,
        unlock,
    )

    BACKEND, FALLBACK_REASON = "numpy", str(missing)
