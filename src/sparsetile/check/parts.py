"""Digests by part: a change of one system's code leaves the proofs of the others as they are.

A part is a system that runs on GPUs, with every file that it uses, or ``shared``: what code outside
the systems' folders uses, and the system that is exact on GPUs, which repairs the products of
others. A file that two systems use is in the parts of both. Files are found by following imports,
includes and the names of kernels from the systems' folders, so there is no list to edit. What
nobody is seen to use is shared; a system that runs on the CPU alone is in no part.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sparsetile.check.digest import PACKAGE, code_digest, code_files, digest_of, strip_python

__all__ = ["SHARED", "Sources", "changed_parts", "part_digests", "part_files"]

SHARED = "shared"
# Folder of the systems, each a folder in it that registers itself.
SYSTEMS_FOLDER = "systems"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
# What classes of systems say of themselves; whatever is not plainly the CPU may be a GPU.
_SAID = re.compile(r"^ +(devices|exact_on)\b[^=\n]*=\s*(.*)$", re.MULTILINE)
_ON_CPU = ("()", '("cpu",)')


@functools.lru_cache(maxsize=2048)
def _asked(text: str) -> tuple[set[tuple[int, str]], set[str], set[str], set[str]]:
    """Return what Python source names: modules with the level of the import, kernels, systems,
    and what may be a kernel in a folder of its own."""
    modules: set[tuple[int, str]] = set()
    kernels, systems, nearby = set[str](), set[str](), set[str]()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                modules |= {(0, name.name) for name in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                modules |= {(level, f"{module or ''}.{name.name}".strip(".")) for name in names}
            case ast.keyword(arg="name", value=ast.Constant(value=str(name))):
                kernels.add(f"{name}.cu")
            case ast.Call(args=[ast.Constant(value=str(name)), *_]):
                nearby.add(f"{name}.cu")
            case ast.Subscript(value=ast.Name(id="SYSTEMS"), slice=ast.Constant(value=str(name))):
                systems.add(name)
            case ast.Constant(value=str(name)) if name.endswith((".cu", ".cuh")):
                kernels.add(name)
    return modules, kernels, systems, nearby


class Sources:
    """Files of a package and which of them each one names.

    Parameters
    ----------
    package : Path
        Folder of the package.
    beside : Path, optional
        A folder of Python code that uses the package, such as the tests.
    """

    def __init__(self, package: Path, beside: Path | None = None) -> None:
        self.package = package
        self._tops = {package.name: package, **({beside.name: beside} if beside else {})}
        self._named: dict[Path, set[Path]] = {}
        self._module = functools.cache(self._find_module)
        self._device = {
            path.name: path
            for top in self._tops.values()
            for path in (*top.rglob("*.cu"), *top.rglob("*.cuh"))
        }

    def _find_module(self, name: str) -> Path | None:
        """Return the file of a module, or of the module that holds the name."""
        top, *rest = name.split(".")
        if top not in self._tops:
            return None
        for words in (rest, rest[:-1]):
            base = self._tops[top].joinpath(*words)
            for path in (base.with_suffix(".py"), base / "__init__.py"):
                if path.is_file():
                    return path
        return None

    def named(self, path: Path) -> set[Path]:
        """Return the files that one names: imports, includes, kernels."""
        if path not in self._named:
            self._named[path] = self._look_up(path)
        return self._named[path]

    def _look_up(self, path: Path) -> set[Path]:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".py":
            found = {self._device.get(Path(name).name) for name in _INCLUDE.findall(text)}
            return {each for each in found if each is not None}
        modules, kernels, systems, nearby = _asked(text)
        top = next(folder for folder in self._tops.values() if path.is_relative_to(folder))
        names = set()
        for level, name in modules:
            place = [top.name, *path.relative_to(top).parts]
            names.add(".".join([*place[:-level], name]) if level else name)
        names |= {f"{self.package.name}.{SYSTEMS_FOLDER}.{name}.system" for name in systems}
        found = {self._module(name) for name in names}
        near = (self._device[name] for name in nearby & self._device.keys())
        found |= {each for each in near if each.is_relative_to(path.parent)}
        return {each for each in (*found, *map(self._device.get, kernels)) if each is not None}

    def reach(self, roots: Iterable[Path], within: Iterable[Path]) -> set[Path]:
        """Return the roots and all files that are reached from them through ``within``."""
        left, found, within = list(roots), set(), set(within)
        while left:
            path = left.pop()
            if path not in found:
                found.add(path)
                left += self.named(path) & within
        return found


def part_files(package: Path = PACKAGE) -> dict[str, set[Path]]:
    """Return the files of each part by its name.

    Parameters
    ----------
    package : Path
        Folder of the package; this one by default.
    """
    sources, covered = Sources(package), set(code_files(package))
    used: dict[str, set[Path]] = {}
    inside: set[Path] = set()
    exact: set[Path] = set()
    for path in sorted(covered):
        folder = path.parent
        registers = path.name == "__init__.py" and "register(" in strip_python(path.read_text())
        if folder.parent != package / SYSTEMS_FOLDER or not registers:
            continue
        own = {each for each in covered if each.is_relative_to(folder)}
        reached, inside = sources.reach(own, covered), inside | own
        said = {
            (name, value, each)
            for each in own
            if each.suffix == ".py"
            for name, value in _SAID.findall(strip_python(each.read_text(encoding="utf-8")))
        }
        on_cpu = {value for name, value, _ in said if name == "devices"} == {_ON_CPU[1]}
        if not on_cpu or any(each.suffix != ".py" for each in reached):
            used[folder.name] = reached
        exact |= {p for name, value, p in said if name == "exact_on" and value not in _ON_CPU}
    outside = covered - inside
    exact = sources.reach(exact, covered)
    seen = set().union(*used.values())
    shared = exact | sources.reach((outside - seen) | (exact & outside), outside)
    return {SHARED: shared, **{name: files - shared for name, files in used.items()}}


def part_digests(package: Path = PACKAGE) -> dict[str, str]:
    """Return SHA-256 over names and code of each part's files, by the part's name.

    Parameters
    ----------
    package : Path
        Folder of the package; this one by default.
    """
    return {name: digest_of(files, package) for name, files in part_files(package).items()}


def changed_parts(record: Mapping[str, Any]) -> list[str]:
    """Return the parts whose code is not what a record was made with; empty for today's code.

    Records from before there were parts have one digest of everything: which part is not known.
    """
    if "parts" not in record:
        return [] if record.get("code_digest") == code_digest() else ["some part"]
    held, today = record["parts"], part_digests()
    return [name for name in today if not isinstance(held, dict) or held.get(name) != today[name]]
