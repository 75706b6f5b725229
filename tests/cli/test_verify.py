"""``sparsetile verify`` and ``report`` hand their options to tools of the checkout."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tools.record import ROOT

from sparsetile.cli import checkout as module
from sparsetile.cli import main
from tests.cli.conftest import Cli, assert_refused


@pytest.fixture
def child(monkeypatch) -> dict[str, Any]:
    """What the child process is started with; it ends with code 1."""
    called: dict[str, Any] = {}

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        called.update(command=command, **options)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(module.subprocess, "run", run)
    return called


def test_every_option_reaches_the_tool_and_its_exit_code_comes_back(
    cli: Cli, child, monkeypatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    outcome = cli("verify", "--out", "there", "-k", "not csr", "--all", "--json")
    assert outcome.code == 1 and child["cwd"] == ROOT
    python, flag, _, *rest = child["command"]
    assert [python, flag] == [sys.executable, "-c"]
    assert rest[:2] == [str(ROOT), str(ROOT / "src")]
    assert rest[2:4] == [f"--out={tmp_path / 'there'}", "-knot csr"]
    assert rest[4:] == ["--all", "--time-limit=120.0", "--json"]


def test_options_that_are_omitted_are_not_handed_on(cli: Cli, child):
    cli("verify", "--checker", "memcheck,synccheck", "--time-limit", 7)
    assert child["command"][5:] == ["--checker=memcheck,synccheck", "--time-limit=7.0"]


def test_files_of_a_report_keep_their_places(cli: Cli, child, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert cli("report", "a.jsonl", "--markdown", "r.md", "--title", "All of it").code == 1
    assert child["cwd"] == ROOT and "tools.report" in child["command"][2]
    assert child["command"][5:] == [
        str(tmp_path / "a.jsonl"), f"--markdown={tmp_path / 'r.md'}", "--title=All of it",
    ]  # fmt: skip


def test_this_checkout_is_found_and_an_installed_package_is_none(monkeypatch, tmp_path: Path):
    assert module.checkout_root() == ROOT
    monkeypatch.setattr(module, "__file__", str(tmp_path / "a" / "b" / "c" / "verify.py"))
    assert module.checkout_root() is None


def test_outside_a_checkout_it_refuses(cli: Cli, monkeypatch):
    monkeypatch.setattr(module, "checkout_root", lambda: None)
    assert_refused(
        cli("verify"), "verify: installation must be a source checkout with its tests", "Clone"
    )


def test_the_tool_really_starts_and_refuses_bad_usage(capfd):
    """Refused before a GPU is looked for, so that every machine gives the same answer."""
    assert main(["verify", "--checker", "memcheck", "-k", "csr"]) == 2
    assert "verify: -k must be omitted with --checker, got 'csr'." in capfd.readouterr().err
