"""Tables and JSON as they reach stdout."""

from __future__ import annotations

import io
import json
import sys

import pytest

from sparsetile.cli import main
from sparsetile.cli.console import activity, print_json, print_table, progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_in_a_pipe_is_never_folded(capsys):
    print_table(("name", "text"), [["a", "x" * 300], ["b", "y"]], right=("name",))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[2].endswith("x" * 300)


def test_a_table_too_wide_for_the_terminal_becomes_lines_of_heading_and_cell(
    monkeypatch, environment
):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    environment(COLUMNS="40")
    print_table(("name", "text"), [["a", "four " * 10], ["b", "y"]])
    wrapped = "four four four four four four four\n      four four four"
    assert screen.getvalue() == f"name  a\ntext  {wrapped}\n\nname  b\ntext  y\n"
    assert max(map(len, screen.getvalue().splitlines())) <= 40


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize(
    "words", [("systems",), ("run", "gen:banded?rows=40&bandwidth=2", "-n", "8", "--repeats", "1")]
)
def test_tables_of_commands_fit_the_terminal(monkeypatch, words, width, environment):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    environment(COLUMNS=width)
    assert main(list(words)) == 0
    lines = screen.getvalue().splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= width


def test_cells_are_not_read_as_markup(capsys):
    print_table(("name",), [["[bold]kernel[kVec=4][/bold]"]])
    assert "[bold]kernel[kVec=4][/bold]" in capsys.readouterr().out


def test_json_has_no_word_for_infinity(capsys):
    print_json({"a": [float("inf"), 1.5], "b": (float("nan"),)})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": [None]}


def test_progress_is_silent_where_stderr_is_no_terminal(capsys):
    with progress_bar("working", 3) as step, activity("thinking"):
        step()
    written = capsys.readouterr()
    assert written.out == "" and written.err == ""


def test_progress_is_drawn_on_a_terminal(monkeypatch, environment):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    environment(TERM="xterm")
    with progress_bar("working", 3) as step:
        step()
    assert "working" in screen.getvalue()
