"""A writer is killed in the middle: what it had reported as stored is there, whole."""

import ctypes
import mmap
import subprocess
import sys

import numpy as np
import pytest

from mzd import native
from mzd.memory.context_directory import ContextDirectory
from mzd.memory.storage_swap import StorageSwap
from mzd.memory.token_log import TokenLog
from mzd.policy.units import KvUnit

MODEL = "77" * 32
SLOT = 16 * 4096
NUM_CHUNKS = 8

WRITER = """
import ctypes, mmap, sys
from pathlib import Path
import numpy as np
from mzd import native
from mzd.memory.context_directory import ContextDirectory
from mzd.memory.storage_swap import StorageSwap
from mzd.memory.swap_file import NewChunk
from mzd.memory.token_log import TokenLog
from mzd.policy.units import KvUnit

MODEL, SLOT, NUM_CHUNKS = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
contexts = ContextDirectory(Path(sys.argv[1]))
swap = StorageSwap(contexts, model_id=MODEL, quota_bytes=1 << 30)
log = TokenLog.create(contexts, "chat", model_id=MODEL)
memory = mmap.mmap(-1, SLOT)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for step in range(10**9):
    native.fill(address, SLOT, step % 251)
    unit, tag = KvUnit("chat", 0, step % NUM_CHUNKS), step.to_bytes(16, "little")
    new = NewChunk(unit, 256, tag, "none", 1, SLOT, SLOT)
    (write,) = swap.allocate([new])
    places = (np.array([value], np.uint64) for value in (write.offset_bytes, address, write.size_bytes))
    assert native.write_extents(write.fd, *places) == [0]
    swap.commit([(write, write.checksum(address))])
    log.append(np.array([step], np.uint32))
    print(step, flush=True)
"""


@pytest.mark.parametrize("steps", [1, 7, 60])
def test_reported_chunks_and_tokens_survive(tmp_path, steps):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "contexts"), MODEL, str(SLOT), str(NUM_CHUNKS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        reported = [int(writer.stdout.readline()) for _ in range(steps)][-1]
        writer.kill()
        reported = max([reported, *map(int, writer.stdout.read().split()[:-1])])
    contexts = ContextDirectory(tmp_path / "contexts")
    tokens = TokenLog.open(contexts, "chat").tokens().tolist()
    assert tokens == list(range(len(tokens)))
    assert len(tokens) > reported
    check_chunks(StorageSwap(contexts, model_id=MODEL, quota_bytes=1 << 30), reported)
    contexts.close()


def check_chunks(swap, reported):
    """Every chunk holds its last reported content, or the one that was being stored when the kill came."""
    assert swap.problems == {}
    memory = mmap.mmap(-1, SLOT)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for chunk in range(min(NUM_CHUNKS, reported + 1)):
        stored = swap.locate(KvUnit("chat", 0, chunk))
        places = (np.array([value], np.uint64) for value in (stored.offset_bytes, address, stored.size_bytes))
        assert native.read_extents(stored.fd, *places) == [0]
        assert stored.is_intact(address)
        step = int.from_bytes(stored.record.tokens_hash, "little")
        last_reported = reported - (reported - chunk) % NUM_CHUNKS
        assert step >= last_reported
        assert memory[:] == bytes([step % 251]) * SLOT
