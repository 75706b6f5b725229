"""How commands end: closed streams, readers that leave, names that are no text or name nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import scipy.io
import scipy.sparse as sp

from sparsetile.cli.console import printable
from sparsetile.data.generators import banded
from sparsetile.intake import write_npz
from tests.cli.conftest import Cli, assert_refused

# Imports take most of a command's time: one process imports, and each command runs in a fork of it,
# whose streams are given as a shell would.
SCRIPT = """
import contextlib, json, os, sys
import matplotlib.figure, scipy.io
import sparsetile.core.numba_cache, sparsetile.dist
from sparsetile.cli import main
with contextlib.redirect_stdout(None):
    main(["--version"])  # imports what parses words
from sparsetile_command import main as begun
for line in sys.stdin:
    words, stdout, stderr = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, how in ((1, stdout), (2, stderr)):
            if how == "closed":
                os.close(number)
                setattr(sys, {1: "stdout", 2: "stderr"}[number], None)
            elif how == "gone":
                read, write = os.pipe()
                os.close(read)
                os.dup2(write, number)
            else:
                os.dup2(os.open(how, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["sparsetile", *(os.fsdecode(bytes(word)) for word in words)]
        code = begun()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Shell:
    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._folder = process, folder

    def __call__(
        self, *words: str | bytes, out: str = "file", err: str = "file"
    ) -> tuple[int, bytes, bytes]:
        """Run a command; return its exit code and the bytes it wrote to files."""
        files = [self._folder / "out", self._folder / "err"]
        for file in files:
            file.write_bytes(b"")
        named = [str(f) if how == "file" else how for f, how in zip(files, (out, err), strict=True)]
        line = json.dumps([[list(os.fsencode(word)) for word in words], *named])
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, files[0].read_bytes(), files[1].read_bytes()


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shell")
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder,
        env={**os.environ, "PYTHONUTF8": "1"},
    ) as process:  # fmt: skip
        yield Shell(process, folder)
        assert process.stdin is not None
        process.stdin.close()


GRAPH = "gen:banded?rows=40&bandwidth=2"
COMMANDS = {
    "version": ["--version"],
    "help": ["--help"],
    "systems": ["systems"],
    "json": ["systems", "--json"],
    # -q: its kernel may have to be compiled.
    "run": ["-q", "run", GRAPH, "-n", "4", "--device", "cpu", "--repeats", "1"],
    "inspect": ["inspect", GRAPH],
    "list": ["bench", "--list"],
}


@pytest.mark.parametrize("how", ["closed", "gone"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_whose_output_nobody_reads_ends_quietly(shell, command, how):
    assert shell(*COMMANDS[command], out=how) == (0, b"", b"")


@pytest.mark.parametrize("how", ["closed", "gone"])
@pytest.mark.parametrize("command", ["run", "help"])
def test_nor_do_closed_errors_change_what_is_printed(shell, command, how):
    words = (
        COMMANDS[command] if command == "help" else ["data", "generate", GRAPH, "--out", "a.npz"]
    )
    code, out, _ = shell(*words, err=how)
    assert code == 0 and out == shell(*words)[1] != b""


@pytest.mark.parametrize("how", ["closed", "gone"])
def test_an_error_that_nobody_reads_keeps_its_exit_code(shell, how):
    assert shell("run", "nowhere.mtx", err=how) == (2, b"", b"")
    assert shell("run", "nowhere.mtx", out=how)[0] == 2


@pytest.mark.parametrize("word", ["systems", "--version", "--help"])
def test_a_full_disk_is_one_line(shell, word):
    code, _, err = shell(word, out="/dev/full")
    assert (code, err) == (2, b"sparsetile: error: [Errno 28] No space left on device\n")


# -- names that are no text ---------------------------------------------------------------------

NAME = b"n\xff\xc3\xa9"  # no UTF-8, and then an é that is


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> bytes:
    """A folder with a name that is no text, and matrices in it."""
    folder = os.path.join(os.fsencode(tmp_path_factory.mktemp("odd")), NAME)
    os.mkdir(folder)
    write_npz(os.fsdecode(os.path.join(folder, NAME + b".npz")), banded(40, 2))
    plain = Path(os.fsdecode(folder), "plain.mtx")
    scipy.io.mmwrite(plain.parent.parent / "plain.mtx", sp.eye_array(5))
    os.rename(plain.parent.parent / "plain.mtx", os.path.join(folder, NAME + b".mtx"))
    with open(os.path.join(folder, NAME + b".broken.mtx"), "w") as stream:
        stream.write("no matrix")
    return folder


@pytest.mark.parametrize("ending", [b".npz", b".mtx"])
@pytest.mark.parametrize("command", ["run", "inspect", "plan", "partition"])
def test_a_file_may_have_any_name(shell, odd, command, ending, tmp_path):
    path = os.path.join(odd, NAME + ending)
    more = {
        "run": ["-n", "4", "--device", "cpu", "--repeats", "1"],
        "inspect": [],
        "plan": [
            "-n",
            "4",
            "--device",
            "cpu",
            "--out",
            os.fsencode(tmp_path) + b"/\xff.safetensors",
        ],
        "partition": ["--parts", "2", "--out", os.fsencode(tmp_path) + b"/\xff"],
    }[command]
    code, out, err = shell(command, path, *more)
    assert code == 0 and b"Traceback" not in err, err
    assert out
    if command == "inspect":
        assert NAME in out, "the bytes of the name"


def test_a_name_that_is_printed_can_be_used(shell, tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.npz"
    code, out, _ = shell("data", "generate", GRAPH, "--out", path)
    assert code == 0 and out.strip() == path and os.path.exists(out.strip())


@pytest.mark.parametrize("ending", [b".broken.mtx", b".nowhere.mtx"])
def test_an_error_names_the_file_on_one_line(shell, odd, ending):
    code, out, err = shell("run", os.path.join(odd, NAME + ending))
    assert (code, out) == (2, b"") and err.startswith(b"sparsetile: error: ")
    assert err.count(b"\n") == 1 and (NAME in err or b"n\\udcff" in err)


def test_a_picture_may_have_any_name(shell, odd, tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.png"
    code, _, err = shell("inspect", os.path.join(odd, NAME + b".npz"), "--png", path)
    assert code == 0 and os.path.getsize(path), err


def test_what_is_no_text_is_replaced_and_the_rest_is_kept():
    assert printable(os.fsdecode(NAME)) == "n\N{REPLACEMENT CHARACTER}é"
    assert printable("2 × 3") == "2 × 3"
    assert printable("lone \ud800") == "lone \N{REPLACEMENT CHARACTER}"


# -- names and numbers of nothing ---------------------------------------------------------------


def test_a_suite_that_does_not_exist_is_one_line_with_all_that_do(cli: Cli):
    listed = [line.split()[0] for line in cli("bench", "--list").out.splitlines()]
    assert {"cpu", "core"} <= set(listed)
    for name in ("CPU", "cpus", "cpu/", "../cpu", ""):
        outcome = cli("bench", name)
        assert_refused(outcome, "bench: suite must be one of [", f"got {name!r}.")
        assert all(f"'{suite}'" in outcome.err for suite in listed)
    nothing = cli("bench")
    assert_refused(nothing, "bench: SUITE must be one of [", "got nothing. Name a suite.")
    assert all(f"'{suite}'" in nothing.err for suite in listed)


def test_a_suite_without_its_matrices_says_where_to_name_them(cli: Cli):
    assert_refused(
        cli("bench", "cpu"), "bench: suite cpu must be runnable here, got nothing to measure.",
        "neither in the data folder nor a stand-in", "Give --data the folder",
    )  # fmt: skip


def test_more_parts_than_rows_are_one_line(cli: Cli, tmp_path):
    out = tmp_path / "parts"
    assert_refused(
        cli("partition", GRAPH, "--parts", 10**9, "--out", out),
        "partition: --parts must be from 1 to 40, the rows of A, got 1000000000. Ask for fewer",
    )
    assert not out.exists()
