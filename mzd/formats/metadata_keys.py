"""Owns one architecture's metadata in a GGUF file: types checked, what is not computed refused."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mzd.errors import FormatError
from mzd.formats.architectures import ARCHITECTURES, Architecture
from mzd.formats.gguf import GgufFile, MetaValue, quoted

NEUTRAL_METADATA: Mapping[str, tuple[MetaValue, ...]] = {
    "expert_count": (0,),
    "use_parallel_residual": (False,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Metadata that changes what is computed, with the values that change nothing. Any other value is refused by
name, unless the architecture computes it: a wrong answer is worse than none."""


class MetadataKeys:
    """Metadata of one file, with the architecture's prefix added and types checked.

    Raises:
        FormatError: `invalid_model` for a file that names no architecture;
            `unsupported_architecture` for one that is not computed.
    """

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf = gguf
        self.architecture = self._architecture()

    @property
    def description(self) -> Architecture:
        """What the architecture computes."""
        return ARCHITECTURES[self.architecture]

    def invalid(self, reason: str) -> FormatError:
        """The refusal of a file that cannot be right."""
        return FormatError(f"{self.gguf.name}: {reason}", path=self.gguf.name)

    def unsupported(self, reason: str) -> FormatError:
        """The refusal of a model that would be computed wrongly."""
        return FormatError(
            f"{self.gguf.name}: {reason}",
            code="unsupported_architecture",
            path=self.gguf.name,
            architecture=self.architecture,
        )

    def get(self, key: str) -> MetaValue | None:
        """Any value, or None."""
        return self.gguf.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero; an array if all layers have the same."""
        value = self._uniform(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value <= 0:
            raise self.invalid(f"{self.architecture}.{key} is {shown(value)}, not a number above zero")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number, whole or not."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(f"{self.architecture}.{key} is {shown(value)}, not a number")
        return float(value)

    def positive(self, key: str) -> float:
        """A finite number above zero."""
        value = self.number(key)
        if not (math.isfinite(value) and value > 0):
            raise self.invalid(f"{self.architecture}.{key} is {value}, not a finite number above zero")
        return value

    def soft_cap(self, key: str, default: float | None) -> float | None:
        """A soft cap of an architecture that has one; 0 in the file is none."""
        return None if default is None else self.number(key, default) or None

    def refuse_what_is_not_computed(self) -> None:
        """Raise `unsupported_architecture` for metadata that the engine would ignore at the answer's cost."""
        experts = self.get("expert_count")
        if experts:
            raise self.unsupported(
                f"a mixture of {shown(experts)} experts ({self.architecture}) is not supported"
            )
        for key in NEUTRAL_METADATA.keys() - self._computed():
            value = self.get(key)
            if value is not None and value not in NEUTRAL_METADATA[key]:
                raise self.unsupported(f"{self.architecture}.{key} = {shown(value)} is not supported")
        self._refuse_window()

    def _computed(self) -> set[str]:
        """Keys that this architecture does read."""
        caps = {
            "attn_logit_softcapping": self.description.attention_softcap,
            "final_logit_softcapping": self.description.logit_softcap,
        }
        return {key for key, cap in caps.items() if cap is not None}

    def _refuse_window(self) -> None:
        """A window that the context never fills changes nothing."""
        window = self.get("attention.sliding_window")
        if not window or self.description.sliding is not None:
            return
        if self.count("attention.sliding_window") < self.count("context_length"):
            raise self.unsupported(f"a sliding window of {window} tokens is not supported")

    def _architecture(self) -> str:
        architecture = self.gguf.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise self.invalid(f"general.architecture is {shown(architecture)}, not a name")
        if architecture not in ARCHITECTURES:
            raise FormatError(
                f"{self.gguf.name}: unsupported architecture {quoted(architecture)}; "
                f"supported: {', '.join(ARCHITECTURES)}",
                code="unsupported_architecture",
                path=self.gguf.name,
                architecture=architecture,
            )
        return architecture

    def _uniform(self, key: str) -> MetaValue | None:
        value = self.get(key)
        if not isinstance(value, tuple):
            return value
        if len(set(value)) != 1:
            raise self.unsupported(f"{self.architecture}.{key} differs between layers")
        return value[0]


def shown(value: MetaValue | None) -> str:
    """A metadata value for a message, cut short."""
    return "missing" if value is None else f"{value!a:.60}"
