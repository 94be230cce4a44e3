"""Owns arrays that the host and a kernel both see."""

OFFSET_BYTES = 192
"""Where arrays begin in their allocations: as tensors do in units, at a multiple of 64."""


class SharedArray:
    """An array in the device's memory, freed at the end of the test.

    Attributes:
        address: for kernels.
        values: the host's view.
    """

    def __init__(self, device, request, values):
        buffer = device.allocate_scratch(OFFSET_BYTES + max(values.nbytes, 4))
        request.addfinalizer(buffer.free)
        self.address = buffer.address + OFFSET_BYTES
        self.values = buffer.view(values.dtype, values.shape, offset_bytes=OFFSET_BYTES)
        self.values[:] = values
