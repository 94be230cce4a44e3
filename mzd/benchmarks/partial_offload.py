"""Owns the paper's baseline: whole layers go to storage, and come back one step after the other.

On a request: allocate all that is missing, then read all of it, then prefill, with the daemon's kernels,
arena and direct reads. Reads use as many threads as the daemon's, and check nothing: where the paper leaves a
choice, the baseline gets the faster one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import trio
from numpy.typing import NDArray

from mzd import native
from mzd.benchmarks.daemon_harness import KV_SEED, BenchDaemon
from mzd.benchmarks.kv_pattern import draw_chunks, lay_out
from mzd.benchmarks.resident_model import read_units
from mzd.benchmarks.workloads import QUESTION_TOKENS
from mzd.daemon.assembly import activations_of
from mzd.device.engine import Engine
from mzd.errors import MzdError
from mzd.memory.arena import Arena
from mzd.memory.backend import Lease
from mzd.memory.huge_pages import has_huge_pages
from mzd.memory.workers import Workers
from mzd.policy.units import CHUNK_TOKENS

READ_PIECE_BYTES = 4 * 1024 * 1024
"""Reads are cut so that every thread has some to do; a single layer of a small model is less than this."""


@dataclass(frozen=True, slots=True)
class OffloadTimes:
    """One request of the baseline."""

    allocate_s: float
    reload_s: float
    prefill_s: float
    logits: NDArray[np.float32]

    @property
    def ttft_s(self) -> float:
        """All three, one after the other."""
        return self.allocate_s + self.reload_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class _Read:
    """A piece of a file and where it goes."""

    fd: int
    offset_bytes: int
    address: int
    size_bytes: int


class PartialOffload:
    """The baseline over the same weights, context and question as a daemon's; `close` frees everything.

    Args:
        daemon: filled; it may evict meanwhile, nothing is shared but the device and the weight store.
        directory: where the file for KV goes.
    """

    def __init__(self, daemon: BenchDaemon, directory: Path) -> None:
        device, config = daemon.opened.device, daemon.config
        self._store = daemon.parts.store
        self._tokens = daemon.num_tokens
        self._question = daemon.question
        self._chunk_bytes = daemon.parts.units.kv_sizes.chunk_bytes
        self._num_chunks = -(-self._tokens // CHUNK_TOKENS)
        self._arena = Arena(device.reserve_svm, device.reservation_bytes_max, huge_pages=has_huge_pages())
        self._engine = Engine(
            device,
            self._store.index,
            context_tokens_max=daemon.opened.context_length,
            ubatch_tokens_max=QUESTION_TOKENS,
            activations=activations_of(config, device),
        )
        self._workers = Workers("offload", config.threads.read, frozenset(config.threads.cores))
        self._fd = _open_direct(directory / "kv")
        self._head: Lease | None = None
        self._layers: list[list[Lease]] = [[] for _ in self._store.index.layers]
        self._tails = self._make_tails()
        self._make_resident(draw_chunks(daemon.parts.codec, self._chunk_bytes, seed=KV_SEED))

    def _make_tails(self) -> list[list[Lease]]:
        """A chunk a layer for the question, where it does not fit into the context's last one."""
        num_chunks = -(-(self._tokens + QUESTION_TOKENS) // CHUNK_TOKENS) - self._num_chunks
        tails = [self._arena.reserve_run([self._chunk_bytes] * num_chunks) for _ in self._layers]
        self._arena.populate([lease for leases in tails for lease in leases])
        return tails

    def _make_resident(self, chunks: NDArray[np.uint8]) -> None:
        """Read the weights, lay out the same KV as the daemon's, and write it to the file once."""
        missing = self._allocate()
        index = self._store.index
        heads = [missing[layer][0] for layer in range(len(missing))]
        assert self._head is not None
        read_units(self._arena, self._store, (*index.layers, index.head), [*heads, self._head])
        lay_out(chunks, [lease.address for leases in self._layers for lease in leases[1:]])
        for layer, leases in enumerate(self._layers):
            self._write_kv(layer, leases[1:])

    def _write_kv(self, layer: int, leases: Sequence[Lease]) -> None:
        offsets = self._kv_offsets(layer)
        addresses = np.array([lease.address for lease in leases], np.uint64)
        codes = native.write_extents(self._fd, offsets, addresses, np.full_like(offsets, self._chunk_bytes))
        if any(codes):
            raise MzdError("swap_full", "the baseline's KV file cannot be written", errno=-max(codes))

    def _kv_offsets(self, layer: int) -> NDArray[np.uint64]:
        first = layer * self._num_chunks
        return self._chunk_bytes * np.arange(first, first + self._num_chunks, dtype=np.uint64)

    def evict_to(self, remaining: float) -> float:
        """Let whole layers go, rearmost first, and the head unit; return the share of weights and KV left."""
        sizes = [extent.size_bytes for extent in self._store.index.layers]
        layer_bytes = [size + self._num_chunks * self._chunk_bytes for size in sizes]
        left_bytes = total_bytes = sum(layer_bytes)
        gone: list[Lease] = [] if self._head is None else [self._head]
        self._head = None
        for layer in reversed(range(len(sizes))):
            if left_bytes <= remaining * total_bytes:
                break
            gone += self._layers[layer]
            self._layers[layer] = []
            left_bytes -= layer_bytes[layer]
        self._engine.unbind_all()
        self._arena.release(gone)
        return left_bytes / total_bytes

    async def ask(self) -> OffloadTimes:
        """Ask the question over the whole context; afterwards everything is resident again."""
        start_s = time.perf_counter()
        missing = await self._workers.run(self._allocate)
        allocated_s = time.perf_counter()
        await self._read(missing)
        read_s = time.perf_counter()
        logits = await self._prefill()
        end_s = time.perf_counter()
        return OffloadTimes(allocated_s - start_s, read_s - allocated_s, end_s - read_s, logits)

    def _allocate(self) -> dict[int, list[Lease]]:
        """Reserve and populate what is missing, in forward order; the new leases by layer."""
        missing = [layer for layer, leases in enumerate(self._layers) if not leases]
        for layer in missing:
            weights_bytes = self._store.index.layers[layer].size_bytes
            sizes = [weights_bytes] + [self._chunk_bytes] * self._num_chunks
            self._layers[layer] = self._arena.reserve_run(sizes)
        gone = [lease for layer in missing for lease in self._layers[layer]]
        if self._head is None:
            (self._head,) = self._arena.reserve_run([self._store.index.head.size_bytes])
            gone.append(self._head)
        self._arena.populate(gone)
        return {layer: self._layers[layer] for layer in missing}

    async def _read(self, missing: dict[int, list[Lease]]) -> None:
        reads = [read for layer, leases in missing.items() for read in self._layer_reads(layer, leases)]
        assert self._head is not None
        reads += _pieces(self._store.fd, self._store.index.head.offset_bytes, self._head)
        shares = [reads[i :: self._workers.threads] for i in range(self._workers.threads)]
        async with trio.open_nursery() as nursery:
            for share in shares:
                nursery.start_soon(partial(self._workers.run, _read_all, share))

    def _layer_reads(self, layer: int, leases: Sequence[Lease]) -> list[_Read]:
        weights, *chunks = leases
        reads = _pieces(self._store.fd, self._store.index.layers[layer].offset_bytes, weights)
        for offset_bytes, chunk in zip(self._kv_offsets(layer).tolist(), chunks, strict=True):
            reads.append(_Read(self._fd, offset_bytes, chunk.address, self._chunk_bytes))
        return reads

    async def _prefill(self) -> NDArray[np.float32]:
        assert self._head is not None
        for layer, (weights, *chunks) in enumerate(self._layers):
            addresses = [chunk.address for chunk in (*chunks, *self._tails[layer])]
            self._engine.bind_layer(layer, weights.address, np.array(addresses, np.uint64))
        self._engine.bind_head(self._head.address)
        self._engine.begin(self._question, self._tokens)
        for layer in range(self._engine.num_layers):
            self._engine.enqueue_layer(layer)
        self._engine.enqueue_head("last")
        await self._engine.wait(self._engine.mark())
        row: NDArray[np.float32] = self._engine.logits()[0].copy()
        return row

    def close(self) -> None:
        """Free memory and file."""
        self._engine.close()
        heads = [] if self._head is None else [self._head]
        self._arena.release([lease for leases in (*self._layers, *self._tails, heads) for lease in leases])
        self._arena.close()
        os.close(self._fd)


def _pieces(fd: int, offset_bytes: int, lease: Lease) -> list[_Read]:
    """One unit's read, cut."""
    starts = range(0, lease.size_bytes, READ_PIECE_BYTES)
    return [
        _Read(fd, offset_bytes + at, lease.address + at, min(READ_PIECE_BYTES, lease.size_bytes - at))
        for at in starts
    ]


def _read_all(reads: Sequence[_Read]) -> None:
    """Read one thread's share.

    Raises:
        MzdError: `weights_unavailable`; a read failed or fell short.
    """
    for fd in {read.fd for read in reads}:
        of_file = [read for read in reads if read.fd == fd]
        codes = native.read_extents(
            fd,
            np.array([read.offset_bytes for read in of_file], np.uint64),
            np.array([read.address for read in of_file], np.uint64),
            np.array([read.size_bytes for read in of_file], np.uint64),
        )
        if any(codes):
            raise MzdError("weights_unavailable", f"the baseline's reads failed: {set(codes)}")


def _open_direct(path: Path) -> int:
    """A new file past the page cache, where the file system has that."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)
