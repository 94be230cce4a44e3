"""The documentation against the code: what it names exists, what exists is named, its examples work."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from dataclasses import fields
from pathlib import Path

import msgpack
import pytest

from mzd.cli.arguments import build_parser, parse_arguments
from mzd.daemon.service import Service
from mzd.formats.ggml_types import SUPPORTED_TYPES
from mzd.policy.residency import UnitState
from mzd.rpc.params import SCHEMAS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RPC = (ROOT / "docs" / "RPC.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "systemd" / "README.md",
    *ROOT.glob("docs/**/*.md"),
]


def section(text: str, heading: str) -> str:
    """The text below a heading, up to the next one of any rank."""
    start = text.index(f"\n{heading}\n")
    end = re.compile(r"^#+ ", re.MULTILINE).search(text, start + len(heading) + 2)
    return text[start : end.start() if end else None]


def commands() -> set[str]:
    (subparsers,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return set(subparsers.choices)


def answered_methods() -> set[str]:
    """What the daemon dispatches; the table needs none of the service's parts."""
    return {"cancel", *Service(*[None for _ in fields(Service)]).methods()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_command_is_in_the_readme():
    named = set(re.findall(r"`mzd ([a-z]+)", section(README, "## Commands")))
    assert named == commands()


def test_the_readme_says_which_commands_the_daemon_refuses():
    refused = [line for line in README.splitlines() if "does not answer them yet" in line]
    named = {name for line in refused for name in re.findall(r"`mzd ([a-z]+)`", line)}
    assert named == set(SCHEMAS) - answered_methods()


def shell_lines(text: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_the_readmes_commands_are_understood():
    lines = [line for line in shell_lines(README) if line.startswith("mzd ")]
    assert len(lines) > 4
    for line in lines:
        words = [word for word in shlex.split(line, comments=True) if word != "&"]
        assert callable(parse_arguments(words[1:]).handler)


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for line in re.findall(r"^make ([a-z ]+)|`make ([a-z ]+)", page.read_text(), re.MULTILINE):
            assert set("".join(line).split()) <= targets, line


def test_the_rpc_page_has_every_method_that_is_answered():
    headings = re.findall(r"^### (.+)$", RPC, re.MULTILINE)
    assert {name for heading in headings for name in heading.split(", ")} == answered_methods()


@pytest.mark.parametrize("method", sorted(answered_methods() - {"cancel"}))
def test_the_rpc_page_has_every_parameter(method):
    heading = next(h for h in re.findall(r"^### .+$", RPC, re.MULTILINE) if method in h[4:].split(", "))
    described = section(RPC, heading)
    assert all(f"`{parameter}`" in described for parameter in SCHEMAS[method].fields)


def test_every_code_is_explained():
    sources = "".join(path.read_text() for path in (ROOT / "mzd").rglob("*.py"))
    raised = set(re.findall(r'(?:(?:Mzd|Format|Protocol)Error\(\s*|\bcode=)"([a-z_]+)"', sources))
    named = set(re.findall(r"`([a-z_]+)`", section(RPC, "## Codes")))
    assert raised
    assert raised <= named


def test_frames_written_as_bytes_are_the_frames():
    examples = re.findall(r"^    ((?:[0-9a-f]{2} ?)+)$", RPC, re.MULTILINE)
    described = [ast.literal_eval(text) for text in re.findall(r"(\[[02], [^`\n]*\])`:\n", RPC)]
    frames = [msgpack.unpackb(bytes.fromhex(example)) for example in examples]
    assert frames == [[0, 1, "tokenize", [{"text": "Hi"}]], *described]


def test_every_actor_and_state_is_in_the_architecture():
    helpers = {"restore_operation", "evict_operation"}
    actors = {path.stem for path in (ROOT / "mzd" / "actors").glob("[a-z]*.py")} - helpers
    assert actors == set(re.findall(r"^\| `([a-z_]+)` \|", section(ARCHITECTURE, "## Actors"), re.MULTILINE))
    states = section(ARCHITECTURE, "## States of a unit")
    assert all(re.search(rf"\b{state.name}\b", states) for state in UnitState)


def test_files_that_pages_name_exist():
    named = re.compile(r"`((?:mzd|native|configs|docs|tests)/[\w/.]+\.\w+)`")
    inside = re.compile(r"`((?:policy|formats|memory|device|model|messages|actors|daemon|kernels)/\w+\.\w+)`")
    for page in PAGES:
        for name in named.findall(page.read_text()):
            assert (ROOT / name).exists(), name
        for name in inside.findall(page.read_text()):
            assert (ROOT / "mzd" / name).exists(), name


def test_weight_types_are_those_that_are_supported():
    supported = {type.name for type in SUPPORTED_TYPES}
    table = (ROOT / "docs" / "weight-layout.md").read_text()
    assert set(re.findall(r"^\| ([A-Z]\w+) \|", table, re.MULTILINE)) == supported
    assert supported <= set(re.findall(r"\b[A-Z]+\d+(?:_\w+)?\b", section(README, "## Limits")))


def test_change_fragments_follow_the_rule():
    for path in (ROOT / "docs" / "changes").iterdir():
        assert path.name == "README.md" or re.fullmatch(
            r"[a-z0-9-]+\.(added|changed|fixed|removed)\.md", path.name
        )
