"""What a process does to run a mutant, or to say which lines each test runs. It needs Python alone.

``tools/host_runner.py`` calls :func:`install` in the process that runs pytest. Processes that tests
start find a copy of this file on their path, called ``sitecustomize``: Python imports it first.

``MUTANT_CODE`` is a file with a module's name in its first line and its code after it, as
:mod:`marshal` writes it. Python's import of that module takes this code. ``MUTANT_LINES`` is a
folder with the names of files, the number of the test that runs now, and ``lines``, to which every
process appends each line of those files that it runs, once a test.
"""

from __future__ import annotations

import importlib.machinery
import json
import marshal
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

CODE, LINES = "MUTANT_CODE", "MUTANT_LINES"
# Number of the test, of the file, of the line.
RECORD = struct.Struct("<IHH")


class _Loader(importlib.machinery.SourceFileLoader):
    code: CodeType

    def get_code(self, fullname: str) -> CodeType:
        return self.code


class _Finder:
    """Finds one module where it is, and lets its code be another."""

    def __init__(self, path: str) -> None:
        name, _, code = Path(path).read_bytes().partition(b"\n")
        self._name, self._code = name.decode(), marshal.loads(code)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
            spec.loader.code = self._code
        return spec


def _trace(folder: Path) -> None:
    """Append the lines that run from now on, in threads and forked processes too."""
    files = {name: k for k, name in enumerate(json.loads((folder / "files.json").read_text()))}
    with (folder / "test").open("r+b") as file:
        test = mmap.mmap(file.fileno(), 4)
    out = os.open(folder / "lines", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    seen: list[set[int]] = [set() for _ in files]
    now = b""

    def local(number: int) -> Callable[[FrameType, str, Any], Any]:
        lines = seen[number]

        def ran(frame: FrameType, event: str, value: Any) -> Any:
            if (line := frame.f_lineno) not in lines:
                lines.add(line)
                os.write(out, now + struct.pack("<HH", number, line))
            return ran

        return ran

    locals_ = [local(number) for number in range(len(files))]

    def called(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal now
        number = files.get(frame.f_code.co_filename)
        if number is None:
            return None
        if test[:4] != now:
            now = test[:4]
            for each in seen:
                each.clear()
        return locals_[number](frame, event, value)

    threading.settrace(called)
    sys.settrace(called)


def install() -> None:
    """Do what the environment asks for."""
    if path := os.environ.get(CODE):
        sys.meta_path.insert(0, _Finder(path))  # type: ignore[arg-type]
    if folder := os.environ.get(LINES):
        _trace(Path(folder))


if __name__ == "sitecustomize":
    install()
