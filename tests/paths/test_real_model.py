"""The real model: its references before and after an exact eviction, and what int8 changes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from mzd.daemon.config import SwapConfig
from mzd.messages.compute import RunStep, StepTicket
from mzd.messages.reply import Reply
from mzd.model.library import ModelLibrary, models_directory
from tests.paths.harness import CONFIG, open_daemon

MODEL = "smollm2-135m"
EXPECTED = json.loads((Path(__file__).parents[1] / "fixtures" / "smollm2.json").read_text())
STEP_TOKENS = 8
"""The most rows of logits of one step."""

FIRST_PART = 512
TEXT_TOKENS = 256

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def real_store():
    """The store of the pulled model."""
    model = ModelLibrary(models_directory(os.environ)).get(MODEL)
    if model is None:
        pytest.skip(f"{MODEL} is not in the library: mzd pull {MODEL}")
    return model.store_path


async def test_references_before_and_after_an_exact_eviction(device, real_store, tmp_path):
    """Of each continuation half, as far as margins are clear; everything to flash; the other half."""
    prompts = EXPECTED["greedy"][:3]
    sure = [p["continuation"][: min(24, p["compare_steps"])] for p in prompts]
    async with open_daemon(device, real_store, tmp_path) as daemon:
        for i, prompt in enumerate(prompts):
            before = await daemon.generate(f"c{i}", prompt["tokens"], len(sure[i]) // 2)
            assert before["tokens"] == sure[i][: len(sure[i]) // 2]
        evicted = await daemon.evict()
        assert evicted["resident_bytes"] == 0
        for i in range(len(prompts)):
            after = await daemon.generate(f"c{i}", [], len(sure[i]) - len(sure[i]) // 2)
            assert after["tokens"] == sure[i][len(sure[i]) // 2 :]
            assert after["usage"]["computed_tokens"] == 1
        await daemon.settle()


async def forced_choices(daemon, context, tokens):
    """The greedy choice after each of `tokens`, which follow the context's first part as they are given."""
    ids = np.asarray(tokens, np.int32)
    restore_id, replies = await daemon.system.compute.restore(
        context, keep_tokens=FIRST_PART, capacity_tokens=FIRST_PART + len(ids), announce=True
    )
    choices = []
    for start in range(0, len(ids), STEP_TOKENS):
        reply = Reply()
        part = ids[start : start + STEP_TOKENS]
        step = RunStep(restore_id, part, FIRST_PART + start, "all", StepTicket(), reply)
        await daemon.system.to_gpu.send(step)
        choices += (await reply.get()).logits.argmax(axis=1).tolist()
    await replies.outcome.get()
    await daemon.system.compute.finish(context, np.asarray([], np.uint32))
    return choices


async def test_int8_changes_less_than_one_choice_in_a_hundred(device, real_store, tmp_path):
    """256 tokens of real text over 512 that went through int8 in RAM, against the same without."""
    text = EXPECTED["nll"][0]["tokens"]
    first, rest = text[:FIRST_PART], text[FIRST_PART : FIRST_PART + TEXT_TOKENS]
    config = {"codec": "int8", "swap": SwapConfig(storage=False)}
    async with open_daemon(device, real_store, tmp_path, CONFIG, **config) as daemon:
        await daemon.generate("kept", first)
        expected = await forced_choices(daemon, "kept", rest)
        await daemon.generate("evicted", first)
        await daemon.evict()
        assert daemon.states("evicted") == {"COMPRESSED"}
        found = await forced_choices(daemon, "evicted", rest)
        await daemon.evict(bytes=0)
    agreement = np.mean(np.asarray(found) == np.asarray(expected))
    assert agreement >= 0.99
