"""Ctrl-C in the middle of commands: exit code 130, no traceback, no half-written file.

Importing torch takes most of a command's time, so that one process imports, and each command runs
in a fork of it, a process group of its own, as a terminal would have it. Only compilation, whose
threads a fork does not suit, has a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

import sparsetile as st
from sparsetile.cli import main
from sparsetile.cli.options import write_output
from sparsetile.intake import read_matrix
from tests.cli.conftest import Cli
from tools import verify

GRAPH = "gen:power_law?rows=4e5&nnz=4e6&seed=1"
# A command, and the file that it writes.
COMMANDS = {
    "run": (["run", GRAPH, "-n", "64", "--weighted", "--device", "cpu"], ""),
    "plan": (["plan", GRAPH, "-n", "64", "--device", "cpu", "--out", "p.safetensors"],
             "p.safetensors"),
    "generate": (["data", "generate", GRAPH, "--out", "g.npz"], "g.npz"),
    "partition": (["partition", GRAPH, "--parts", "4", "--out", "parts"], ""),
}  # fmt: skip

# A background job of a shell ignores interrupts, and what it starts inherits that.
AT_A_TERMINAL = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
SCRIPT = (
    AT_A_TERMINAL
    + """
import json, os, signal, sys, time
import typer
from sparsetile.cli import main
import sparsetile.core.numba_cache
folder, tasks = sys.argv[1], json.loads(sys.argv[2])
children = {}
for name, (words, delay) in tasks.items():
    here = os.path.join(folder, name)
    os.mkdir(here)
    begun, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.chdir(here)
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"../{name}.{stream}", os.O_WRONLY | os.O_CREAT), number)
        get_command = typer.main.get_command  # what it calls first once it takes interrupts
        def begin(app):
            os.write(begins, b"1")
            return get_command(app)
        typer.main.get_command = begin
        sys.exit(main(words))
    os.close(begins)
    os.read(begun, 1)
    children[pid] = name, time.monotonic() + delay
sent = time.monotonic()
for pid, (name, at) in sorted(children.items(), key=lambda child: child[1][1]):
    time.sleep(max(0, at - time.monotonic()))
    os.killpg(pid, signal.SIGINT)
while children and time.monotonic() - sent < 40:
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid:
        print(json.dumps([children.pop(pid)[0], os.waitstatus_to_exitcode(status)]), flush=True)
    time.sleep(0.02)
for pid in children:
    os.killpg(pid, signal.SIGKILL)
"""
)


def test_every_command_ends_with_130_and_leaves_no_half_file(tmp_path):
    rng = random.Random(22)
    tasks = {name: (words, rng.uniform(0.03, 0.4)) for name, (words, _) in COMMANDS.items()}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(tasks)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    codes = dict(json.loads(line) for line in ran.stdout.splitlines())
    assert set(codes) == set(COMMANDS), "all end within 40 s"
    for name, (_, written) in COMMANDS.items():
        said = (tmp_path / f"{name}.err").read_text()
        assert "Traceback" not in said, said
        assert codes[name] == 130, (name, codes[name], said)
        left = [path.name for path in (tmp_path / name).iterdir() if path.is_file()]
        assert left in ([], [written]), name
    if (tmp_path / "generate" / "g.npz").exists():
        assert read_matrix(tmp_path / "generate" / "g.npz").nnz > 10**6
    if (tmp_path / "plan" / "p.safetensors").exists():
        assert st.load_plan(tmp_path / "plan" / "p.safetensors").nnz > 10**6


COMPILE = (
    AT_A_TERMINAL
    + """
import os, signal, sys, threading
from sparsetile.cli import main
import typer
get_command = typer.main.get_command  # what it calls first once it takes interrupts
def interrupt_soon(app):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    return get_command(app)
typer.main.get_command = interrupt_soon
sys.exit(main(["compile", "--arch", "sm_90a"]))
"""
)


def test_an_interrupted_compilation_ends_with_what_is_being_compiled(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=100,
        env={**os.environ, "SPARSETILE_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert ran.returncode == 130 and "Traceback" not in ran.stderr, ran.stderr
    assert not list(tmp_path.rglob("*.partial*"))


# Prints a line when the import of a module begins. The command takes interrupts before its first
# import.
IMPORT = (
    AT_A_TERMINAL
    + """
import sys
module = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            print("begun", flush=True)
from sparsetile_command import main
sys.meta_path.insert(0, Finder())
sys.exit(main())
"""
)


@pytest.mark.parametrize("module", ["sparsetile", "torch", "torch.nn", "sparsetile.cli.app"])
def test_an_interrupt_while_torch_is_imported_is_one_line(module):
    words = ["run", GRAPH, "-n", "64", "--device", "cpu"]
    with subprocess.Popen(
        [sys.executable, "-c", IMPORT, module, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=60)
    assert (process.returncode, out, said) == (130, "", "sparsetile: stopped\n")


LOST = (
    AT_A_TERMINAL
    + """
import os, signal, sys
from sparsetile_command import interruptible
sys.path.insert(0, sys.argv[1])
with interruptible():
    import swallows
print("went on")
"""
)


def test_an_interrupt_that_an_imported_module_would_swallow_is_not_lost(tmp_path):
    """cuda.bindings does: a compilation of thousands of kernels went on."""
    (tmp_path / "swallows.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", LOST, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "sparsetile: stopped\n")


def test_main_leaves_the_handler_of_its_caller(cli: Cli):
    before = signal.getsignal(signal.SIGINT)
    assert cli("--version").code == 0
    assert signal.getsignal(signal.SIGINT) is before
    seen = []
    thread = threading.Thread(target=lambda: seen.append(main(["--version"])))
    thread.start()
    thread.join()
    assert seen == [0], "a thread, which may not set handlers"


def test_the_command_starts_with_what_takes_interrupts():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"sparsetile": "sparsetile_command:main"}


def test_an_interrupt_of_verify_s_tool_has_no_traceback(monkeypatch, capsys):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "collect", interrupted)
    assert verify.main([]) == 130
    assert capsys.readouterr().err == "sparsetile: stopped\n"


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    write_output(page, "old")

    def half(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:3].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        write_output(page, "new and longer")
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]


def test_a_picture_that_is_interrupted_leaves_the_old_one(cli: Cli, folder: Path, monkeypatch):
    from sparsetile.cli import inspect as module

    picture = folder / "a.png"
    picture.write_bytes(b"old")

    def half(csr: object, found: object, title: str, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "draw", half, raising=False)
    monkeypatch.setattr("sparsetile.check.pictures.draw", half, raising=False)
    before = sorted(path.name for path in folder.iterdir())
    assert cli("inspect", folder / "band.npz", "--png", picture).code == 130
    assert picture.read_bytes() == b"old"
    assert sorted(path.name for path in folder.iterdir()) == before
