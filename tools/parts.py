"""Digests by part: a change of one system's code leaves the proofs of the others valid.

A part is a system that runs on GPUs, or ``layers``, with every file that it uses, or ``shared``:
what code outside their folders uses, and the system that is exact on GPUs, which repairs the
products of others. A file that two systems use is in both parts. Files are found by following
imports, includes and kernel names from the systems' folders, so there is no list to edit. Files
without a known user are shared; a system that runs only on the CPU is in no part.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tools.digest import PACKAGE, code_digest, code_files, digest_of, strip_python

SHARED, LAYERS = "shared", "layers"
# Packages of host code that the mutation run breaks on the CPU.
HOST_PACKAGES = ("plan", "cache", "nn", "dist", "tune", "pyg", "intake")
# Folder of the systems, each a folder in it.
SYSTEMS_FOLDER = "systems"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
# What a system's `__init__.py` declares; anything but exactly the CPU may be a GPU.
_DECLARED = re.compile(r"^(DEVICES|EXACT_ON)\b[^=\n]*=\s*(.*)$", re.MULTILINE)
_ON_CPU = '("cpu",)'


@functools.lru_cache(maxsize=2048)
def _asked(text: str) -> tuple[set[tuple[int, str]], set[str], set[str], set[str]]:
    """Return the names in Python source: modules with the level of the import, kernels, systems,
    and first arguments of calls, which may be kernels next to the file."""
    modules: set[tuple[int, str]] = set()
    kernels, systems, nearby = set[str](), set[str](), set[str]()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                modules |= {(0, name.name) for name in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                modules |= {(level, f"{module or ''}.{name.name}".strip(".")) for name in names}
            case ast.Call(args=[ast.Constant(value=str(name)), *_]):
                nearby.add(f"{name}.cu")
            case ast.Subscript(value=ast.Name(id="SYSTEMS"), slice=ast.Constant(value=str(name))):
                systems.add(name)
            case ast.Constant(value=str(name)) if name.endswith((".cu", ".cuh")):
                kernels.add(PurePosixPath(name).name)
    return modules, kernels, systems, nearby


class Sources:
    """Files of a package and which of them each one names."""

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
        """Return the file of a module, or of the module that defines the name."""
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
    """Return the files of each part by its name."""
    sources, covered = Sources(package), set(code_files(package))
    used: dict[str, set[Path]] = {}
    inside: set[Path] = set()
    exact: set[Path] = set()
    for path in sorted(each for each in covered if each.name == "__init__.py"):
        folder, facts = path.parent, dict(_DECLARED.findall(strip_python(path.read_text("utf-8"))))
        is_system = folder.parent == package / SYSTEMS_FOLDER
        if not is_system and folder != package / LAYERS:
            continue
        own = {each for each in covered if each.is_relative_to(folder)}
        inside |= own
        # It may still launch kernels: those that it names itself, not those that formats have.
        device_code = any(each.suffix != ".py" for each in own.union(*map(sources.named, own)))
        if not is_system or facts.get("DEVICES") != _ON_CPU or device_code:
            used[folder.name] = sources.reach(own, covered)
        if facts.get("EXACT_ON", _ON_CPU) != _ON_CPU:
            exact |= own
    outside = covered - inside
    exact = sources.reach(exact, covered)
    seen = set().union(*used.values())
    shared = exact | sources.reach((outside - seen) | (exact & outside), outside)
    return {SHARED: shared, **{name: files - shared for name, files in used.items()}}


def part_digests(package: Path = PACKAGE) -> dict[str, str]:
    """Return SHA-256 over names and code of each part's files, by the part's name."""
    return {name: digest_of(files, package) for name, files in part_files(package).items()}


def host_digests(package: Path = PACKAGE) -> dict[str, str]:
    """Return SHA-256 over names and code of each package in ``HOST_PACKAGES``."""
    return {
        name: digest_of((package / name).rglob("*.py"), package / name) for name in HOST_PACKAGES
    }


def changed_parts(record: Mapping[str, Any]) -> list[str]:
    """Return the parts that changed since a record was made; empty for the current code.

    Records of host code have a digest for each package. Older records have one digest of
    everything: which part changed is not known.
    """
    if "packages" in record:
        old, today = record["packages"], host_digests()
    elif "parts" in record:
        old, today = record["parts"], part_digests()
    else:
        return [] if record.get("code_digest") == code_digest() else ["some part"]
    return [name for name in today if not isinstance(old, dict) or old.get(name) != today[name]]
