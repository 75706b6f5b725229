"""Digests of the code that a record covers.

A GPU record is expensive to renew, so changes of comments, docstrings, blank lines, trailing space,
white space in CUDA sources and ``allowed_spills``, which no product reads, do not count. All other
changes do. Strings are found with one regular expression, not with :mod:`tokenize`, whose tokens of
f-strings differ between Python 3.11 and 3.12: the digest is the same under both.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "sparsetile"
# Everything between `plan()` and the launch. Row orders and the choice of a system are omitted:
# every order and every choice gives a correct product, and the CPU tests run them, those that
# launch kernels in the emulator.
FOLDERS = (
    "balance",
    "engines",
    "formats",
    "jit",
    "kernels",
    "launch",
    "layers",
    "plan/traced",
    "systems",
)
FILES = (
    "plan/eager.py",
    "plan/family.py",
    "plan/inference.py",
    "plan/linear.py",
    "plan/modes.py",
    "plan/operands.py",
    "plan/plan.py",
    "plan/variant.py",
)
# The CPU's kernels run in every test of CI.
_LEFT_OUT = ("kernels/cpu/",)
_SUFFIXES = (".py", ".cu", ".cuh")

# A backslash takes the next character along, in raw strings too: r"\"" is one string.
_PYTHON = re.compile(
    r'''(?P<comment>\#[^\n]*)
    | """(?:\\.|[^\\])*?""" | \'\'\'(?:\\.|[^\\])*?\'\'\'
    | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*\'''',
    re.DOTALL | re.VERBOSE,
)
# A quote after a digit separates digits: 1'000.
_CUDA = re.compile(
    r"""(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
    | R"(?P<end>[^\s()\\]{0,16})\(.*?\)(?P=end)"
    | "(?:\\.|[^"\\\n])*" | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'""",
    re.DOTALL | re.VERBOSE,
)
_ALLOWED_SPILLS = re.compile(r"\s*allowed_spills=\d+,")  # a line of its own
_SPILLS_IN_LINE = re.compile(r", allowed_spills=\d+(?=[,)])")
_MARK = re.compile("\x01([0-9]+)\x02")
# Neighbours of white space that would read differently without it: two words, two operators.
_APART = re.compile(r"(?<=\w) +(?=\w)|(?<=[-+<>&|=/*:%^!.]) +(?=[-+<>&|=/*:%^!.])")


def _hide_strings(text: str, pattern: re.Pattern[str]) -> tuple[str, list[str]]:
    """Replace comments by a space and strings by marks; return the strings too."""
    strings: list[str] = []

    def replace(found: re.Match[str]) -> str:
        if found["comment"] is not None:
            return " "
        strings.append(found[0])
        return f"\x01{len(strings) - 1}\x02"

    return pattern.sub(replace, text), strings


def _show_strings(text: str, strings: list[str]) -> str:
    return _MARK.sub(lambda found: strings[int(found[1])], text)


def _without_docstrings(text: str) -> str:
    lines = text.encode().splitlines(keepends=True)  # ast counts columns in bytes of UTF-8
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    body = b"".join(lines)
    ranges = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            assert first.end_lineno is not None and first.end_col_offset is not None
            ranges.append(
                (
                    starts[first.lineno - 1] + first.col_offset,
                    starts[first.end_lineno - 1] + first.end_col_offset,
                )
            )
    for start, end in sorted(ranges, reverse=True):
        body = body[:start] + body[end:]
    return body.decode()


@functools.lru_cache(maxsize=512)  # one process takes several digests of the same files
def strip_python(text: str) -> str:
    """Return Python source without what does not count."""
    code, strings = _hide_strings(_without_docstrings(text), _PYTHON)
    lines = (_SPILLS_IN_LINE.sub("", line.rstrip()) for line in code.split("\n"))
    counting = (line for line in lines if line and not _ALLOWED_SPILLS.fullmatch(line))
    return _show_strings("\n".join(counting), strings)


@functools.lru_cache(maxsize=256)
def strip_cuda(text: str) -> str:
    """Return CUDA source without comments and without white space that separates nothing."""
    code, strings = _hide_strings(text, _CUDA)
    code = code.replace("\\\n", " ")
    parts: list[str] = []
    for line in code.split("\n"):
        if line.lstrip().startswith("#"):
            parts.append("\n" + " ".join(line.split()) + "\n")  # `F (x)` and `F(x)` differ here
        else:
            parts.append(line + " ")
    found = []
    for part in re.split(r"(\n\#[^\n]*\n)", "".join(parts)):
        if not part.startswith("\n#"):
            part = _APART.sub("\x03", " ".join(part.split())).replace(" ", "").replace("\x03", " ")
        found.append(part)
    return _show_strings("".join(found), strings)


def digest_of(paths: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        strip = strip_python if path.suffix == ".py" else strip_cuda
        for part in (path.relative_to(root).as_posix(), strip(path.read_text(encoding="utf-8"))):
            body = part.encode()
            digest.update(len(body).to_bytes(8, "little") + body)
    return digest.hexdigest()


def code_files(package: Path = PACKAGE) -> list[Path]:
    """Return the files that :func:`code_digest` covers."""
    found = [
        path
        for folder in FOLDERS
        for path in (package / folder).rglob("*")
        if path.suffix in _SUFFIXES
        and not path.relative_to(package).as_posix().startswith(_LEFT_OUT)
    ]
    return sorted([*found, *(package / name for name in FILES if (package / name).is_file())])


def code_digest(package: Path = PACKAGE) -> str:
    """Return SHA-256 over names and code of everything between ``plan()`` and the launch."""
    return digest_of(code_files(package), package)
