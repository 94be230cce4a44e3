"""Types of the C extension. Addresses are plain integers; batches are contiguous arrays of unsigned integers.

Every function that works on memory drops the GIL while it does. Memory behind an address must be mapped and
must stay so until the call returns: nothing here can check that.
"""

from typing import Any, Final, TypeAlias

from numpy.typing import NDArray
from typing_extensions import Buffer

_Array: TypeAlias = Buffer | NDArray[Any]  # NumPy types its arrays as buffers from Python 3.12 on

INT8_GROUP: Final[int]
INT8_OK: Final[int]
INT8_NOT_FINITE: Final[int]
INT8_NOT_RELEASED: Final[int]
EXTENT_SHORT: Final[int]
PAGE_BYTES: Final[int]

# int8 codec; src and dst are arrays of uint64, status is a writable array of uint8
def int8_variants() -> list[str]: ...
def int8_payload_bytes(num_elements: int, /) -> int: ...
def int8_encode_batch(
    src: _Array, dst: _Array, num_elements: int, status: _Array, variant: str = "auto"
) -> None: ...
def int8_encode_release_batch(
    src: _Array, dst: _Array, num_elements: int, release_bytes: int, status: _Array, variant: str = "auto"
) -> None: ...
def int8_decode_batch(src: _Array, dst: _Array, num_elements: int, variant: str = "auto") -> None: ...

# checksums
def crc32c_variants() -> list[str]: ...
def crc32c(address: int, size: int, seed: int = 0, variant: str = "auto") -> int: ...
def crc32c_buffer(data: _Array, seed: int = 0, variant: str = "auto") -> int: ...

# extents; arrays of uint64, except crc_out (writable) and seeds: uint32
def read_extents(
    fd: int,
    offsets: _Array,
    addresses: _Array,
    sizes: _Array,
    crc_out: _Array | None = None,
    seeds: _Array | None = None,
) -> list[int]: ...
def write_extents(
    fd: int,
    offsets: _Array,
    addresses: _Array,
    sizes: _Array,
    crc_out: _Array | None = None,
    seeds: _Array | None = None,
) -> list[int]: ...
def _set_io_fault(every_nth: int, kind: str, /) -> None: ...

# pages; address and size are multiples of PAGE_BYTES
def populate(address: int, size: int, huge: bool) -> int: ...
def release(address: int, size: int, /) -> int: ...
def lock(address: int, size: int, /) -> int: ...
def unlock(address: int, size: int, /) -> int: ...
def resident_bytes(address: int, size: int, /) -> int: ...

# bytes and the heap
def fill(address: int, size: int, byte: int, /) -> None: ...
def copy(dst: int, src: int, size: int, /) -> None: ...
def trim_heap() -> bool: ...
def set_mmap_threshold(threshold_bytes: int, /) -> bool: ...

# OpenCL; function is the address of clEnqueueNDRangeKernel, launches an array of uint64, eight for each:
# kernel, dimensions, global size (3), local size (3; the first 0: the driver chooses)
def enqueue_launches(function: int, queue: int, launches: _Array, /) -> tuple[int, int]: ...
