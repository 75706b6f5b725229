"""The tutorial's commands and lines run in a fresh environment and print what the page shows."""

from __future__ import annotations

import doctest
from pathlib import Path

from tests.docs.newcomer import PAGE, follow
from tests.docs.pages import blocks

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def test_every_command_and_every_line_runs_within_ten_minutes(tmp_path: Path):
    steps, installed = follow(tmp_path)
    assert installed.is_relative_to(tmp_path / "venv"), "the installed one ran"
    found = blocks(PAGE, "python", "text")
    code = sum(block.kind == "python" for block in found)
    *commands, (*parts, own) = [*steps[: -code - 1], steps[-code - 1 :]]
    assert [step.title.split()[0] for step in commands] == ["python3", ".", "pip", "sparsetile"]
    assert own.title.startswith("sparsetile run mine.npz") and "scipy" in own.printed
    assert "Successfully installed sparsetile" in commands[2].printed
    assert all(step.seconds >= 0 for step in steps)
    assert sum(step.seconds for step in steps) < 600  # as its title says

    shown, last = iter(parts), ""
    for block in found:
        if block.kind == "python":
            assert not last, f"the page does not show {last!r}"
            last = next(shown).printed
            continue
        assert doctest.OutputChecker().check_output(block.text, last, FLAGS), (
            f"line {block.line} shows\n{block.text}\nbut it prints\n{last}"
        )
        last = ""
    assert not last
    assert "5. Save the plan" in {step.title for step in parts}
