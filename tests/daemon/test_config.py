"""The configuration: files that ship, what is refused and by which name, where paths come from."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.daemon.config import CHOICES, Config, load_config
from mzd.errors import MzdError

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = ("default", "board", "phone")


def flat(values, prefix=""):
    """{'threads.read': 2, ...} of a Config as a dictionary, or of a TOML document."""
    keys = {}
    for key, value in values.items():
        keys |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return keys


DEFAULTS = flat(dataclasses.asdict(Config()))


def write(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def refusal(tmp_path, text):
    with pytest.raises(MzdError) as caught:
        load_config(write(tmp_path, text), {})
    assert caught.value.code == "invalid_params"
    return caught.value


# The files that ship


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_loads_and_names_every_key(name):
    path = CONFIGS / f"{name}.toml"
    load_config(path, {})
    assert set(flat(tomllib.loads(path.read_text()))) == set(DEFAULTS)


def test_the_default_file_holds_the_defaults():
    assert load_config(CONFIGS / "default.toml", {}) == Config()


def comments_and_values(text):
    """(key, the comment lines just above it) for every key of a file."""
    table, comment = "", []
    for line in text.splitlines():
        if line.startswith("#"):
            comment.append(line.lstrip("# "))
        elif header := re.fullmatch(r"\[(\w+)\]", line):
            table, comment = f"{header[1]}.", []
        elif entry := re.match(r"(\w+) = ", line):
            yield table + entry[1], " ".join(comment)
            comment = []
        else:
            comment = []


def as_toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_the_default_file_says_every_default():
    found = dict(comments_and_values((CONFIGS / "default.toml").read_text()))
    for key, default in DEFAULTS.items():
        assert f"Default: {as_toml(default)}" in found[key], key


def test_the_default_file_says_every_choice():
    found = dict(comments_and_values((CONFIGS / "default.toml").read_text()))
    for key, choices in CHOICES.items():
        assert all(f'"{choice}"' in found[key] for choice in choices), key


@pytest.mark.parametrize("name", ["board", "phone"])
def test_a_changed_default_is_said_where_it_is_changed(name):
    path = CONFIGS / f"{name}.toml"
    values = flat(dataclasses.asdict(load_config(path, {})))
    for key, comment in comments_and_values(path.read_text()):
        differs = values[key] != DEFAULTS[key]
        assert (f"default {as_toml(DEFAULTS[key])}: " in comment) == differs, key


# What is refused


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("colour = 1", "colour"),
        ("[threads]\ncolour = 1", "colour"),
        ("context = '4096'", "context"),
        ("context = true", "context"),
        ("context = 1.5", "context"),
        ("restore_wait_s = '5'", "restore_wait_s"),
        ("threads = 3", "threads"),
        ("[threads]\ncores = [1, 2.0]", "threads.cores"),
        ("[threads]\ncores = 4", "threads.cores"),
        ("codec = 'zip'", "codec"),
        ("activations = 'f16'", "activations"),
        ("overlap = 'mz_XX'", "overlap"),
        ("eviction_order = 'sideways'", "eviction_order"),
        ("context = -1", "context"),
        ("restore_wait_s = -0.1", "restore_wait_s"),
        ("[threads]\nread = 0", "read"),
        ("[limits]\ncontexts = 0", "contexts"),
        ("[pressure]\nfloor_bytes = -1", "pressure.floor_bytes"),
        ("[pressure]\nstep_fraction = 0.0", "pressure.step_fraction"),
        ("[pressure]\nstep_fraction = 1.1", "pressure.step_fraction"),
        ("[pressure]\npoll_s = 0", "pressure.poll_s"),
        ("[pressure]\npoll_s = nan", "pressure.poll_s"),
        ("[swap]\nquota_bytes = -1", "swap.quota_bytes"),
        ('model = "a\\u0000b"', "model"),
        ('socket = "\\u0000"', "socket"),
        ('socket_group = "\\u0000"', "socket_group"),
        ('state = "/tmp/\\u0000"', "state"),
        ('device = "\\u0000"', "device"),
    ],
)
def test_a_wrong_key_is_named(tmp_path, text, key):
    error = refusal(tmp_path, text)
    assert error.data["key"] == key
    assert key in error.message


def test_a_wrong_type_is_told_the_choices(tmp_path):
    assert "auto or cpu or gpu" in refusal(tmp_path, "kernels = 3").message


def test_a_file_that_is_no_utf8(tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(b'model = "\xff\xfe"')
    with pytest.raises(MzdError, match=r"is no TOML") as caught:
        load_config(path, {})
    assert caught.value.code == "invalid_params"


def test_what_is_no_toml_and_what_is_not_there(tmp_path):
    assert "is no TOML" in refusal(tmp_path, "model = ").message
    with pytest.raises(MzdError) as caught:
        load_config(tmp_path / "missing.toml", {})
    assert caught.value.code == "not_found"


def test_an_integer_will_do_for_seconds(tmp_path):
    config = load_config(write(tmp_path, "restore_wait_s = 3"), {})
    assert config.restore_wait_s == 3.0
    assert isinstance(config.restore_wait_s, float)


@given(
    flags=st.fixed_dictionaries(
        {},
        optional={
            "context": st.none() | st.integers(0, 4096),
            "codec": st.none() | st.sampled_from(CHOICES["codec"]),
            "model": st.none() | st.text(st.characters(exclude_characters="\0"), max_size=8),
        },
    )
)
def test_flags_win_over_the_file(flags):
    path = CONFIGS / "board.toml"
    given_flags = {key: value for key, value in flags.items() if value is not None}
    assert load_config(path, flags) == dataclasses.replace(load_config(path, {}), **given_flags)


@pytest.mark.parametrize("flags", [{"context": -1}, {"codec": "zip"}, {"activations": "f16"}])
def test_flags_are_checked_as_the_file_is(flags):
    with pytest.raises(MzdError) as caught:
        load_config(None, flags)
    assert caught.value.data["key"] in flags


# Paths


def test_where_state_lies(monkeypatch):
    for name in ("STATE_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/u")
    assert Config().state_directory == Path("/home/u/.local/state/mzd")
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert Config().state_directory == Path("/x/mzd")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/mzd:/var/lib/other")
    assert Config().state_directory == Path("/var/lib/mzd")
    assert Config(state="/given").state_directory == Path("/given")


def test_where_the_socket_lies(monkeypatch):
    for name in ("MZD_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert Config().socket_path == Path("/run/mzd/mzd.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert Config().socket_path == Path("/run/user/1/mzd.sock")
    monkeypatch.setenv("MZD_SOCKET", "/tmp/s")
    assert Config().socket_path == Path("/tmp/s")
    assert Config(socket="/given").socket_path == Path("/given")
