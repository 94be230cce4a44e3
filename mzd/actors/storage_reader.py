"""Owns the reads of a restore: extents of the weight store and slots of the swap files."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import trio

from mzd import native
from mzd.errors import MzdError
from mzd.formats.crc32c import concatenated
from mzd.memory.backend import Addresses, MemoryBackend
from mzd.memory.workers import Workers
from mzd.messages.restore_path import DecodeChunks, ReadUnits, RestoreFact, UnitsFailed, UnitsRestored
from mzd.policy.units import KvUnit, UnitId

PIECE_BYTES = 4 * 1024 * 1024
"""Units above this are read by several threads; direct reads of it run at full speed (`read_extents`)."""


@dataclass(slots=True)
class StorageReader:
    """Restore path, step 2. Several of these share one input, so that reads are in flight side by side.

    Cancelled: the read in flight ends first (a thread that writes memory is never abandoned), a
    staging buffer in hand is given back, both outputs are closed.
    """

    memory: MemoryBackend
    workers: Workers
    reads: trio.MemoryReceiveChannel[ReadUnits]
    decodes: trio.MemorySendChannel[DecodeChunks]
    facts: trio.MemorySendChannel[RestoreFact]

    async def run(self) -> None:
        """Serve reads until the allocator closes its end."""
        async with self.reads, self.decodes, self.facts:
            async for read in self.reads:
                await self._serve(read)

    async def _serve(self, read: ReadUnits) -> None:
        try:
            start_ns = time.monotonic_ns()
            errors = await self._read(read)
            end_ns = time.monotonic_ns()
            await self._report(read, errors, start_ns, end_ns)
        except BaseException:
            if read.staging is not None:
                read.staging.release()
            raise

    async def _read(self, read: ReadUnits) -> list[MzdError | None]:
        if len(read.units) == 1 and int(read.sizes[0]) > PIECE_BYTES:
            return [await self._read_in_pieces(read)]
        return await self.workers.run(_read_and_check, self.memory, read)

    async def _read_in_pieces(self, read: ReadUnits) -> MzdError | None:
        """One large unit on all threads: the last unit of a restore would else wait for a single one."""
        total = int(read.sizes[0])
        starts = range(0, total, PIECE_BYTES)
        results: list[tuple[int, int]] = [(0, 0)] * len(starts)

        async def read_piece(index: int, start: int) -> None:
            size = min(PIECE_BYTES, total - start)
            results[index] = await self.workers.run(_read_piece, self.memory, read, start, size)

        async with trio.open_nursery() as nursery:
            for index, start in enumerate(starts):
                nursery.start_soon(read_piece, index, start)
        code = next((code for code, _ in results if code), 0)
        crc = results[0][1]
        for (_, piece_crc), start in zip(results[1:], starts[1:], strict=True):
            crc = concatenated(crc, piece_crc, min(PIECE_BYTES, total - start))
        return _judge(read.units[0], code, crc, int(read.crcs[0]))

    async def _report(
        self, read: ReadUnits, errors: list[MzdError | None], start_ns: int, end_ns: int
    ) -> None:
        good = [i for i, error in enumerate(errors) if error is None]
        failed = next((error for error in errors if error is not None), None)
        if failed is not None:
            bad_units = tuple(
                unit for unit, error in zip(read.units, errors, strict=True) if error is not None
            )
            restored = () if read.decode_addresses is not None else tuple(read.units[i] for i in good)
            await self.facts.send(UnitsFailed(read.restore_id, read.layer, bad_units, restored, failed))
        if read.decode_addresses is not None:
            await self._pass_on(read, good)
        elif failed is None:
            size_bytes = int(read.sizes.sum())
            await self.facts.send(
                UnitsRestored(read.restore_id, "read", read.layer, read.units, size_bytes, start_ns, end_ns)
            )

    async def _pass_on(self, read: ReadUnits, good: list[int]) -> None:
        """Hand the payloads, and the staging buffer with them, to the decompressor."""
        assert read.decode_addresses is not None
        assert read.layer is not None
        assert read.staging is not None
        if not good:
            read.staging.release()
            return
        units = tuple(read.units[i] for i in good)
        await self.decodes.send(
            DecodeChunks(
                read.restore_id,
                read.layer,
                units,
                read.addresses[good],
                read.decode_addresses[good],
                read.staging,
            )
        )


def _read_piece(memory: MemoryBackend, read: ReadUnits, start: int, size_bytes: int) -> tuple[int, int]:
    """Read a piece of the only extent: (result code, CRC-32C of the piece). Runs in a thread."""
    crc = np.zeros(1, np.uint32)
    offsets = np.array([int(read.offsets[0]) + start], np.uint64)
    sizes = np.array([size_bytes], np.uint64)
    with memory.writing(np.array([int(read.addresses[0]) + start], np.uint64), sizes) as host:
        (code,) = native.read_extents(read.fd, offsets, host, sizes, crc)
    return code, int(crc[0])


def _read_and_check(memory: MemoryBackend, read: ReadUnits) -> list[MzdError | None]:
    """Read all extents and check each one's checksum; runs in a thread, without the GIL."""
    with memory.writing(read.addresses, read.sizes) as host:
        return _read_into(read, host)


def _read_into(read: ReadUnits, host: Addresses) -> list[MzdError | None]:
    results = np.asarray(native.read_extents(read.fd, read.offsets, host, read.sizes))
    errors: list[MzdError | None] = []
    for i, unit in enumerate(read.units):
        code = int(results[i])
        crc = native.crc32c(int(host[i]), int(read.crc_sizes[i]), int(read.crc_seeds[i])) if code == 0 else 0
        errors.append(_judge(unit, code, crc, int(read.crcs[i])))
    return errors


def _judge(unit: UnitId, code: int, crc: int, expected_crc: int) -> MzdError | None:
    if code == 0 and crc == expected_crc:
        return None
    what = f"read failed with {code}" if code else f"checksum is {crc:08x}, not {expected_crc:08x}"
    if not isinstance(unit, KvUnit):
        return MzdError(
            "weights_unavailable", f"{unit} of the weight store is damaged ({what}); import the model anew"
        )
    return MzdError("corrupt_chunk", f"{unit} cannot be restored: {what}")
