"""The tutorial as a newcomer meets it: install into a fresh environment, then every line.

What the package depends on is lent by this environment, so that nothing is downloaded. The package
itself is not: it is installed by the tutorial's own command, from a copy of the source tree.
"""

from __future__ import annotations

import doctest
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import DOCS, blocks
from tests.examples import ROOT

PAGE = DOCS / "tutorial" / "index.md"
MARK = "-- end of a block --"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Run by the fresh environment's Python: links every package of a folder but sparsetile. pip stays
# its own; a setuptools of its own (Python 3.11 brings an old one) gives way.
LEND = """
import pathlib, shutil, site, sys
own = pathlib.Path(site.getsitepackages()[0])
for entry in own.iterdir():
    if not entry.name.startswith("pip"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
for entry in pathlib.Path(sys.argv[1]).iterdir():
    if "sparsetile" not in entry.name and entry.suffix != ".pth" and entry.name[:3] != "pip":
        (own / entry.name).symlink_to(entry)
"""


def copy_tree(folder: Path) -> None:
    """Copy what an installation needs, so that nothing is built in the source tree."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignore)


def commands() -> list[str]:
    """Return the commands of the page, in order."""
    lines = [line for block in blocks(PAGE, "console") for line in block.text.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return [line.removeprefix("$ ") for line in lines]


def run_tutorial(home: Path, script: str) -> str:
    """Run the page's commands, then its Python lines, in a shell; return what they printed."""
    copy_tree(home / "sparsetile")
    (home / "tutorial.py").write_text(script, encoding="utf-8")
    (home / "lend.py").write_text(LEND, encoding="utf-8")
    (home / "bin").mkdir()
    (home / "bin" / "python3").symlink_to(sys.executable)
    make, activate, *others = commands()
    lend = f"python lend.py '{site.getsitepackages()[0]}'"
    run = f"echo '{MARK}'\npython -W ignore tutorial.py"
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # as pip reads it: no isolation, setuptools is lent
    }
    shell = "\n".join(["set -e", make, activate, lend, *others, run])
    ran = subprocess.run(
        ["bash", "-c", shell], cwd=home, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_every_command_and_every_line_runs(tmp_path: Path):
    found = blocks(PAGE, "python", "text")
    parts = [block.text + f"print({MARK!r})\n" for block in found if block.kind == "python"]
    out = run_tutorial(tmp_path, "".join([*parts, "print(st.__file__)\n"]))
    said, *printed, installed = out.split(f"{MARK}\n")
    assert "Successfully installed sparsetile" in said
    assert Path(installed.strip()).is_relative_to(tmp_path / "venv"), "the installed one ran"

    shown, last = iter(printed), ""
    for block in found:
        if block.kind == "python":
            assert not last, f"the page does not show {last!r}"
            last = next(shown)
            continue
        assert doctest.OutputChecker().check_output(block.text, last, FLAGS), (
            f"line {block.line} shows\n{block.text}\nbut it prints\n{last}"
        )
        last = ""
    assert not last
