"""The peer: what a run is worth without it, with it, and with one that says something else."""

from types import SimpleNamespace

import numpy as np
import pytest

from mzd.benchmarks import engine
from mzd.benchmarks.engine import run_engine
from mzd.benchmarks.engine_cases import Case, logits_distance
from mzd.benchmarks.ggml_library import GgmlLibrary
from mzd.benchmarks.ggml_peers import GgmlPeers
from mzd.benchmarks.kernel_work import PeerOperands
from mzd.benchmarks.llama_peer import LlamaPeer, PeerOptions, import_binding
from mzd.benchmarks.resident_model import ResidentModel
from mzd.benchmarks.synthetic import Geometry, write_model
from mzd.device.opencl import OpenClDevice
from mzd.errors import MzdError
from mzd.formats.ggml_types import GgmlType
from mzd.formats.quantization import dequantize
from mzd.model.importer import import_gguf
from mzd.model.tokenizer import Tokenizer
from mzd.model.weight_store import WeightStore

CASES = [Case("prompt", 0, 16), Case("decode", 16, 1, 2), Case("short", 32, 8)]
GEOMETRY = Geometry("small", "qwen3", 2, 64, 96, 4, 2, 16, 512, 512)

needs_binding = pytest.mark.skipif(import_binding() is None, reason="llama_cpp is not installed")


@pytest.fixture
def peer(monkeypatch, tiny):
    """Plays llama.cpp: our own engine behind its interface."""
    device, store = OpenClDevice.open(), WeightStore.open(tiny.store_path)

    class Peer(ResidentModel):
        error = 0.0

        def __init__(self, _binding, _path, *, context_tokens, threads, options):
            assert threads == device.compute_units
            assert options == PeerOptions()
            super().__init__(
                device, store, context_tokens=context_tokens, activations="f32", name=LlamaPeer.name
            )

        def logits(self):
            logits = super().logits()
            return logits + np.random.default_rng(1).normal(0, self.error * logits.std(), logits.shape)

    Peer.name = LlamaPeer.name
    monkeypatch.setattr(engine, "LlamaPeer", Peer)
    monkeypatch.setattr(engine, "import_binding", lambda: SimpleNamespace())
    monkeypatch.setattr(engine, "working_options", lambda _path, threads: PeerOptions())
    yield Peer
    store.close()
    device.close()


@pytest.mark.usefixtures("uncached")
async def test_ratios_are_told_by_model(tiny, peer):
    result = await run_engine([tiny], quick=True, report=lambda _: None, choose_cases=lambda *_: CASES)
    found = result.as_map()
    assert {row["system"] for row in found["rows"]} == {"mzd f32", "llama.cpp"}  # an F16 model has no int8
    assert set(found["models"]["tiny"]) == {"ratio_prompt512", "ratio_short8", "ratio_decode"}
    assert found["models"]["tiny"]["ratio_decode"] == found["ratio_decode"] > 0
    assert any("16 of 16 greedy tokens" in note for note in found["notes"])


@pytest.mark.usefixtures("uncached")
async def test_other_logits_have_no_speed(tiny, peer):
    peer.error = 0.02
    with pytest.raises(MzdError, match=r"tiny: logits differ from llama\.cpp's by 0\.0"):
        await run_engine([tiny], quick=True, report=lambda _: None, choose_cases=lambda *_: CASES)


def test_what_all_logits_have_in_common_is_no_distance():
    logits = np.random.default_rng(2).standard_normal(1000, np.float32)
    assert logits_distance(logits + 3, logits) < 1e-6
    assert logits_distance(-logits, logits) == pytest.approx(2.0)


@pytest.mark.parametrize("kind", [GgmlType.F16, GgmlType.Q8_0])
def test_synthetic_models_have_a_tokenizer(tmp_path, kind):
    write_model(tmp_path / "a.gguf", GEOMETRY, seed=1, type=kind)
    index = import_gguf(tmp_path / "a.gguf", tmp_path / "store")
    assert {spec.type for spec in index.layers[0].tensors if spec.rows > 1} == {kind}
    tokenizer = Tokenizer.from_metadata(index.tokenizer)
    ids = tokenizer.encode("a text, and ümlauts", parse_special=False)
    assert tokenizer.vocab_size == 512
    assert max(ids) == 256  # the one merge
    assert tokenizer.decode(ids) == "a text, and ümlauts"


def test_synthetic_weights_of_both_types_are_the_same_ones(tmp_path):
    rows = {}
    for kind in (GgmlType.F16, GgmlType.Q8_0):
        write_model(tmp_path / "a.gguf", GEOMETRY, seed=1, type=kind)
        import_gguf(tmp_path / "a.gguf", tmp_path / "store")
        with WeightStore.open(tmp_path / "store") as store:
            assert len({layer.crc32c for layer in store.index.layers}) == len(store.index.layers)
            rows[kind] = store.read_rows("token_embd", [0, 1, 511])
    assert rows[GgmlType.F16] == pytest.approx(rows[GgmlType.Q8_0], abs=0.01)
    assert not np.array_equal(rows[GgmlType.F16][0], rows[GgmlType.F16][1])


def test_a_type_that_is_not_drawn_is_refused(tmp_path):
    with pytest.raises(ValueError, match="synthetic weights of type Q4_0"):
        write_model(tmp_path / "a.gguf", GEOMETRY, seed=1, type=GgmlType.Q4_0)


def test_a_binding_without_its_libraries_is_named(tmp_path):
    with pytest.raises(MzdError, match="has no libllama"):
        GgmlLibrary(SimpleNamespace(__file__=str(tmp_path / "__init__.py")))


@needs_binding
async def test_llama_cpp_takes_synthetic_models_and_agrees(tmp_path):
    write_model(tmp_path / "a.gguf", GEOMETRY, seed=1)
    index = import_gguf(tmp_path / "a.gguf", tmp_path / "store")
    tokens = np.arange(12, dtype=np.int32)
    peer = LlamaPeer(
        import_binding(), tmp_path / "a.gguf", context_tokens=64, threads=1, options=PeerOptions(False)
    )
    device, store = OpenClDevice.open(), WeightStore.open(tmp_path / "store")
    ours = ResidentModel(device, store, context_tokens=64, activations="f32")
    assert await ours.answer(tokens, 0) == await peer.answer(tokens, 0)
    assert logits_distance(ours.logits(), peer.logits()) < engine.distance_max(index)
    ours.close()
    peer.close()
    store.close()
    device.close()


@needs_binding
@pytest.mark.parametrize("kind", [GgmlType.F16, GgmlType.Q8_0, GgmlType.Q4_0])
def test_llama_cpps_products_are_checked(kind):
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (16, kind.row_bytes(256)), np.uint8)
    raw.reshape(-1, kind.block_bytes)[:, :2] = np.array([0.01], np.float16).view(np.uint8)
    x = rng.standard_normal((3, 256), np.float32)
    expected = x.astype(np.float64) @ dequantize(kind, raw, 16 * 256).reshape(16, 256).T
    peers = GgmlPeers.find(1)
    with peers.products(PeerOperands(kind, raw, x, expected), 4) as products:
        assert "llama.cpp CPU" in products
        assert ("llama.cpp CPU_REPACK" in products) == (kind is GgmlType.Q4_0)
    wrong = PeerOperands(kind, raw, x, expected + 1)
    with pytest.raises(MzdError, match=r"llama\.cpp CPU"), peers.products(wrong, 4):
        pass
    peers.close()
