"""Commands that pages show are ones that the command line takes. They are parsed, not run."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

from sparsetile.bench.suites import suite_names
from sparsetile.cli.app import app
from tests.docs.pages import DOCS, blocks
from tests.examples import ROOT

REPRODUCE = DOCS / "results" / "reproduce.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def lines(pages: list[Path]) -> list[str]:
    """Return the lines of pages' blocks that are no Python, each once."""
    found = {
        line.removeprefix("$ ").strip()
        for path in pages
        for block in blocks(path, "", "console")
        for line in block.text.splitlines()
    }
    return sorted(found - {""})


LINES = lines(PAGES)
COMMANDS = [line for line in LINES if line.startswith("sparsetile ")]
# Tools and examples of a checkout, after settings of the environment.
TOOLS = [line for line in LINES if re.match(r"(\w+=\S+ )*python (-m tools\.|examples/)", line)]
# Run by the tutorial's own test, or by that of packaging.
RUN_ELSEWHERE = ("python3 -m venv venv", ". venv/bin/activate", "pip install ./sparsetile")


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


class _Parsed(Exception):
    """Raised where a tool has parsed its words, before it does anything."""


def parse_tool(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise where a tool of a checkout would refuse the words of ``line``."""
    words = shlex.split(line.partition("python ")[2].partition(" > ")[0], comments=True)
    words = words[words[0] == "-m" :]
    module = importlib.import_module(words[0].removesuffix(".py").replace("/", "."))
    parse_args = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: object) -> None:
        parse_args(self, *given)
        raise _Parsed

    if len(words) == 1:
        assert callable(module.main)
        return
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(_Parsed):
        module.main(*([words[1:]] if module.main.__code__.co_argcount else []))


@pytest.mark.parametrize("line", TOOLS)
def test_every_tool_of_the_pages_takes_its_words(line: str, monkeypatch):
    parse_tool(line, monkeypatch)


def test_every_line_of_the_pages_is_a_command_that_something_checks():
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    # Explanations have drawings and printed text in such blocks.
    pages = [path for path in PAGES if "explanation" not in path.parts]
    for line in {*lines(pages)} - {*COMMANDS} - {*TOOLS}:
        words = line.split()
        if words[0] == "make":
            assert f"\n{words[1]}:" in make, line
        elif words[0] == "torchrun":  # of torch; what it starts is a block of its page
            assert words[1:] == ["--nproc-per-node", "8", "train.py"]
        elif words[:2] == ["python", "-m"]:  # pytest with the plugin, on a checkout of PyG
            assert importlib.util.find_spec(words[4]) and words[2:4] == ["pytest", "-p"], line
        else:
            assert line.startswith(RUN_ELSEWHERE), f"nothing checks {line!r}"


def test_every_test_that_make_names_is_there():
    named = re.findall(r"\btests/\w[\w/.]*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert len(named) > 10 and all((ROOT / path).exists() for path in named if "*" not in path)


@pytest.mark.parametrize("words", ["tools.charts --no-such", "tools.no_such"])
def test_a_tool_that_refuses_its_words_is_noticed(words: str, monkeypatch):
    with pytest.raises((SystemExit, ImportError)):
        parse_tool(f"python -m {words}", monkeypatch)


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
