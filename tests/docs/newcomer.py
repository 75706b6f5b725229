"""The tutorial as a newcomer follows it: a fresh environment, every command, every line, timed.

    python -m tests.docs.newcomer

prints the seconds of each step. What the package depends on is lent by this environment, so that
nothing is downloaded: the time to download torch is not in it. The package itself is not lent: it
is installed by the tutorial's own command, from a copy of the source tree. Caches are empty. With
``--download`` nothing is lent: pip gets torch and the others from the index that it is set to.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import DOCS, Block, blocks
from tests.examples import ROOT

__all__ = ["PAGE", "Step", "follow"]

PAGE = DOCS / "tutorial" / "index.md"
MARK = "-- end of a step --"
_MARKED = re.compile(rf"^{MARK} (\d+\.\d+)\n", re.M)
# Run by the fresh environment's Python: links every package of a folder but sparsetile. A pip of
# its own stays; a setuptools of its own (Python 3.11 brings an old one) gives way.
LEND = """
import pathlib, shutil, site, sys
own = pathlib.Path(site.getsitepackages()[0])
for entry in own.iterdir():
    if not entry.name.startswith("pip"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
for entry in pathlib.Path(sys.argv[1]).iterdir():
    if "sparsetile" not in entry.name and entry.suffix != ".pth":
        if not (own / entry.name).exists():
            (own / entry.name).symlink_to(entry)
pip = pathlib.Path(sys.executable).with_name("pip")
if not pip.exists():
    pip.write_text(f"#!{sys.executable}\\nfrom pip._internal.cli.main import main\\nmain()\\n")
    pip.chmod(0o755)
"""
# Python that leaves pip out of new environments: unpacking and compiling it takes seconds.
WITHOUT_PIP = """#!/bin/sh
[ "$1 $2" = "-m venv" ] && set -- "$@" --without-pip
exec '{python}' "$@"
"""


@dataclass(frozen=True)
class Step:
    """A command or a Python block: what it is, its seconds, and what it printed."""

    title: str
    seconds: float
    printed: str


def _copy_tree(folder: Path) -> None:
    """Copy what an installation needs, so that nothing is built in the source tree."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignore)


def _commands() -> tuple[list[str], list[str]]:
    """Return the commands of the page: those before its Python blocks, and those after them."""
    code = [block.line for block in blocks(PAGE, "python")]
    before, after = list[str](), list[str]()
    for block in blocks(PAGE, "console"):
        lines = block.text.splitlines()
        assert all(line.startswith("$ ") for line in lines)
        assert not code[0] < block.line < code[-1], "commands amid the Python blocks"
        (before if block.line < code[0] else after).extend(line[2:] for line in lines)
    return before, after


def _heading(block: Block) -> str:
    """Return the heading that a block of the page stands under."""
    above = PAGE.read_text(encoding="utf-8").splitlines()[: block.line]
    return next(line[3:] for line in reversed(above) if line.startswith("## "))


def follow(
    home: Path, *, empty_caches: bool = False, download: bool = False
) -> tuple[list[Step], Path]:
    """Run the page's commands and Python blocks in its order, in a shell.

    Parameters
    ----------
    home : Path
        An empty folder, which gets the environment and all files.
    empty_caches : bool
        Whether compiled code is kept in that folder too, as on a machine that never ran it, and
        pip is the fresh environment's own.
    download : bool
        Whether pip gets what the package depends on from its index. Otherwise it is lent.

    Returns
    -------
    steps, path
        Each command and block, and the file of the package that ran.
    """
    _copy_tree(home / "sparsetile")
    mark = f"__import__('builtins').print({MARK!r}, __import__('time').time(), flush=True)\n"
    code = blocks(PAGE, "python")
    body = "".join(block.text + mark for block in code)
    body += "__import__('pathlib').Path('installed').write_text(st.__file__)\n"
    (home / "tutorial.py").write_text(body, encoding="utf-8")
    (home / "lend.py").write_text(LEND, encoding="utf-8")
    (home / "bin").mkdir()
    python = home / "bin" / "python3"
    if empty_caches:
        python.symlink_to(sys.executable)
    else:
        python.write_text(WITHOUT_PIP.format(python=sys.executable))
        python.chmod(0o755)
    (make, activate, install, *others), after = _commands()
    lend = ":" if download else f"python lend.py '{site.getsitepackages()[0]}'"
    shown = [make, activate, "", install, *others]
    ran = [make, activate, lend, install, *others]
    now = f"echo '{MARK}' $(date +%s.%N)"
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # as pip reads it: no isolation, setuptools is lent
    }
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        **({} if download else offline),
        **({"XDG_CACHE_HOME": str(home / "cache")} if empty_caches else {}),
    }
    before, later = ("".join(f"{line}\n{now}\n" for line in lines) for lines in (ran, after))
    shell = f"set -e\n{now}\n{before}python -W ignore tutorial.py\n{later}"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=home, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, began, *pieces, _ = _MARKED.split(done.stdout)
    titles = [*shown, *(_heading(block) for block in code), *after]
    ends = [float(end) for end in pieces[1::2]]
    spent = [end - begin for begin, end in zip([float(began), *ends], ends, strict=False)]
    steps = [
        Step(title, seconds, printed)
        for title, seconds, printed in zip(titles, spent, pieces[::2], strict=True)
        if title  # lending is no step of the tutorial
    ]
    return steps, Path((home / "installed").read_text(encoding="utf-8"))


def main() -> None:
    """Print the seconds of each step of the tutorial."""
    parser = argparse.ArgumentParser(description="Follow the tutorial; print each step's seconds.")
    parser.add_argument("--download", action="store_true", help="install what it needs, too")
    download = parser.parse_args().download
    with tempfile.TemporaryDirectory() as home:
        steps, _ = follow(Path(home), empty_caches=True, download=download)
    for step in steps:
        print(f"{step.seconds:7.1f} s  {step.title}")
    print(f"{sum(step.seconds for step in steps):7.1f} s  in all")


if __name__ == "__main__":
    main()
