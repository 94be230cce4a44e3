"""The file of profiles: what is found again, what counts as none, how it is replaced."""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mzd.errors import MzdError
from mzd.memory import device_profile_store
from mzd.memory.device_profile_store import (
    PROFILES_MAX,
    DeviceProfileStore,
    MeasuredProfile,
    ProfileKey,
    _checksum,
)

KEY = ProfileKey(
    device="Mali-G610 r0p0",
    driver="ARM Platform 3.0",
    codec="int8",
    codec_version=1,
    program_version="0.1.0",
    threads={"read": 2, "decompress": 4},
    cores=(4, 5, 6, 7),
    huge_pages=True,
    file_systems=(2**64 - 1, 7),
)

FIGURES = st.floats(1e-9, 1e12)
PROFILES = st.builds(
    MeasuredProfile,
    decode_bytes_per_s=FIGURES,
    read_bytes_per_s=FIGURES,
    write_bytes_per_s=FIGURES,
    populate_s_per_mb=FIGURES,
    read_alone_bytes_per_s=FIGURES,
    release_s_per_mb=FIGURES,
)


def profile(decode_bytes_per_s=8e9):
    return MeasuredProfile(
        decode_bytes_per_s=decode_bytes_per_s,
        read_bytes_per_s=2e9,
        write_bytes_per_s=5e8,
        populate_s_per_mb=1.5e-4,
        read_alone_bytes_per_s=2.5e9,
        release_s_per_mb=4e-6,
    )


@pytest.fixture
def store(tmp_path):
    return DeviceProfileStore(tmp_path / "profile.json")


@given(measured=PROFILES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_is_saved_is_loaded_to_the_last_bit(store, measured):
    store.save(KEY, measured)
    assert DeviceProfileStore(store.path).load(KEY) == measured


def test_nothing_is_known_at_first_and_nothing_is_said(store, caplog):
    assert store.load(KEY) is None
    assert not caplog.records


@pytest.mark.parametrize(
    "change",
    [
        {"device": "Mali-G610 r0p1"},
        {"driver": "ARM Platform 3.1"},
        {"codec": "none"},
        {"codec_version": 2},
        {"program_version": "0.2.0"},
        {"threads": {"read": 2, "decompress": 3}},
        {"cores": ()},
        {"huge_pages": False},
        {"file_systems": (7, 2**64 - 1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_profile_is_for_one_key_only(store, change):
    store.save(KEY, profile())
    assert store.load(replace(KEY, **change)) is None
    assert store.load(KEY) == profile()


def test_the_newest_of_a_key_counts_and_other_keys_stay(store):
    other = replace(KEY, codec="none")
    store.save(KEY, profile(1e9))
    store.save(other, profile(2e9))
    store.save(KEY, profile(3e9))
    assert store.load(KEY) == profile(3e9)
    assert store.load(other) == profile(2e9)
    assert len(json.loads(store.path.read_text())["profiles"]) == 2


def test_the_oldest_goes_when_there_are_too_many(store):
    keys = [replace(KEY, codec_version=version) for version in range(PROFILES_MAX + 1)]
    for key in keys:
        store.save(key, profile())
    assert store.load(keys[0]) is None
    assert all(store.load(key) == profile() for key in keys[1:])


def test_any_flipped_bit_is_seen_or_changes_nothing(store):
    store.save(KEY, profile())
    whole = store.path.read_bytes()
    for position in range(len(whole)):
        for bit in (1, 16, 128):
            damaged = bytearray(whole)
            damaged[position] ^= bit
            store.path.write_bytes(damaged)
            assert store.load(KEY) in (None, profile())


def test_a_file_cut_anywhere_is_none(store):
    store.save(KEY, profile())
    whole = store.path.read_bytes()
    for size in range(len(whole)):
        store.path.write_bytes(whole[:size])
        assert store.load(KEY) is None


def forge(store, change):
    """Write a file with a right checksum over an entry that `change` has been at."""
    store.save(KEY, profile())
    document = json.loads(store.path.read_text())
    change(document["profiles"][0])
    document["crc32c"] = _checksum(document["profiles"])
    store.path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["profile"].update(read_bytes_per_s=0.0),
        lambda entry: entry["profile"].update(release_s_per_mb=-1.0),
        lambda entry: entry["profile"].update(read_alone_bytes_per_s=float("nan")),
        lambda entry: entry["profile"].update(decode_bytes_per_s=float("inf")),
        lambda entry: entry["profile"].update(read_bytes_per_s=True),
        lambda entry: entry["profile"].update(read_bytes_per_s="2e9"),
        lambda entry: entry["profile"].update(source="default"),
        lambda entry: entry["profile"].update(more=1.0),
        lambda entry: entry["profile"].pop("write_bytes_per_s"),
        lambda entry: entry.pop("profile"),
        lambda entry: entry.update(profile=[1.0]),
    ],
)
def test_forged_entries_are_passed_over_with_a_word(store, change, caplog):
    forge(store, change)
    assert store.load(KEY) is None
    assert "profile: passed over" in caplog.text


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 60_000, b'{"format": 2}', b'{"format": 1}']
)
def test_a_file_that_is_something_else_is_none_and_is_replaced(store, content, caplog):
    store.path.write_bytes(content)
    assert store.load(KEY) is None
    assert "profile: passed over" in caplog.text
    store.save(KEY, profile())
    assert store.load(KEY) == profile()


def test_a_long_file_is_not_read(store):
    store.save(KEY, profile())
    store.path.write_bytes(store.path.read_bytes() + b" " * 64 * 1024)
    assert store.load(KEY) is None


def test_links_and_pipes_are_not_followed(store, tmp_path):
    store.save(KEY, profile())
    store.path.rename(tmp_path / "elsewhere")
    store.path.symlink_to(tmp_path / "elsewhere")
    assert store.load(KEY) is None
    store.path.unlink()
    os.mkfifo(store.path)
    assert store.load(KEY) is None
    store.save(KEY, profile())  # takes the place of either
    assert store.load(KEY) == profile()


def test_the_file_is_0600_whatever_the_umask_and_alone(store, tmp_path):
    umask = os.umask(0)
    try:
        store.save(KEY, profile())
    finally:
        os.umask(umask)
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["profile.json"]


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, "swap_full"), (errno.EIO, "internal")])
def test_a_disk_that_refuses_leaves_the_old_file(store, tmp_path, monkeypatch, number, code):
    store.save(KEY, profile(1e9))

    def refuse(_fd):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(device_profile_store.os, "fsync", refuse)
    with pytest.raises(MzdError) as error:
        store.save(KEY, profile(2e9))
    assert error.value.code == code
    assert store.load(KEY) == profile(1e9)
    assert os.listdir(tmp_path) == ["profile.json"]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_figures_that_cannot_be_are_refused(value):
    for name in ("read_alone_bytes_per_s", "release_s_per_mb", "decode_bytes_per_s"):
        with pytest.raises(ValueError, match=name):
            replace(profile(), **{name: value})
