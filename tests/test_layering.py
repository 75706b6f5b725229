"""Imports go one way: a module imports only from packages before its own, and so do includes.

Imports are read from the source, so that those inside functions count like those at the top.
Device code includes only from folders before its own, and never a kernel's own file.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "sparsetile"

# In import order. Packages of one line do not import each other.
LAYERS = (
    ("_version",),
    ("core",),
    ("intake",),
    ("jit",),
    ("kernels",),
    ("launch",),
    ("reorder",),
    ("formats",),
    ("balance",),
    ("engines",),
    ("systems",),
    ("tune",),
    ("plan",),
    ("cache",),
    ("functional",),
    ("layers",),
    ("nn",),
    ("pyg",),
    ("dist",),
    ("data",),
    ("check",),
    ("bench",),
    ("cli",),
    ("__main__",),
)
LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
# `import sparsetile` means the public names, the last of which is in this package.
FRONT = "cache"

MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def package_of(module: str) -> str:
    """``intake/csr.py`` -> ``intake``; ``plan.py`` -> ``plan``."""
    return module.split("/")[0].removesuffix(".py")


def is_package(name: str) -> bool:
    return (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()


@functools.cache
def tree_of(source: str) -> ast.Module:
    """What every test here reads, parsed once."""
    return ast.parse(source)


@functools.cache
def public_names() -> dict[str, str]:
    """Name in ``sparsetile/__init__.py`` -> package it comes from."""
    tree = tree_of((ROOT / "__init__.py").read_text())
    return {
        alias.asname or alias.name: str(node.module).split(".")[1]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sparsetile.")
        for alias in node.names
    }


@functools.cache
def imported_modules(source: str) -> list[tuple[int, str, list[str]]]:
    """Return (line, dotted module, names) for each import anywhere in ``source``."""
    return list(imports(tree_of(source)))


def imports(tree: ast.Module) -> Iterator[tuple[int, str, list[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            yield (
                node.lineno,
                "." * node.level + (node.module or ""),
                [alias.name for alias in node.names],
            )
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value), []


def imported_packages(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, package) for each import of the package's own."""
    for line, module, names in imported_modules(source):
        parts = module.split(".")
        if parts[0] != "sparsetile":
            continue
        if len(parts) > 1:
            yield line, parts[1]
        elif not names:
            yield line, FRONT
        else:
            for name in names:
                yield line, name if is_package(name) else public_names().get(name, FRONT)


def violations(module: str, source: str) -> list[str]:
    here = package_of(module)
    return [
        f"{module}:{line} imports from {package}"
        for line, package in imported_packages(source)
        if package != here and LAYER[package] >= LAYER[here]
    ]


def test_modules_import_only_from_packages_before_their_own():
    modules = [name for name in MODULES if name != "__init__.py"]
    placeless = [module for module in modules if package_of(module) not in LAYER]
    assert placeless == [], "these have no place in the order: add them to LAYERS"
    found = [each for name in modules for each in violations(name, (ROOT / name).read_text())]
    assert len(modules) > 100 and found == []


@pytest.mark.parametrize(
    "module, source",
    [
        ("intake/csr.py", "from sparsetile.systems import SYSTEMS"),
        ("intake/csr.py", "def lazy():\n    from sparsetile.plan.traced.operators import Bundle"),
        ("intake/csr.py", "import sparsetile"),
        ("intake/csr.py", "from sparsetile import spmm"),
        ("systems/base.py", "from sparsetile import plan"),
        ("tune/floor.py", "import importlib\nimportlib.import_module('sparsetile.plan.plan')"),
        ("tune/choose.py", "from sparsetile.plan.files import load_plan"),
        ("formats/bundles.py", "import sparsetile.balance.segments"),
    ],
)
def test_an_import_from_a_later_package_is_found_wherever_it_stands(module: str, source: str):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    "module, source",
    [
        ("plan/plan.py", "from sparsetile.core import settings"),
        ("plan/plan.py", "def explain():\n    from sparsetile.plan.explain import explain_plan"),
        ("bench/driver.py", "from sparsetile import __version__"),
        ("systems/dense/system.py", "from sparsetile.systems.registry import runner"),
        ("cli/run.py", "import sparsetile"),
    ],
)
def test_an_import_from_before_or_beside_is_right(module: str, source: str):
    assert violations(module, source) == []


def test_no_system_imports_another():
    """What systems share is an engine; ``half`` on ``csr`` would be a system that needs two."""
    folders = {module.split("/")[1] for module in MODULES if module.startswith("systems/") and
               module.count("/") == 2}  # fmt: skip
    found = [
        f"{module}:{line} imports {name}"
        for module in MODULES
        if module.startswith("systems/")
        for line, name, _ in imported_modules((ROOT / module).read_text())
        if name.startswith("sparsetile.systems.")
        and (other := name.split(".")[2]) in folders
        and other != module.split("/")[1]
    ]
    assert len(folders) > 5 and found == []


def test_imports_are_absolute():
    relative = [
        f"{module}:{line}"
        for module in MODULES
        for line, name, _ in imported_modules((ROOT / module).read_text())
        if name.startswith(".")
    ]
    assert relative == []


def files_imported(module: str) -> set[str]:
    """Modules of ours, as file names, that one imports anywhere: at its top or in a function."""
    found = set()
    for _, name, names in imported_modules((ROOT / module).read_text()):
        if name.split(".")[0] == "sparsetile":
            path = "/".join(name.split(".")[1:])
            found |= {f"{path}/{part}.py" for part in names} | {f"{path}.py"}
            # Importing a name from a package runs its __init__, unless the name is a file.
            if any(f"{path}/{part}.py" not in MODULES for part in names):
                found.add(f"{path}/__init__.py")
    return found & set(MODULES)


