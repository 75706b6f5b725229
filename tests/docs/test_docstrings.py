"""Every public name is on a reference page and has an example that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import types
from typing import Any

import pytest

import sparsetile
from tests.docs.pages import DOCS, blocks

MODULES = (
    "sparsetile", "sparsetile.functional", "sparsetile.nn", "sparsetile.data.generators",
    "sparsetile.pyg", "sparsetile.dist",
)  # fmt: skip
# These need PyG or a process group: their how-to pages are run instead.
_RUN_ELSEWHERE = ("sparsetile.pyg", "sparsetile.dist")
_METHODS = (types.FunctionType, property, classmethod, staticmethod)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
REFERENCE = sorted((DOCS / "reference").glob("*.md"))


def _public() -> dict[str, Any]:
    """Name -> object: modules, their public names, and the methods of a plan."""
    found: dict[str, Any] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        found[name] = module
        found |= {f"{name}.{member}": getattr(module, member) for member in module.__all__}
    for member, value in vars(sparsetile.Plan).items():
        if not member.startswith("_") and (callable(value) or isinstance(value, property)):
            found[f"sparsetile.Plan.{member}"] = value
    return found


PUBLIC = _public()
# Plain data has no docstring of its own: its page has the example.
DOCUMENTED = [
    name
    for name, value in PUBLIC.items()
    if (inspect.ismodule(value) or callable(value) or isinstance(value, property))
    and not name.startswith(_RUN_ELSEWHERE)
]
DOCUMENTED.remove("sparsetile.data.generators")


def _run(examples: list[doctest.Example], name: str) -> str:
    """Run examples in a namespace of their own; return what differed."""
    said: list[str] = []
    test = doctest.DocTest(examples, {"__name__": "__main__"}, name, None, 0, None)
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_has_an_example_that_runs(name: str):
    text = inspect.getdoc(PUBLIC[name]) or ""
    examples = doctest.DocTestParser().get_examples(text, name)
    assert any(example.want for example in examples) or "clear" in name, f"{name}: no example"
    assert not (wrong := _run(examples, name)), wrong


@pytest.mark.parametrize("path", REFERENCE, ids=lambda path: path.name)
def test_examples_of_the_reference_pages_run(path):
    for block in blocks(path, "python"):
        exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), {})
    for block in blocks(path, "pycon"):
        examples = doctest.DocTestParser().get_examples(block.text, path.name)
        assert examples and not (wrong := _run(examples, path.name)), wrong


def test_every_public_name_is_on_a_reference_page():
    text = "\n".join(path.read_text(encoding="utf-8") for path in REFERENCE)
    module = re.compile(r"currentmodule:: (\S+)|:: (\w+)$", re.M)
    listed, current = {"sparsetile.__version__"}, ""
    for match in module.finditer(text):
        current = match[1] or current
        if match[2]:
            listed.add(f"{current}.{match[2]}")
    members = {name for name in PUBLIC if name.startswith("sparsetile.Plan.")}  # by autodoc
    assert set(PUBLIC) - members - set(MODULES) == listed


_LISTED = re.compile(
    r"(?:currentmodule:: (\S+))|autoclass:: (\w+)\n +:members: (\w.*(?:\n       \w.*)*)"
)


def _listed_members() -> dict[str, set[str]]:
    """Class -> the members that its reference names one by one."""
    found, current = {}, ""
    for path in REFERENCE:
        for module, name, members in _LISTED.findall(path.read_text(encoding="utf-8")):
            current = module or current
            if name:
                found[f"{current}.{name}"] = {each.strip() for each in members.split(",")}
    return found


LISTED = _listed_members()


@pytest.mark.parametrize("name", LISTED)
def test_every_public_method_is_on_its_reference_page(name: str):
    own = {
        member
        for base in PUBLIC[name].__mro__
        if base.__module__.startswith("sparsetile")
        for member, value in vars(base).items()
        if not member.startswith("_") and isinstance(value, _METHODS) and inspect.getdoc(value)
    }
    assert own - {"extra_repr", "train"} <= LISTED[name]


def test_an_example_that_prints_something_else_is_noticed():
    (example,) = doctest.DocTestParser().get_examples(">>> 1 + 1\n3\n")
    assert "Got:\n    2" in _run([example], "wrong")
