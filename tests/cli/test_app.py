"""The frame around the commands: help, errors, exit codes, streams."""

from __future__ import annotations

import io
import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import sparsetile
from sparsetile.cli import app as app_module
from sparsetile.cli import main
from sparsetile.cli import systems as systems_module
from sparsetile.cli.console import print_text
from sparsetile.core.errors import CompileError
from tests.cli.conftest import Cli, assert_refused

COMMANDS = ("run", "doctor", "systems", "inspect", "plan", "compile", "verify", "cache", "data")


def test_the_version_goes_to_stdout(cli: Cli):
    outcome = cli("--version")
    assert (outcome.code, outcome.out.strip(), outcome.err) == (0, sparsetile.__version__, "")


def test_help_names_every_command_on_stdout(cli: Cli):
    outcome = cli("--help")
    assert outcome.code == 0 and outcome.err == ""
    for name in COMMANDS:
        assert name in outcome.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(cli: Cli, name: str):
    outcome = cli(name, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"Usage: sparsetile {name}")


def test_no_command_is_bad_usage_with_help_on_stderr(cli: Cli):
    outcome = cli()
    assert outcome.code == 2 and outcome.out == ""
    assert "Usage: sparsetile" in outcome.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("frobnicate",), "No such command 'frobnicate'. Try `sparsetile --help`."),
        (("data",), "Missing command. Try `sparsetile data --help`."),
        (("run",), "Missing argument 'MATRIX'. Try `sparsetile run --help`."),
        (("run", "x", "--frob"), "No such option: --frob. Try `sparsetile run --help`."),
        (("run", "x", "-n", "many"), "run: -n must be whole numbers above 0"),
        (("run", "x", "-n", "0"), "run: -n must be whole numbers above 0"),
    ],
)
def test_bad_words_are_one_line_and_exit_code_2(cli: Cli, words: tuple[str, ...], text: str):
    assert_refused(cli(*words), text)


def fail_with(monkeypatch, error: BaseException) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(systems_module.sparsetile, "systems", broken)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plan: n must be small.\n  csr: too wide\n  dense: too large"),
        TypeError("plan: n must be small.\n  csr: too wide\n  dense: too large"),
        FileNotFoundError("plan: n must be small.\n  csr: too wide\n  dense: too large"),
        sparsetile.DataError("plan: n must be small.\n  csr: too wide\n  dense: too large"),
        sparsetile.UnsupportedError("plan: n must be small.\n  csr: too wide\n  dense: too large"),
    ],
)
def test_an_error_of_the_library_is_one_line_with_its_reasons(cli: Cli, monkeypatch, error):
    fail_with(monkeypatch, error)
    assert_refused(cli("systems"), "plan: n must be small. csr: too wide; dense: too large")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 TB"),
        RuntimeError("CUDA out of memory. Tried to allocate 9 TiB"),
    ],
)
def test_too_little_memory_is_one_line(cli: Cli, monkeypatch, error):
    fail_with(monkeypatch, error)
    assert_refused(cli("systems"), "not enough memory here")


def test_an_unforeseen_error_is_exit_code_1_and_names_its_kind_without_traceback(cli, monkeypatch):
    fail_with(monkeypatch, RuntimeError("the wheels came off"))
    outcome = cli("systems")
    assert outcome.code == 1 and outcome.out == ""
    assert "sparsetile: error: RuntimeError: the wheels came off" in outcome.err
    assert "Traceback" not in outcome.err and "--traceback" in outcome.err


def test_a_traceback_is_shown_when_asked_for(cli: Cli, monkeypatch):
    fail_with(monkeypatch, RuntimeError("the wheels came off"))
    outcome = cli("--traceback", "systems")
    assert outcome.code == 1
    assert "Traceback (most recent call last)" in outcome.err
    # The option holds for one call only.
    assert "Traceback" not in cli("systems").err


def test_a_kernel_that_does_not_compile_is_a_failed_check_with_the_log(cli: Cli, monkeypatch):
    fail_with(monkeypatch, CompileError("compile: k must compile, got an error.\nline 3: oops"))
    outcome = cli("systems")
    assert outcome.code == 1
    assert "line 3: oops" in outcome.err


def test_an_interrupt_ends_quietly(cli: Cli, monkeypatch):
    fail_with(monkeypatch, KeyboardInterrupt())
    outcome = cli("systems")
    assert outcome.code == 130
    assert "Traceback" not in outcome.err


def test_log_lines_go_to_stderr_unless_quiet(cli: Cli, monkeypatch):
    log = logging.getLogger("sparsetile")

    def talk() -> list[dict[str, object]]:
        log.info("compiling something")
        return []

    monkeypatch.setattr(systems_module.sparsetile, "systems", talk)
    loud, quiet = cli("systems", "--json"), cli("--quiet", "systems", "--json")
    assert loud.json == quiet.json == []
    assert loud.err == "sparsetile: compiling something\n" and quiet.err == ""
    assert not [handler for handler in log.handlers if isinstance(handler, app_module._Lines)]


@pytest.mark.parametrize("module", ["sparsetile", "sparsetile.cli"])
def test_both_ways_to_start_it_as_a_module_work(module: str, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == sparsetile.__version__


def test_a_reader_that_leaves_early_is_no_error():
    source = str(Path(sparsetile.__file__).resolve().parents[1])
    with subprocess.Popen(
        [sys.executable, "-m", "sparsetile", "systems"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=120) == 0
        assert process.stderr.read() == b""


def test_a_terminal_without_the_characters_is_no_error(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["systems"]) == 0
    assert b"csr" in raw.getvalue()
    print_text("2 × 3 µs")
    assert raw.getvalue().endswith(b"2 ? 3 ?s\n")
