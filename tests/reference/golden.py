"""Owns the golden values of the small models, computed by another engine, and the comparison with them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "fixtures"


@cache
def golden_models():
    """The golden values of each model file, by its name without suffix."""
    models = json.loads((FIXTURES / "expected.json").read_text())["models"]
    return {model["file"].removesuffix(".gguf"): model for model in models}


async def disagreement(model, prompt, golden):
    """In what `model` differs from the golden values of a prompt, or None.

    Tokens are compared up to the first doubtful step, and the first logits within what float16 K and V move.

    Args:
        golden: what `prompt` is part of; says how far float16 K and V alone move any logit.
    """
    tokens, first = await model.greedy(prompt["tokens"], len(prompt["continuation"]))
    allowed = max(0.05, 2 * golden["max_logit_change_from_float16_kv"])
    distance = max(abs(first[token] - logit) for token, logit in prompt["top5_first"])
    if not distance < allowed:  # not-a-number too
        return f"a first logit is {distance:.3f} away, allowed {allowed:.3f}"
    compared = zip(tokens, prompt["continuation"], range(prompt["compare_steps"]), strict=False)
    for token, expected, step in compared:  # fewer than the steps where an end token came
        if token != expected:
            return f"token {step} is {token}, expected {expected}"
    return None


async def wrong_where_clear(model, prompt):
    """(steps with a margin of at least 1, those of them where `model` chose another token).

    For activations in 8 bits, which move logits by up to one.
    """
    choices = await model.forced(prompt["tokens"], prompt["continuation"])
    clear = [step for step, margin in enumerate(prompt["margins"]) if margin >= 1.0]
    return clear, [step for step in clear if choices[step] != prompt["continuation"][step]]
