"""Help and lists without torch: their texts are those of the command line.

``python -m tests.cli.test_quick_help`` writes them again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest import mock

import click
import pytest
import typer
from typer.testing import CliRunner

import sparsetile
import sparsetile_command
from sparsetile.cli.app import app
from sparsetile_command import HELP_WIDTH, quick_help
from sparsetile_command.fetch import fetch_quickly
from sparsetile_command.matrices import list_quickly
from sparsetile_command.systems import quick_systems

STORED = Path(sparsetile_command.__file__).with_name("help.txt")
SYSTEMS = STORED.with_name("systems.json")


def _commands(command: click.Command, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words before --help: of the program, its commands, and theirs."""
    inner = getattr(command, "commands", {})
    return [words, *(each for name in inner for each in _commands(inner[name], (*words, name)))]


COMMANDS = _commands(typer.main.get_command(app))


def _help(words: tuple[str, ...]) -> str:
    with mock.patch.dict(os.environ, {"COLUMNS": str(HELP_WIDTH)}):
        outcome = CliRunner().invoke(app, [*words, "--help"], prog_name="sparsetile")
    assert outcome.exit_code == 0
    return outcome.stdout.rstrip()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_stored_help_is_what_the_command_line_prints(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(HELP_WIDTH))
    assert quick_help([*words, "--help"]) == quick_help([*words, "-h"]) == _help(words), (
        "run python -m tests.cli.test_quick_help"
    )


def test_other_words_and_narrow_terminals_are_left_to_the_command_line(monkeypatch):
    assert not any(quick_help(words) for words in ([], ["run"], ["odd", "-h"], ["-h", "run"]))
    monkeypatch.setenv("COLUMNS", str(HELP_WIDTH - 1))
    assert quick_help(["--help"]) == ""


@pytest.mark.parametrize("words", [["systems"], ["systems", "--json"]], ids=" ".join)
def test_stored_systems_are_those_of_the_package(words, cli):
    stored = json.loads(SYSTEMS.read_text(encoding="utf-8"))
    assert stored == sparsetile.systems(), "run python -m tests.cli.test_quick_help"
    outcome = cli(*words)
    assert outcome.code == 0 and quick_systems(words) == outcome.out.rstrip("\n")
    assert not quick_systems(["systems", "x"]) and not quick_systems(["run"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "HB").mkdir()
    (tmp_path / "HB" / "a.mtx").write_text(
        "%%MatrixMarket matrix coordinate real general\n3 4 1\n1 1 2.5\n"
    )
    (tmp_path / "b.npz").write_text("not an archive")
    return tmp_path


@pytest.mark.parametrize(
    "words", [["--data", "DIR"], ["--json", "--data", "DIR"], ["--data=DIR"], []], ids=" ".join
)
def test_listing_without_the_package_prints_the_same(words, folder, cli, capsys, monkeypatch):
    monkeypatch.setenv("SPARSETILE_DATA_DIR", str(folder))
    words = ["data", "list", *(word.replace("DIR", str(folder)) for word in words)]
    monkeypatch.setattr(sys, "argv", ["sparsetile", *words])
    assert sparsetile_command.main() == 0
    listed = capsys.readouterr()
    assert "HB/a" in listed.out and "File is not a zip file" in listed.out
    outcome = cli(*words)
    assert (outcome.code, outcome.out, outcome.err) == (0, listed.out, listed.err)


@pytest.mark.parametrize("words", ["--data no-such", "--data", "--more", "a", "--data x --help"])
def test_listing_leaves_wrong_words_to_the_command_line(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not list_quickly(["data", "list", *words.split()])
    assert not list_quickly(["data", "fetch"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_listing_on_a_full_disk_says_so(folder, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["sparsetile", "data", "list", "--data", str(folder)])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert sparsetile_command.main() == 2
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert "sparsetile: error: [Errno 28]" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "start"),
    [
        ("run -h", "Usage: sparsetile run [OPTIONS] "),
        ("systems", "system "),
        ("systems --json", "["),
        ("data list --json", "["),
    ],
)
def test_help_and_lists_import_neither_torch_nor_the_package(words, start, folder):
    code = (
        f"import sys; sys.argv = ['sparsetile', *{words.split()}]; import sparsetile_command as c; "
        "assert c.main() == 0; assert not {'torch', 'sparsetile', 'typer'} & set(sys.modules)"
    )
    env = os.environ | {"COLUMNS": "80", "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {"SPARSETILE_DATA_DIR": str(folder)}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(start)


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out like the SuiteSparse site, with the matrix HB/tiny."""
    root = tmp_path_factory.mktemp("mirror")
    (root / "MM" / "HB").mkdir(parents=True)
    text = b"%%MatrixMarket matrix coordinate real general\n3 2 2\n1 1 1.5\n3 2 -2\n"
    with tarfile.open(root / "MM" / "HB" / "tiny.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("tiny/tiny.mtx")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return root


FETCHES = {
    "one": ["HB/tiny", "--base-url", "MIRROR"],
    "into a folder": ["--data=DIR", "HB/tiny", "--force", "--base-url=MIRROR"],
    "not there": ["HB/none", "--base-url", "MIRROR"],
    "no name": ["tiny"],
}


@pytest.mark.parametrize("words", FETCHES.values(), ids=FETCHES)
def test_fetching_without_the_package_prints_the_same(words, mirror, tmp_path, cli, monkeypatch):
    monkeypatch.setenv("SPARSETILE_DATA_DIR", str(tmp_path))
    places = {"MIRROR": str(mirror), "DIR": str(tmp_path)}
    for short, place in places.items():
        words = [word.replace(short, place) for word in words]
    code = (
        f"import sys; sys.argv = ['sparsetile', 'data', 'fetch', *{words}]; "
        "import sparsetile_command as c; code = c.main(); "
        "assert not {'torch', 'sparsetile', 'typer'} & set(sys.modules); sys.exit(code)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    outcome = cli("data", "fetch", *words)
    assert (made.returncode, made.stdout, made.stderr) == (outcome.code, outcome.out, outcome.err)
    assert made.returncode == (2 if "none" in words[0] or words == ["tiny"] else 0)


@pytest.mark.parametrize("words", ["a b", "--suite core", "--data", "HB/a --more", "", "a=b"])
def test_fetching_leaves_other_words_to_the_command_line(words):
    assert fetch_quickly(["data", "fetch", *words.split()]) is None
    assert fetch_quickly(["data", "list"]) is None


if __name__ == "__main__":
    texts = [
        f"{' '.join(['$ sparsetile', *words, '--help'])}\n{_help(words)}\n" for words in COMMANDS
    ]
    STORED.write_text("\n".join(texts), encoding="utf-8")
    SYSTEMS.write_text(json.dumps(sparsetile.systems(), indent=1) + "\n", encoding="utf-8")
