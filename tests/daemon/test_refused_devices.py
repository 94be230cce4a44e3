"""The note of what a start refused: kept, replaced, and of no harm when it is damaged."""

import stat

import pytest

from mzd.daemon.refused_devices import RECORD_FILE, keep_refusals, last_refusals
from tests.daemon.opencl_reports import REFUSAL


def test_what_is_kept_comes_back(tmp_path):
    keep_refusals(tmp_path, [REFUSAL, REFUSAL])
    assert last_refusals(tmp_path) == (REFUSAL, REFUSAL)
    assert stat.S_IMODE((tmp_path / RECORD_FILE).stat().st_mode) == 0o600
    keep_refusals(tmp_path, [])
    assert last_refusals(tmp_path) == ()


def test_nothing_new_writes_nothing(tmp_path):
    keep_refusals(tmp_path, [])
    assert not (tmp_path / RECORD_FILE).exists()
    keep_refusals(tmp_path, [REFUSAL])
    before = (tmp_path / RECORD_FILE).stat().st_ino
    keep_refusals(tmp_path, [REFUSAL])
    assert (tmp_path / RECORD_FILE).stat().st_ino == before


@pytest.mark.parametrize("content", ["", "{", "3", '{"a": 1}', "[1]", '[{"device": "x"}]', "[" * 60_000])
def test_a_damaged_note_is_none(tmp_path, content):
    (tmp_path / RECORD_FILE).write_text(content)
    assert last_refusals(tmp_path) == ()


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    keep_refusals(tmp_path / "file", [REFUSAL])
    assert "not noted" in caplog.text
