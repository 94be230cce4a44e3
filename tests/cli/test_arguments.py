"""The grammar: wrong use is 2, amounts mean what the help says, starting is cheap."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentTypeError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd import __version__
from mzd.cli.arguments import build_parser
from mzd.cli.main import main
from mzd.cli.sizes import evict_amount, format_bytes


def wrong_use(line):
    with pytest.raises(SystemExit) as caught:
        main(line)
    return caught.value.code


WRONG = [
    [], ["evaporate"], ["run"], ["run", "a", "b"], ["run", "x", "--raw", "--system", "y"],
    ["evict"], ["evict", "5Q"],
    ["evict", "101%"], ["evict", "-5"], ["run", "x", "--max-tokens", "many"],
    ["pin"], ["pin", "c", "--model"],
    ["bench", "luck"], ["serve", "--activations", "int4"], ["status", "--verbose"],
    ["top", "--interval", "0"],
    ["top", "--interval", "nan"],
]  # fmt: skip


@pytest.mark.parametrize("line", WRONG, ids=" ".join)
def test_wrong_use_is_exit_status_2(line, capsys):
    assert wrong_use(line) == 2
    printed = capsys.readouterr()
    assert "usage: mzd" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("line", [line for line in WRONG if line], ids=" ".join)
def test_wrong_use_with_json_is_an_error_on_stdout(line, capsys):
    assert wrong_use([*line, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "invalid_params"


def test_a_prompt_may_look_like_a_flag(capsys):
    assert wrong_use(["run", "a", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_version(capsys):
    assert wrong_use(["--version"]) == 0
    assert capsys.readouterr().out == f"mzd {__version__}\n"


def test_every_command_has_help_and_takes_json(capsys):
    [commands] = [action for action in build_parser()._actions if action.choices]
    for name in commands.choices:
        assert wrong_use([name, "--help"]) == 0
        assert "--json" in capsys.readouterr().out
    assert wrong_use(["--help"]) == 0


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", {"bytes": 0}), ("4096", {"bytes": 4096}), ("4096B", {"bytes": 4096}), ("5k", {"bytes": 5000}),
        ("500M", {"bytes": 500_000_000}), ("500MB", {"bytes": 500_000_000}), ("1.5Gi", {"bytes": 3 << 29}),
        ("1GiB", {"bytes": 1 << 30}), ("2 T", {"bytes": 2 * 10**12}), ("50%", {"fraction": 0.5}),
        ("0%", {"fraction": 0.0}), ("100 %", {"fraction": 1.0}), ("0.5", {"bytes": 1}),
    ],
)  # fmt: skip
def test_amounts(text, amount):
    assert evict_amount(text) == amount


@pytest.mark.parametrize("text", ["", "M", "5X", "-1", "1e9", "5%M", "100.1%", "nan", "5iB", "١%"])
def test_what_is_no_amount(text):
    with pytest.raises(ArgumentTypeError):
        evict_amount(text)


@given(st.integers(0, 1 << 60))
def test_bytes_are_taken_exactly(size):
    assert evict_amount(str(size)) == {"bytes": size}


@given(st.integers(0, 1 << 60))
def test_a_size_that_is_shown_can_be_read_back_within_its_digits(size):
    assert evict_amount(format_bytes(size))["bytes"] == pytest.approx(size, rel=0.06, abs=0.5)


def test_starting_loads_nothing_heavy():
    heavy = "{'trio', 'rich', 'numpy', 'pyopencl', 'tokenizers', 'jinja2', 'mzd.daemon', 'asyncio'}"
    code = f"import sys; import mzd.cli.main; print(sorted({heavy} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert loaded.stdout == "[]\n"


def test_the_module_runs_as_a_program():
    run = subprocess.run(
        [sys.executable, "-m", "mzd", "--version"], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout) == (0, f"mzd {__version__}\n")
