"""Owns one step of rope_kv over random q, k and v, and what it has to leave."""

import numpy as np

from mzd.device.attention import AttentionShape
from mzd.device.rope import QkvVectors, RopeAngles, RopeKv
from mzd.formats.ggml_types import GgmlType
from mzd.formats.layer_config import RopeConfig
from mzd.formats.weight_store import TensorSpec
from tests.reference.model import rms_norm, rotate


class RopeCase:
    """rope_kv over random q, k, v, into chunks that hold a mark where nothing may be written."""

    MARK = np.float16(77.0)
    HEADS, KV_HEADS, DIM = 6, 2, 40

    def __init__(
        self, device, shared, style, dims, position, num_tokens, *, biases=False, norms=False, target=None
    ):
        rng = np.random.default_rng(position)
        self.position, self.num_tokens, self.target = position, num_tokens, target
        self.q_before = rng.normal(0, 1, (num_tokens, self.HEADS, self.DIM)).astype(np.float32)
        self.k_before, self.v_before = (
            rng.normal(0, 1, (num_tokens, self.KV_HEADS, self.DIM)).astype(np.float32) for _ in "kv"
        )
        factors = tuple(1.0 + 0.5 * np.arange(dims // 2))
        self.rope = RopeConfig(style, 10000.0, dims, factors) if dims else None
        self.num_chunks = -(-(position + num_tokens) // 256)
        heads = (self.HEADS, self.KV_HEADS, self.KV_HEADS)
        self.biases = [shared(rng.normal(0, 1, n * self.DIM).astype(np.float32)) for n in heads if biases]
        self.norms = [shared(rng.normal(1, 0.3, self.DIM).astype(np.float32)) for _ in "qk" if norms]
        self.launch(device, shared)

    def launch(self, device, shared):
        dims = self.rope.dimensions if self.rope else 2
        angles = shared(np.zeros((self.num_tokens, 2, dims // 2), np.float32))
        if self.rope:
            RopeAngles(self.rope).write(angles.values, self.position)
        self.chunks = shared(np.full((self.num_chunks, 2, self.KV_HEADS, 256 * self.DIM), self.MARK))
        chunk_bytes = self.chunks.values[0].nbytes
        order = np.arange(self.num_chunks)[::-1].astype(np.uint64)
        table = shared(np.uint64(self.chunks.address) + np.uint64(chunk_bytes) * order)
        self.q, k, v = (shared(x) for x in (self.q_before, self.k_before, self.v_before))
        rope = RopeKv(
            device,
            AttentionShape(self.HEADS, self.KV_HEADS, self.DIM),
            self.rope,
            QkvVectors(self.specs(self.biases), self.specs(self.norms), 1e-5),
            step_address=shared(np.array([self.position], np.int32)).address,
            angles_address=angles.address,
            chunk_table_address=table.address,
            target=self.target,
        )
        rope.bind_chunks(table.values)
        rope.enqueue(
            0,
            q_address=self.q.address,
            k_address=k.address,
            v_address=v.address,
            num_tokens=self.num_tokens,
            position=self.position,
        )
        device.finish()

    @staticmethod
    def specs(vectors):
        """Where the vectors are in a unit that begins at address 0."""
        return tuple(TensorSpec("", GgmlType.F32, 1, v.values.size, v.address, 0) for v in vectors)

    def prepared(self, number, heads):
        """q, k or v, by number, as it is before it rotates; in float64."""
        x = heads.astype(np.float64)
        if self.biases:
            x += self.biases[number].values.reshape(heads.shape[1:])
        return rms_norm(x, self.norms[number].values, 1e-5) if self.norms and number < 2 else x

    def kv(self):
        """(tokens, kv_heads, dim) float16 of K and of V, over all chunks."""
        chunks = self.chunks.values[::-1]
        k = chunks[:, 0].reshape(-1, self.KV_HEADS, 8, self.DIM, 32).transpose(0, 2, 4, 1, 3)
        v = chunks[:, 1].reshape(-1, self.KV_HEADS, self.DIM, 256).transpose(0, 3, 1, 2)
        return (x.reshape(-1, self.KV_HEADS, self.DIM) for x in (k, v))

    def rotated(self, heads):
        """(tokens, heads, dim) rotated in float64."""
        if not self.rope:
            return heads
        dims = self.rope.dimensions
        frequencies = 10000.0 ** (-np.arange(0, dims, 2) / dims) / np.array(self.rope.freq_factors)
        positions = np.arange(self.position, self.position + self.num_tokens)
        by_head = heads.astype(np.float64).transpose(1, 0, 2)
        return rotate(by_head, positions, self.rope.style, frequencies).transpose(1, 0, 2)

    def check(self):
        """q is as it has to be, new tokens' K and V are rounded once, and everything else is untouched."""
        q, k, v = (self.prepared(i, x) for i, x in enumerate((self.q_before, self.k_before, self.v_before)))
        assert np.abs(self.q.values - self.rotated(q)).max() < 4e-6
        new = slice(self.position, self.position + self.num_tokens)
        for stored, expected in zip(self.kv(), (self.rotated(k), v), strict=True):
            half_ulp = 2.0**-11 * np.abs(expected)
            assert (np.abs(stored[new] - expected) <= 1.01 * half_ulp + 4e-6).all()
            stored[new] = self.MARK
            assert (stored == self.MARK).all()