def test_no_files_import_each_other_in_a_circle():
    left = {name: files_imported(name) - {name} for name in MODULES}
    while ready := {name for name, found in left.items() if not found & set(left)}:
        left = {name: found for name, found in left.items() if name not in ready}
    circles = {name: sorted(found & set(left)) for name, found in left.items()}
    assert not circles, f"these import each other in a circle, or one that does: {circles}"


def environment_readers(source: str) -> list[int]:
    """Lines that touch the process's environment."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for node in ast.walk(tree_of(source)):
        attribute = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os"
        if (attribute and node.attr in names) or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and names & {alias.name for alias in node.names}
        ):
            found.append(node.lineno)
    return found


def importers(*packages: str) -> set[str]:
    """Modules of ours that import one of ``packages`` anywhere."""
    return {
        module
        for module in MODULES
        for _, name, _ in imported_modules((ROOT / module).read_text())
        if name.split(".")[0] in packages
    }


def test_only_settings_reads_the_environment():
    readers = {name for name in MODULES if environment_readers((ROOT / name).read_text())}
    assert readers == {"core/settings.py"}


@pytest.mark.parametrize(
    "source",
    ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"],
)
def test_a_reader_of_the_environment_is_found(source: str):
    assert environment_readers(source)


def test_only_the_jit_package_imports_cuda():
    found = importers("cuda")
    assert found, "the check must see jit's own imports"
    assert {name for name in found if package_of(name) != "jit"} == set()


def test_only_cpu_kernels_and_row_orders_import_numba():
    found = importers("numba", "llvmlite")
    assert found, "the check must see the kernels' own imports"
    assert {
        name
        for name in found
        if not name.startswith(("kernels/cpu/", "reorder/", "core/numba_cache", "bench/numba_loop"))
    } == set()


# -- Device code

DEVICE = ROOT / "kernels" / "cuda"
# In include order. Folders of one line do not include each other.
DEVICE_LAYERS = (
    ("ptx",),
    ("mma",),
    ("pipeline", "epilogue"),
    ("rows",),
    ("windows", "block_sparse", "attention", "pack"),
)
DEVICE_LAYER = {folder: layer for layer, names in enumerate(DEVICE_LAYERS) for folder in names}
DEVICE_FILES = sorted(
    path.relative_to(DEVICE).as_posix() for path in DEVICE.rglob("*") if path.is_file()
)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[ \t]*(.*?)[ \t]*$", re.MULTILINE)


def includes(source: str) -> list[str]:
    """What each include of device code names; with brackets where it has them."""
    return [name.strip('"') for name in _INCLUDE.findall(source)]


def include_violations(file: str, source: str) -> list[str]:
    folder = file.split("/")[0]
    problems = []
    for name in includes(source):
        other = name.split("/")[0]
        if name not in DEVICE_FILES:
            problems.append(f"{file} includes {name}, which is no path from {DEVICE.name}/ on")
        elif not name.endswith(".cuh"):
            problems.append(f"{file} includes the kernel {name}")
        elif other != folder and DEVICE_LAYER[other] >= DEVICE_LAYER[folder]:
            problems.append(f"{file} includes {name} of a folder that is not before its own")
    return problems


@pytest.mark.parametrize("file", DEVICE_FILES)
def test_device_code_includes_only_from_folders_before_its_own(file: str):
    folder, *names = file.split("/")
    assert len(names) == 1, f"{file} must be in one folder of {DEVICE.name}/"
    assert folder in DEVICE_LAYER, f"{folder} has no place in the order: add it to DEVICE_LAYERS"
    source = (DEVICE / file).read_text()
    assert file.endswith((".cu", ".cuh"))
    assert ('extern "C"' in source) == file.endswith(".cu"), "kernels, and only they, are .cu"
    assert ("#pragma once" in source) == file.endswith(".cuh")
    assert include_violations(file, source) == []


@pytest.mark.parametrize(
    "file, source",
    [
        ("ptx/ptx.cuh", '#include "mma/mma.cuh"'),
        ("mma/mma.cuh", '  # include "rows/tree.cuh"'),
        ("pipeline/ring.cuh", '#include "epilogue/epilogue.cuh"'),
        ("rows/row_items.cuh", '#include "windows/hybrid.cuh"'),
        ("attention/gat.cuh", '#include "pack/row_windows.cuh"'),
        ("rows/spmm_half.cu", '#include "rows/spmm_csr.cu"'),
        ("mma/bmat.cuh", '#include "mma.cuh"'),
        ("mma/bmat.cuh", '#include "../ptx/ptx.cuh"'),
        ("mma/bmat.cuh", "#include <cuda_fp16.h>"),
    ],
)
def test_an_include_that_is_not_allowed_is_found(file: str, source: str):
    assert len(include_violations(file, f"#pragma once\n{source}\n")) == 1


def test_no_device_files_include_each_other_in_a_circle():
    left = {name: set(includes((DEVICE / name).read_text())) for name in DEVICE_FILES}
    assert any(left.values()), "the check must see the includes"
    while ready := {name for name, found in left.items() if not found & set(left)}:
        left = {name: found for name, found in left.items() if name not in ready}
    assert not left, f"these include each other in a circle, or one that does: {left}"


def test_every_device_file_has_a_name_of_its_own():
    """Digests and comments name files without their folders."""
    names = [file.split("/")[1] for file in DEVICE_FILES]
    assert len(names) == len(set(names))
