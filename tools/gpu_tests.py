"""Which parts of the code a GPU test belongs to, derived from its id and its file.

A test whose folder or parameters name systems belongs to these. Any other belongs to the systems
that its file names in a string, or uses through its imports, but not through the choice of a
system, which reads what several say of themselves. The rest belongs to ``shared`` alone.
Every outcome also depends on ``shared``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tools.digest import PACKAGE
from tools.parts import SHARED, SYSTEMS_FOLDER, Sources, part_files

# Folders of the package that are no part: whatever they choose, the product is right.
_CHOICE = ("tune", "reorder")


class GpuTests:
    """The tests of a checkout."""

    def __init__(self, root: Path, package: Path = PACKAGE) -> None:
        self._root, self._package = root, package
        self._files: Mapping[str, set[Path]] = part_files(package)
        self.systems = frozenset(self._files) - {SHARED}
        folder = package / SYSTEMS_FOLDER
        # Systems that need no GPU: nobody has to run a test that names one.
        self.on_cpu = {each.name for each in folder.iterdir() if each.is_dir()} - {*self._files}
        self._sources = Sources(package, root / "tests")
        self._of_file = cache(self._parts_of_file)

    def parts(self, test: str) -> frozenset[str]:
        """Return the systems that a test belongs to; none for ``shared`` alone."""
        return self._named(test) & self.systems or self._of_file(test.partition("::")[0])

    def needs_gpu(self, test: str) -> bool:
        """Whether a GPU has to run a test: not if it names a system of the CPU alone."""
        return not self._named(test) & self.on_cpu

    def _named(self, test: str) -> frozenset[str]:
        path, _, name = test.partition("::")
        folders = re.findall(rf"(?:^|/){SYSTEMS_FOLDER}/(\w+)/", path)
        return frozenset([*folders, *name.partition("[")[2].removesuffix("]").split("-")])

    def _parts_of_file(self, name: str) -> frozenset[str]:
        path = self._root / name
        if not path.is_file():
            return frozenset()
        found = {
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and node.value in self.systems
        }
        left, seen = [path], {self._package / "__init__.py"}  # it imports everything
        choice = [self._package / folder for folder in _CHOICE]
        while left:
            path = left.pop()
            if path not in seen and not any(map(path.is_relative_to, choice)):
                seen.add(path)
                folder = path.parent
                own = folder.parent == self._package / SYSTEMS_FOLDER and folder.name
                owners = {part for part in self.systems if path in self._files[part]}
                found |= owners & {own} or owners
                left += () if owners else self._sources.named(path)
        return frozenset(found)
