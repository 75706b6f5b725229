"""Mutants: copies of the device tree with one mutation applied, and what they compile to."""

from __future__ import annotations

import functools
import importlib
import random
import re
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparsetile.cli.console import note
from sparsetile.core.errors import value_error
from sparsetile.jit.source import DEVICE_TREE, KernelSource
from sparsetile.kernels import KERNELS
from tools.digest import strip_cuda
from tools.mutations import SUITES, Mutation

# Configurations of a kernel that are compiled until one differs.
TRIED = 30
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def mutated(mutation: Mutation, tree: Path = DEVICE_TREE) -> str:
    """Return the text of the mutation's file with the mutation applied."""
    path = tree / mutation.file
    text = path.read_text() if path.is_file() else ""
    count = text.count(mutation.before)
    if count != 1:
        raise value_error(
            "mutate", f"fragment {mutation.before!r}", f"in {mutation.file} exactly once",
            f"{count} times", "Choose a fragment of today's source in tools/mutations.py",
        )  # fmt: skip
    changed = text.replace(mutation.before, mutation.after)
    if strip_cuda(changed) == strip_cuda(text):
        raise value_error(
            "mutate", f"fragment {mutation.before!r}", "code", "a comment or white space",
            "Choose a fragment of code in tools/mutations.py",
        )  # fmt: skip
    return changed


def apply(mutation: Mutation, folder: Path, tree: Path = DEVICE_TREE) -> Path:
    """Copy the device tree to ``folder`` with the mutation applied; return the copy."""
    changed = mutated(mutation, tree)
    shutil.copytree(tree, folder)
    (folder / mutation.file).write_text(changed)
    return folder


def kernels_with(file: str) -> list[str]:
    """Return the kernels whose source is ``file`` or includes it, directly or not."""

    def included(name: str, seen: set[str]) -> set[str]:
        if name not in seen:
            seen.add(name)
            for other in _INCLUDE.findall((DEVICE_TREE / name).read_text()):
                included(other, seen)
        return seen

    return [name for name, spec in KERNELS.items() if file in included(spec.file, set())]


def _compiled(text: str, entry: str, tree: Path) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(name=entry, arch="sm_90a", std="c++17", include_path=str(tree))
    return bytes(Program(text, "c++", options=options).compile("cubin").code)


@functools.lru_cache(maxsize=256)
def _original(source: KernelSource) -> bytes:
    return _compiled(source.text(), source.entry, DEVICE_TREE)


def compile_mutant(mutation: Mutation) -> str:
    """Compile kernels that include the mutated file until the code of one differs.

    Return the label of that configuration; empty if none of those tried differs.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = apply(mutation, Path(folder) / "cuda")
        suite = SUITES[mutation.suite]
        names = sorted(kernels_with(mutation.file), key=lambda name: name != suite.kernel)
        for spec in map(KERNELS.__getitem__, names):
            wanted = suite.constant
            configs = [each for each in spec.configs() if not wanted or each.get(wanted)]
            for config in random.Random(0).sample(configs, min(TRIED, len(configs))):
                source = spec.source(config)
                header = source.text().removesuffix(source.path.read_text())
                text = header + (tree / source.file).read_text()
                if _compiled(text, spec.name, tree) != _original(source):
                    return source.label
    return ""


def compile_all(chosen: Sequence[Mutation], parallel: int) -> int:
    """Compile every mutant; say which do not compile or change nothing."""

    def one(mutation: Mutation) -> str:
        try:
            return "" if compile_mutant(mutation) else "changes no code of the kernels compiled"
        except Exception as error:  # cuda.core's own
            return f"does not compile: {error}"

    bad = 0
    importlib.import_module("cuda.core")  # its first import must not meet another's
    with ThreadPoolExecutor(parallel) as pool:
        for mutation, problem in zip(chosen, pool.map(one, chosen), strict=True):
            bad += bool(problem)
            note(f"mutate: {mutation.name}: {problem or 'compiles'}")
    return 1 if bad else 0
