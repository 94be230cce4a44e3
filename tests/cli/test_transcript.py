"""What `mzd run --context` remembers between two commands."""

import json
import stat

import pytest

from mzd.cli.main import main
from mzd.cli.transcript import Transcript
from mzd.errors import MzdError


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_turns_come_back_and_only_their_user_reads_them(state_home):
    turns = [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "Hallo"}]
    Transcript("/run/a.sock", "talk").keep(turns)
    assert Transcript("/run/a.sock", "talk").messages() == turns
    (file,) = (state_home / "mzd" / "transcripts").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_two_daemons_do_not_share_a_context():
    Transcript("/run/a.sock", "talk").keep([{"role": "user", "content": "secret"}])
    assert Transcript("/run/b.sock", "talk").messages() == []


def test_what_was_forgotten_is_gone():
    transcript = Transcript("/run/a.sock", "talk")
    transcript.keep([{"role": "user", "content": "x"}])
    transcript.forget()
    transcript.forget()
    assert transcript.messages() == []


@pytest.mark.parametrize("content", ["", "{}", '[{"role": "user"}]', '[{"role": 1, "content": "x"}]', "[3]"])
def test_a_damaged_file_is_named(state_home, content):
    transcript = Transcript("/run/a.sock", "talk")
    transcript.keep([])
    (file,) = (state_home / "mzd" / "transcripts").iterdir()
    file.write_text(content)
    with pytest.raises(MzdError, match=str(file)):
        transcript.messages()


def test_run_goes_on_in_a_named_context(daemon, capsys):
    for question in ("My name is Ada.", "What is my name?"):
        assert main(["run", "--context", "talk", "--json", question]) == 0
    sent = daemon.asked[-1][1].messages
    answer = json.loads(capsys.readouterr().out.splitlines()[0])["text"]
    assert [message.content for message in sent] == ["My name is Ada.", answer, "What is my name?"]


def test_without_a_context_every_run_begins_anew(daemon):
    for question in ("one", "two"):
        assert main(["run", "--json", question]) == 0
    assert [message.content for message in daemon.asked[-1][1].messages] == ["two"]


@pytest.mark.parametrize(("reused", "recomputed", "lost"), [(0, 0, True), (0, 3, False), (4, 0, False)])
def test_a_conversation_that_the_daemon_has_lost_is_said(daemon, capsys, reused, recomputed, lost):
    daemon.reused_tokens = 0
    assert main(["run", "--context", "talk", "one"]) == 0
    assert "knew nothing" not in capsys.readouterr().err  # the first turn is new to both
    daemon.reused_tokens, daemon.recomputed_tokens = reused, recomputed
    assert main(["run", "--context", "talk", "two"]) == 0
    said = capsys.readouterr().err
    assert ("all 9 tokens" in said and "mzd drop talk" in said) == lost


def test_drop_forgets_turns_of_a_context_that_the_daemon_has_lost(daemon, capsys):
    transcript = Transcript(str(daemon.path), "talk")
    transcript.keep([{"role": "user", "content": "x"}])
    daemon.failure = MzdError("unknown_context", "there is no context 'talk'")
    assert main(["drop", "talk"]) == 0
    assert transcript.messages() == []
    assert main(["drop", "talk"]) == 1
    assert "unknown_context" in capsys.readouterr().err
