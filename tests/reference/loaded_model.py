"""Owns a whole model in device memory, every unit resident, for tests that need only an engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mzd.device.engine import Engine
from mzd.policy.units import CHUNK_TOKENS
from tests.reference.model import pack_units, read_model


class LoadedModel:
    """An engine with a model's units bound; `close` frees all of it.

    `edit` changes the index between the packing of the units and the making of the engine.
    """

    def __init__(
        self,
        device,
        path: Path,
        *,
        context_tokens=1024,
        ubatch_tokens=512,
        logit_rows=8,
        activations="f32",
        edit=lambda index: index,
    ):
        self.name = path.stem
        self.file = read_model(path)
        index, layers, head = pack_units(self.file)
        self.index = edit(index)
        self.device = device
        self._reservations = []
        self.engine = Engine(
            device,
            self.index,
            context_tokens_max=context_tokens,
            ubatch_tokens_max=ubatch_tokens,
            logit_rows_max=logit_rows,
            activations=activations,
        )
        self.layer_addresses = [self._put(unit) for unit in layers]
        self.head_address = self._put(head)
        num_chunks = -(-context_tokens // CHUNK_TOKENS)
        chunk_bytes = self.file.config.kv_chunk_bytes(CHUNK_TOKENS)
        self.chunk_addresses = np.array(
            [[self._reserve(chunk_bytes) for _ in range(num_chunks)] for _ in layers], np.uint64
        )
        self.bind()

    def bind(self, *, head=True):
        """Bind every layer, and the head unless told otherwise."""
        for layer, address in enumerate(self.layer_addresses):
            self.engine.bind_layer(layer, address, self.chunk_addresses[layer])
        if head:
            self.engine.bind_head(self.head_address)

    async def step(self, tokens, position, *, rows="last", embeddings=None):
        """Run one step; return a copy of its logits, or None for `rows` None."""
        self.engine.begin(np.asarray(tokens, np.int32), position, embeddings)
        self.engine.enqueue_layers()
        if rows is not None:
            self.engine.enqueue_head(rows)
        await self.engine.wait(self.engine.mark())
        return None if rows is None else self.engine.logits().copy()

    async def prefill(self, tokens, *, ubatch=512):
        """Run a prompt from position 0 in steps of `ubatch`; return the last token's logits, (vocab,)."""
        logits = None
        for begin in range(0, len(tokens), ubatch):
            part = tokens[begin : begin + ubatch]
            logits = await self.step(part, begin, rows="last" if begin + ubatch >= len(tokens) else None)
        return logits[0]

    async def greedy(self, prompt, num_tokens):
        """Return (`num_tokens` greedy ids after `prompt`, the first step's logits)."""
        first = await self.prefill(prompt)
        tokens = [int(first.argmax())]
        while len(tokens) < num_tokens:
            logits = await self.step(tokens[-1:], len(prompt) + len(tokens) - 1)
            tokens.append(int(logits[0].argmax()))
        return tokens, first

    async def forced(self, prompt, continuation):
        """Return the greedy id at each step of `continuation`, fed as it is given, not as it was chosen."""
        choices = [int((await self.prefill(prompt)).argmax())]
        for i, token in enumerate(continuation[:-1]):
            choices.append(int((await self.step([token], len(prompt) + i))[0].argmax()))
        return choices

    async def mean_loss(self, tokens, *, ubatch=64):
        """Return the mean of -ln p(next token) over a sequence."""
        losses = []
        for begin in range(0, len(tokens), ubatch):
            logits = (await self.step(tokens[begin : begin + ubatch], begin, rows="all")).astype(np.float64)
            targets = tokens[begin + 1 : begin + ubatch + 1]
            top = logits.max(axis=1)
            log_sums = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
            losses += list(log_sums[: len(targets)] - logits[np.arange(len(targets)), targets])
        return np.mean(losses)

    async def hidden(self, row):
        """Return a copy of one row of the residual stream, as the last step left it."""
        buffers = self.engine._buffers
        buffers._scratch.download()
        await self.device.wait(self.device.mark())
        return buffers.x[row].copy()

    def close(self):
        """Free units, chunks and the engine's scratch."""
        self.engine.close()
        for reservation in self._reservations:
            reservation.free()

    def _reserve(self, size_bytes):
        """Zeroed memory of the device; its address."""
        self._reservations.append(self.device.allocate_scratch(size_bytes))
        return self._reservations[-1].address

    def _put(self, unit):
        """Copy a unit into the device's memory; return its address."""
        address = self._reserve(unit.nbytes)
        self._reservations[-1].view(np.uint8, unit.shape)[...] = unit
        self._reservations[-1].upload()
        return address
