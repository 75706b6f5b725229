"""Breaks Python code one place at a time: which places there are, and which of them are drawn.

A place is a node of a function's syntax tree. Its change is small and compiles: a comparison that
is inverted or off by one, ``and`` for ``or``, a ``not`` or a statement that is dropped, branches
that are exchanged, another constant or operator, a return without its value, a key without one of
its elements, a block without its lock. Error texts, annotations, ``repr`` and asserts stay as they
are. So do statements that speak of CUDA and its streams: tests on a GPU run them.

Places are drawn kind by kind, by a digest of the seed and of the place itself. A change of other
code leaves them drawn.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

# Changes that no user could see, with the reason: (file, function, what was changed).
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "plan/traced/forward_mode.py",
        "product_of_duals",
        "each is not None and each.requires_grad -> each is not None or each.requires_grad",
    ): "the winners of a maximum are noted for a gradient that nobody takes; C is the same",
    (
        "nn/sampled.py",
        "HostRows.of_edges",
        "True -> False",
    ): "a row's entries may have any order: given_as says which edge each of them is",
    (
        "nn/sampled.py",
        "SampledGraph._multiply",
        "bias is not None and maybe_wrapped(bias) -> bias is not None or maybe_wrapped(bias)",
    ): "both ways to call the function give the same; the one for torch.func takes longer",
    (
        "dist/group.py",
        "_row_elements",
        "rows.dim() > 1 -> rows.dim() >= 1",
    ): "an empty shape has 1 element too",
    (
        "tune/kept.py",
        "_mixed",
        "2 ** 32 - 1 -> 2 ** 32 + 1",
    ): "another hash of the same numbers",
    (
        "pyg/patching.py",
        "_wrap",
        "not callable(original) or hasattr(original, _MARK)"
        " -> not callable(original) and hasattr(original, _MARK)",
    ): "the two conditions after it are met in the same cases",
    (
        "nn/cache.py",
        "_find",
        "(given.kind, pattern_key, *asked) -> (pattern_key, *asked)",
    ): "pattern keys of edges and of matrices differ without it",
    (
        "nn/fresh.py",
        "FreshGraph.spend",
        "(n, dtype) -> (n,)",
    ): "the cost is not found and computed again in each call",
}

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mult: ast.FloorDiv, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
_KEY_WORDS = ("key", "identity", "signature", "fingerprint")
_TEXT_CALLS = ("_error", "Error", "reason", "cast")  # their arguments are texts or types
_LEFT_OUT = ("__repr__", "__str__", "extra_repr")
_DECORATORS = ("overload", "abstractmethod", "property.setter")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """One change of one file."""

    file: str  # path from the package's folder on
    function: str  # qualified name
    number: int  # of the places of the file, in their order
    kind: str
    line: int
    lines: tuple[int, ...]  # of its statement: a test that runs none of them cannot notice
    span: tuple[int, int]  # first and last line of the function
    change: str  # the code before and after

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.function, self.change


@dataclass(frozen=True)
class _Found:
    kind: str
    function: str
    line: int
    lines: tuple[int, ...]
    span: tuple[int, int]
    change: str
    apply: Callable[[], None]


def _named(expression: ast.expr) -> str:
    """Return the last name of ``a.b.c`` or ``c``; empty for anything else."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def _speaks_of_cuda(text: str) -> bool:
    return "cuda" in text or "_stream" in text


def _is_key(name: str) -> bool:
    return any(word in name.lower() for word in _KEY_WORDS)


def _is_lock(item: ast.withitem) -> bool:
    return _named(item.context_expr).strip("_") == "lock"


def _setter(parent: ast.AST, field: str, index: int | None, new: ast.AST) -> Callable[[], None]:
    def apply() -> None:
        if index is None:
            setattr(parent, field, new)
        else:
            getattr(parent, field)[index] = new

    return apply


