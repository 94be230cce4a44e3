"""Every command that talks to the daemon: what it asks, what it shows, how it exits."""

from __future__ import annotations

import json

import pytest

from mzd.cli.main import main
from mzd.cli.trace_picture import lanes_of
from mzd.errors import MzdError
from mzd.messages.requests import EvictParams, PinParams, TrimLevel


def json_of(capsys):
    """The one JSON value on stdout."""
    return json.loads(capsys.readouterr().out)


def test_status_shows_where_memory_is_and_how_to_free_it(daemon, capsys):
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    for fact in (
        "smollm2",
        "98.0 MB",
        "mzd evict",
        "143.0 MB",
        "unknown available",
        "below the floor",
        "a[bold]b",
        "ready 1.2 s after its start",
        "refused Mali (staged): no",
    ):
        assert fact in shown
    assert "2 h ago" in shown
    assert "stale" in shown


def test_status_as_json_is_the_result(daemon, capsys):
    assert main(["status", "--json"]) == 0
    assert json_of(capsys)["memory"]["weights_bytes"] == 98_000_000


def test_contexts(daemon, capsys):
    assert main(["contexts"]) == 0
    assert "a[bold]b" in capsys.readouterr().out
    assert main(["contexts", "--json"]) == 0
    assert [context["context"] for context in json_of(capsys)["contexts"]] == ["a[bold]b", "old"]


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        (["500M"], EvictParams(bytes=500_000_000)),
        (["1Gi", "--context", "c"], EvictParams(bytes=1 << 30, context="c")),
        (["50%", "--dry-run"], EvictParams(fraction=0.5, dry_run=True)),
    ],
)
def test_evict(daemon, capsys, line, asked):
    assert main(["evict", *line]) == 0
    assert daemon.asked == [("evict", asked)]
    printed = capsys.readouterr()
    assert "freed 4.0 MB of 5.0 MB asked; nothing more can go" in printed.out
    assert "KVonly: kv layers 3 to 2 (2 units) -> ram, 1.5 MB\n" in printed.out
    assert "Wonly: weights layer 29 -> dropped, 2.5 MB\n" in printed.out
    assert "head: head -> dropped, 1 B\n" in printed.out
    assert "warning: swap_full" in printed.err
    assert main(["evict", *line, "--json"]) == 0
    assert json_of(capsys)["freed_bytes"] == 4_000_000


@pytest.mark.parametrize("level", ["complete", "80"])
def test_trim(daemon, level):
    assert main(["trim", level]) == 0
    assert daemon.asked[0][1].level is TrimLevel.COMPLETE


def test_restore(daemon, capsys):
    assert main(["restore"]) == 0
    assert main(["restore", "c"]) == 0
    assert [params.context for _, params in daemon.asked] == [None, "c"]
    assert "restored 5.0 MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        (["c"], PinParams(pinned=True, context="c")),
        (["--model"], PinParams(pinned=True, model=True)),
        (["c", "--off"], PinParams(pinned=False, context="c")),
    ],
)
def test_pin(daemon, line, asked):
    assert main(["pin", *line]) == 0
    assert daemon.asked == [("pin", asked)]


def test_drop(daemon, capsys):
    assert main(["drop", "c"]) == 0
    assert daemon.asked[0][1].context == "c"
    assert main(["drop", "c", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"dropped": True}


def test_metrics_profile_and_trace(daemon, capsys):
    assert main(["metrics"]) == 0
    assert capsys.readouterr().out == "mzd_up 1\n"
    assert main(["profile", "--json"]) == 0
    assert json_of(capsys) == {"profile": {"read_bytes_s": 5e8}}
    assert main(["trace"]) == 0
    assert len(json_of(capsys)) == 4  # the bare list, as Chrome loads it
    assert main(["trace", "r", "--json"]) == 0
    assert len(json_of(capsys)["events"]) == 4
    assert daemon.asked[-1][1].request == "r"


def test_a_trace_can_be_drawn(daemon, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["trace", "--png", str(tmp_path / "trace.png"), "--json"]) == 0
    assert json_of(capsys)["num_events"] == 4
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_a_lane_is_named_by_its_thread_and_starts_with_the_first_event():
    events = [
        {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "read"}},
        {"ph": "X", "tid": 1, "ts": 1000.0, "dur": 500.0},
        {"ph": "X", "tid": "prefill", "ts": 1500.0, "dur": 250.0},
        {"ph": "X", "tid": 1, "ts": 1500.0, "dur": 500.0},
        {"ph": "i", "tid": 2, "ts": 0.0},
    ]
    assert lanes_of(events) == {"read": [(0.0, 0.5), (0.5, 0.5)], "prefill": [(0.5, 0.25)]}


def test_top_as_json_is_a_line_a_look_until_ctrl_c(daemon, capsys, monkeypatch):
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("mzd.cli.report_commands.time.sleep", sleep)
    assert main(["top", "--json", "--interval", "0.5"]) == 0
    assert looks == [0.5, 0.5]
    assert [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()] == ["idle", "idle"]


COMMANDS = [
    ["status"], ["contexts"], ["metrics"], ["profile"], ["trace"], ["evict", "5M"],
    ["trim", "complete"], ["top"],
    ["restore"], ["pin", "c"], ["drop", "c"], ["run", "hi"],
]  # fmt: skip


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line[0])
def test_the_daemons_no_is_exit_status_1(daemon, capsys, line):
    daemon.failure = MzdError("unknown_context", "there is no context c", context="c")
    assert main(line) == 1
    assert capsys.readouterr().err == "mzd: unknown_context: there is no context c\n"
    assert main([*line, "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert json.loads(printed.out) == {
        "error": {"code": "unknown_context", "message": "there is no context c", "data": {"context": "c"}}
    }


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line[0])
def test_no_daemon_is_exit_status_3(tmp_path, monkeypatch, capsys, line):
    monkeypatch.setenv("MZD_SOCKET", str(tmp_path / "none"))
    assert main(line) == 3
    assert "no daemon at" in capsys.readouterr().err
    assert main([*line, "--json"]) == 3
    assert json_of(capsys)["error"]["code"] == "no_daemon"


def test_socket_flag_wins(daemon, monkeypatch):
    monkeypatch.setenv("MZD_SOCKET", "/nonexistent")
    assert main(["status", "--socket", str(daemon.path)]) == 0
