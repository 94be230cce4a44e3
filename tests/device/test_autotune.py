"""What is measured, what is chosen by it, and the file that keeps it."""

import json
from itertools import count

import pytest

from mzd.device import autotune as module
from mzd.device.autotune import autotune, load_choices, measure_while, pick, save_choices
from mzd.device.matmul_choice import LARGE_TILE, TILE, Choice, product_key
from tests.device.products import F16, Q4_1, Q8_0, Shape

RULE, OTHER, TILED = Choice(64), Choice(128), Choice(64, TILE)
CHOICES = {
    product_key(Shape(Q8_0, 1024, 64), 1, int8=False): OTHER,
    product_key(Shape(Q4_1, 1024, 64), 512, int8=True): TILED,
}


@pytest.fixture
def gpu(device, monkeypatch):
    monkeypatch.setattr(device, "kernel_class", "gpu")
    return device


@pytest.fixture
def measured(monkeypatch):
    """No launches: the fewer lanes the faster, tiles slow. A list of what was measured, in order."""
    log = []

    def time_s(bench, choice):
        log.append((bench._key.tokens_class, choice))
        return float(choice.lanes) + (0.0 if choice.tile is None else 1e6)

    monkeypatch.setattr(module._Bench, "time_s", time_s)
    return log


def test_only_a_clear_gain_unseats_the_rule():
    assert pick(RULE, {RULE: 1.0, OTHER: 0.9, TILED: 0.8}) == TILED
    assert pick(RULE, {RULE: 1.0, OTHER: 0.97}) == RULE
    assert pick(RULE, {RULE: 1.0}) == RULE


def test_measuring_stops_when_the_budget_is_spent():
    turns = count()
    times_s = measure_while(lambda: next(turns) < 2, [RULE, OTHER, TILED], lambda choice: 1.0)
    assert list(times_s) == [RULE, OTHER]


def test_choices_survive_the_file(tmp_path):
    path = tmp_path / "kernels" / "choices.json"
    save_choices(path, "device A", CHOICES)
    save_choices(path, "device B", {})
    assert load_choices(path, "device A") == CHOICES
    assert load_choices(path, "device B") == {}
    assert load_choices(path, "device C") == {}
    assert [file.name for file in path.parent.iterdir()] == ["choices.json"]


DAMAGES = [
    lambda document: b"",
    lambda document: b"\xff\xfe{",
    lambda document: b"[]",
    lambda document: json.dumps(document | {"format": 99}).encode(),
    lambda document: json.dumps(document | {"devices": 3}).encode(),
    lambda document: json.dumps({"format": 1}).encode(),
    *(
        lambda document, entry=entry: json.dumps(document | {"devices": {"device A": entry}}).encode()
        for entry in (
            [1],
            {"Q8_0 1024": {"lanes": 64, "tile": None}},
            {"Q9_9 1024 64 1 f32": {"lanes": 64, "tile": None}},
            {"Q8_0 1024 64 1 f32": 64},
            {"Q8_0 1024 64 1 f32": {"lanes": 63, "tile": None}},
            {"Q8_0 1024 64 1 f32": {"lanes": "64", "tile": None}},
            {"Q8_0 1024 64 1 f32": {"lanes": 64, "tile": [0, 0, 0, 0]}},
            {"Q8_0 1024 64 1 f32": {"lanes": 64}},
        )
    ),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_counts_as_empty_and_is_replaced(tmp_path, damage):
    path = tmp_path / "choices.json"
    save_choices(path, "device A", CHOICES)
    path.write_bytes(damage(json.loads(path.read_bytes())))
    assert load_choices(path, "device A") == {}
    save_choices(path, "device A", CHOICES)
    assert load_choices(path, "device A") == CHOICES


SHAPES = (Shape(Q8_0, 1024, 64), Shape(F16, 48, 64))


def run(gpu, path, shapes=SHAPES, **changes):
    options = {"tokens_max": 8, "activations": "f32", "path": path} | changes
    return autotune(gpu, shapes, **options)


def test_each_product_is_measured_once_for_all_starts(gpu, measured, tmp_path):
    first = run(gpu, tmp_path / "c.json")
    assert len(first) == 4  # two matrices, one token and up to eight
    assert [tokens for tokens, _ in measured] == sorted(tokens for tokens, _ in measured)
    measured.clear()
    assert run(gpu, tmp_path / "c.json") == first
    assert not measured
    run(gpu, tmp_path / "c.json", tokens_max=32)
    assert {tokens for tokens, _ in measured} == {32}


@pytest.mark.parametrize("what", ["driver", "source"])
def test_another_driver_or_source_is_measured_anew(gpu, measured, tmp_path, monkeypatch, what):
    run(gpu, tmp_path / "c.json")
    measured.clear()
    if what == "driver":
        monkeypatch.setattr(gpu, "driver", "another one 2.0")
    else:
        monkeypatch.setattr(module, "kernel_source", lambda name: f"// {name}, edited")
    run(gpu, tmp_path / "c.json")
    assert measured


def test_without_budget_the_rule_stays_for_good(gpu, measured, tmp_path):
    choices = run(gpu, tmp_path / "c.json", budget_s=0.0)
    limits = module.gpu_limits(gpu)
    for shape in SHAPES:
        for tokens in (1, 8):
            rule = module.default_choice(limits, shape, tokens, int8=False)
            assert choices[product_key(shape, tokens, int8=False)] == rule
    assert not measured
    run(gpu, tmp_path / "c.json")
    assert not measured


def test_devices_of_the_cpu_class_have_nothing_to_choose(device, measured, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "kernel_class", "cpu")
    assert run(device, tmp_path / "c.json") == {}
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_real_launches_are_timed(gpu, tmp_path, activations):
    choices = run(gpu, tmp_path / "c.json", [Shape(Q8_0, 24, 96)], activations=activations)
    assert len(choices) == 2
    assert all(choice.tile is None for choice in choices.values())


def test_of_a_large_matrix_the_first_rows_are_measured():
    key = product_key(Shape(Q8_0, 10**7, 4096), 1, int8=False)
    bench = module._Bench(None, key, Shape(Q8_0, 10**7, 4096))
    assert module.packed_size_bytes(Q8_0, bench._shape.rows, 4096) <= module.WEIGHTS_BYTES_MAX


def test_a_tile_is_kept_as_its_numbers(tmp_path):
    key = next(iter(CHOICES))
    save_choices(tmp_path / "c.json", "d", {key: Choice(32, LARGE_TILE)})
    (entry,) = json.loads((tmp_path / "c.json").read_bytes())["devices"]["d"].values()
    assert entry == {"lanes": 32, "tile": [128, 64, 8, 8]}