class _Finder:
    """Walks through a tree and collects what can be changed."""

    def __init__(self) -> None:
        self.found: list[_Found] = []
        self._names: list[str] = []  # of the classes and functions around
        self._depth = 0  # functions around
        self._lines: tuple[int, ...] = ()
        self._span = (0, 0)

    def walk(self, parent: ast.AST) -> None:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(node, ast.AST):
                    self._visit(parent, field, index, node)

    def _visit(self, parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
        if isinstance(node, _Function | ast.ClassDef):
            self._definition(node)
        elif not self._skipped(node):
            if isinstance(node, ast.stmt):
                self._lines = _own_lines(node)
            if self._depth:
                for kind, new in _changes(node, parent, self._names[-1]):
                    self._add(kind, node, new, _setter(parent, field, index, new))
            self.walk(node)

    def _definition(self, node: _Function | ast.ClassDef) -> None:
        decorators = {_named(each) for each in node.decorator_list}
        if node.name in _LEFT_OUT or decorators & set(_DECORATORS):
            return
        around = self._lines, self._span
        is_function = isinstance(node, _Function)
        self._names.append(node.name)
        self._depth += is_function
        if isinstance(node, _Function):
            # Defaults are read where the function is called, not where it is defined.
            self._lines = (min([node.lineno, *(each.lineno for each in node.decorator_list)]),)
            self._span = self._lines[0], node.end_lineno or node.lineno
        self.walk(node)
        self._depth -= is_function
        self._names.pop()
        self._lines, self._span = around

    def _skipped(self, node: ast.AST) -> bool:
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                return True
            case ast.Call(func=func):
                return _named(func).endswith(_TEXT_CALLS)
            case ast.If(test=test) | ast.IfExp(test=test):
                return "TYPE_CHECKING" in (text := ast.unparse(test)) or _speaks_of_cuda(text)
            case ast.With(items=items):
                return any(_speaks_of_cuda(ast.unparse(item)) for item in items)
            case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Return():
                return _speaks_of_cuda(ast.unparse(node))
        return False

    def _add(self, kind: str, node: Any, new: ast.AST, apply: Callable[[], None]) -> None:
        ast.copy_location(new, node)
        before, after = _shown(node), _shown(new)
        name = ".".join(self._names)
        change = f"{before} -> {after}"
        self.found.append(_Found(kind, name, node.lineno, self._lines, self._span, change, apply))


def _shown(node: ast.AST) -> str:
    if isinstance(node, ast.With):
        return "with " + ", ".join(map(ast.unparse, node.items))
    if isinstance(node, ast.If):
        return "no lock"
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else f"{text[:60]} ... {text[-35:]}"


def _own_lines(node: ast.stmt) -> tuple[int, ...]:
    """Return the lines of a statement, of one with a body those above the body."""
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    return tuple(range(node.lineno, max(last, node.lineno) + 1))


def _changes(node: ast.AST, parent: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    """Give what may stand in place of a node, with the kind of the change."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=after) if type(op) in _COMPARISONS:
            yield "comparison", ast.Compare(left, [_COMPARISONS[type(op)]()], after)
        case ast.BoolOp(op=op, values=values):
            yield "and, or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", operand
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "branches", ast.IfExp(test, orelse, body)
        case ast.Constant(value=bool(value)):
            yield "truth", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "number", ast.Constant(value + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            if not any(isinstance(each, ast.JoinedStr | ast.List) for each in (left, right)):
                yield "operator", ast.BinOp(left, _OPERATORS[type(op)](), right)
        case ast.Expr(value=ast.Call()):
            yield "statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute()]) | ast.AugAssign(target=ast.Attribute()):
            yield "statement", ast.Pass()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return", ast.Return(ast.Constant(None))
        case ast.Tuple(elts=[_, _, *_] as elements, ctx=ast.Load()) if _holds(
            parent, node, function
        ):
            for dropped in range(len(elements)):
                left_over = [*elements[:dropped], *elements[dropped + 1 :]]
                yield "key", ast.Tuple(left_over, ast.Load())
        case ast.With(items=items, body=body) if any(map(_is_lock, items)):
            others = [item for item in items if not _is_lock(item)]
            yield "lock", ast.With(others, body) if others else ast.If(ast.Constant(True), body, [])


def _holds(parent: ast.AST, node: ast.Tuple, function: str) -> bool:
    """Whether a tuple is a key, by the names around it."""
    match parent:
        case ast.Assign(targets=[target]):
            return _is_key(_named(target))
        case ast.Return():
            return _is_key(function)
        case ast.Call(func=ast.Attribute(attr="get" | "setdefault" | "pop"), args=[first, *_]):
            return first is node
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()]):
            return left is node
    return False


def _found(tree: ast.Module) -> list[_Found]:
    finder = _Finder()
    finder.walk(tree)
    return finder.found


def places(path: Path, package: Path) -> list[Place]:
    """Return all changes of a file that can be drawn."""
    file = path.relative_to(package).as_posix()
    return [
        Place(file, each.function, number, each.kind, each.line, each.lines, each.span, each.change)
        for number, each in enumerate(_found(ast.parse(path.read_text(encoding="utf-8"))))
    ]


def mutant(place: Place, package: Path) -> CodeType:
    """Return the code of a file with one change."""
    path = package / place.file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    _found(tree)[place.number].apply()
    return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)


def draw(folder: Path, package: Path, count: int, seed: int) -> list[Place]:
    """Draw places of the files of a folder: of each kind as many, as far as there are any."""
    seen: Counter[tuple[str, ...]] = Counter()
    waiting: dict[str, list[tuple[str, Place]]] = {}
    for path in sorted(folder.rglob("*.py")):
        for place in places(path, package):
            words = (str(seed), *place.key)
            seen[words] += 1  # the same change may be possible twice in a function
            digest = hashlib.sha256(repr((words, seen[words])).encode()).hexdigest()
            waiting.setdefault(place.kind, []).append((digest, place))
    for each in waiting.values():
        each.sort(key=lambda pair: pair[0], reverse=True)
    drawn: list[Place] = []
    while len(drawn) < count and any(waiting.values()):
        for kind in sorted(waiting):
            if waiting[kind] and len(drawn) < count:
                drawn.append(waiting[kind].pop()[1])
    return sorted(drawn, key=lambda place: (place.file, place.number))
