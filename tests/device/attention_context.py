"""Owns attention over a random context, on the device and in float64."""

from dataclasses import replace

import numpy as np

from mzd.device.attention import Attention, AttentionTarget, plan_attention
from tests.reference.model import attend


class Context:
    """Random queries over a random context, its chunks in any order in one piece of shared memory.

    What lies past the context's end is not zero: a context that was cut back leaves old keys there.
    """

    def __init__(
        self, device, shape, num_tokens, context_tokens, *, scale=1.0, compute_units=2, **target_fields
    ):
        self.device, self.shape = device, shape
        self.target = replace(AttentionTarget.of(device), compute_units=compute_units, **target_fields)
        self.plan = plan_attention(shape, self.target, num_tokens=num_tokens, context_tokens=context_tokens)
        rng = np.random.default_rng(num_tokens * 10007 + context_tokens)
        num_chunks = -(-context_tokens // 256)
        heads, dim = shape.num_kv_heads, shape.head_dim
        self.k = (scale * rng.standard_normal((heads, num_chunks * 256, dim))).astype(np.float16)
        self.v = rng.standard_normal((heads, num_chunks * 256, dim)).astype(np.float16)
        self.q = (scale * rng.standard_normal((num_tokens, shape.num_heads, dim))).astype(np.float32)
        self.context_tokens = context_tokens
        self.chunk_bytes = 256 * heads * dim * 4
        self.chunks = device.allocate_scratch(num_chunks * self.chunk_bytes)
        self.table = rng.permutation(num_chunks)
        self._store_chunks()

    def _store_chunks(self):
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        for chunk, place in enumerate(self.table):
            tokens = slice(256 * chunk, 256 * chunk + 256)
            k = self.k[:, tokens].reshape(heads, 8, 32, dim).transpose(0, 1, 3, 2)
            v = self.v[:, tokens].transpose(0, 2, 1)
            view = self.chunks.view(np.float16, (2, k.size), offset_bytes=int(place) * self.chunk_bytes)
            view[0], view[1] = k.reshape(-1), v.reshape(-1)

    def run(self):
        """Enqueue, finish, and return (tokens, heads, head_dim) float32."""
        sizes = [20, 8 * len(self.table), self.q.nbytes, self.q.nbytes, self._partials_bytes()]
        buffers = [self.device.allocate_scratch(max(size, 4)) for size in sizes]
        step, table, q, out, _ = buffers
        step.view(np.int32, (5,))[:] = self.plan.step()
        chunk_addresses = (self.chunks.address + self.chunk_bytes * self.table).astype(np.uint64)
        table.view(np.uint64, self.table.shape)[:] = chunk_addresses
        q.view(np.float32, self.q.shape)[:] = self.q
        names = ("step", "chunk_table", "q", "out", "partials")
        addresses = {f"{name}_address": buffer.address for name, buffer in zip(names, buffers, strict=True)}
        attention = Attention(self.device, self.shape, **addresses, target=self.target)
        attention.bind_chunks(chunk_addresses)
        attention.enqueue(self.plan)
        self.device.finish()
        result = out.view(np.float32, self.q.shape).copy()
        for buffer in (*buffers, self.chunks):
            buffer.free()
        return result

    def _partials_bytes(self):
        rows = self.plan.num_splits * self.plan.num_tokens
        return rows * self.shape.num_heads * (2 + self.shape.head_dim) * 4

    def expected(self):
        """(tokens, heads, head_dim) float64."""
        q = self.q.astype(np.float64).transpose(1, 0, 2)
        k, v = (x[:, : self.context_tokens].astype(np.float64) for x in (self.k, self.v))
        shape = self.shape
        attended = attend(q, k, v, scale=shape.scale, softcap=shape.softcap, window=shape.window)
        return attended.transpose(1, 0, 2)


def largest_error(context):
    return np.abs(context.run() - context.expected()).max()
