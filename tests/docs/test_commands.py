"""Commands that pages show are ones that the command line takes. They are parsed, not run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer

from sparsetile.bench.suites import suite_names
from sparsetile.cli.app import app
from tests.docs.pages import DOCS, blocks
from tests.examples import ROOT

REPRODUCE = DOCS / "results" / "reproduce.md"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
COMMANDS = sorted(
    {
        line.removeprefix("$ ").strip()
        for path in PAGES
        for block in blocks(path, "", "console")
        for line in block.text.splitlines()
        if line.removeprefix("$ ").startswith("sparsetile ")
    }
)


def parse(line: str) -> None:
    """Raise where the command line would refuse the words of ``line``."""
    words = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    name = "sparsetile"
    context = command.make_context(name, [], resilient_parsing=True)
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        assert command is not None, f"No such command: {line}"
        if hasattr(command, "resolve_command"):
            context = command.make_context(name, [], parent=context, resilient_parsing=True)
    command.make_context(name, words, parent=context)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_pages_is_taken(line: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parse(line)


@pytest.mark.parametrize("line", ["sparsetile run a.mtx --no-such", "sparsetile nothing"])
def test_a_command_that_does_not_exist_is_noticed(line: str):
    assert len(COMMANDS) > 30
    with pytest.raises(Exception, match=r"No such (option|command)"):
        parse(line)


def test_every_committed_record_and_every_suite_has_its_command():
    page = REPRODUCE.read_text(encoding="utf-8")
    for path in (ROOT / "results" / "h200").iterdir():
        assert path.name.removesuffix(".gz") in page, path.name
    for name in suite_names():
        assert f"\nsparsetile bench {name} " in page, name
