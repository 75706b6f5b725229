"""The digest of the proof: what changes it and what does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tools.digest import (
    FILES,
    FOLDERS,
    PACKAGE,
    code_digest,
    code_files,
    strip_cuda,
    strip_python,
)

PYTHON = '''"""Module."""

import os  # why


class Thing:
    """Class."""

    mark = "# no comment"  # a comment

    def area(self, width: int) -> str:
        """Method,
        of two lines.
        """
        # A comment alone.
        text = f"{width:#x} # {self.mark!r}"
        raw = r"\\""  # after a raw string
        block = \'\'\'first   
        # second

        third\'\'\'
        return text + raw + block + (
            "a"  # between two parts
            "b"
        )


async def later():
    """Doc."""
'''  # noqa: W291

CUDA = """// Top.
#pragma once
#define SQUARE(x) ((x) * (x))  // a macro
#include "other.cuh"

/* A block
   of lines. */
__device__ int f(int a, int b) {
  asm volatile("// no comment \\"%0\\" /* none */" : "=r"(a));
  char slash = '/', quote = '"';  // two characters
  return a + +b + 1'000;
}
"""


@pytest.mark.parametrize(
    "before, after",
    [
        ('"""Module."""', '"""Another text: \'#\' and more.\n\nLines."""'),
        ('"""Module."""\n', ""),
        ('    """Class."""\n', '    """Class.\n\n    Notes é ✓.\n    """\n'),
        ('        """Method,\n        of two lines.\n        """\n', ""),
        ("  # why", ""),
        ("import os  # why", "# Above.\n\nimport os"),
        ("        # A comment alone.\n", "\n\n   \n"),
        ("  # after a raw string", "   # 'another' \"text\""),
        ('"a"  # between two parts', '"a"'),
        ("class Thing:", "class Thing:   "),
        ('"""Doc."""', "'''Doc '#'.'''"),
    ],
)
def test_comments_docstrings_and_blank_lines_of_python_do_not_count(before: str, after: str):
    changed = PYTHON.replace(before, after)
    assert changed != PYTHON
    assert strip_python(changed) == strip_python(PYTHON)


def test_what_a_kernel_may_spill_does_not_count_and_all_else_of_its_spec_does():
    spec = "SPEC = KernelSpec(\n    name='a',\n    allowed_spills=40,\n    shared_memory=True,\n)\n"
    assert strip_python(spec.replace("40", "68")) == strip_python(spec)
    assert strip_python(spec.replace("    allowed_spills=40,\n", "")) == strip_python(spec)
    assert strip_python(spec.replace("True", "False")) != strip_python(spec)
    assert strip_python(spec.replace("allowed_spills=", "allowed=")) != strip_python(spec)
    line = "SPEC = KernelSpec(name='a', allowed_spills=8)"
    assert strip_python(line) == strip_python("SPEC = KernelSpec(name='a')")
    assert strip_python(line.replace("allowed_spills", "spills")) != strip_python(line)


@pytest.mark.parametrize(
    "before, after",
    [
        ("import os", "import sys"),
        ("# no comment", "# a comment"),
        ("{width:#x}", "{width:x}"),
        ("# {self", "#{self"),
        ('r"\\""', 'r"\\" "'),
        ("first   \n", "first\n"),
        ("        # second\n", "        # 2nd\n"),
        ("        # second\n\n", "        # second\n"),
        ('"b"', '"c"'),
        ("text + raw", "raw + text"),
        ("async def", "def"),
    ],
)
def test_a_changed_token_string_or_indent_of_python_counts(before: str, after: str):
    changed = PYTHON.replace(before, after)
    assert changed != PYTHON
    assert strip_python(changed) != strip_python(PYTHON)


def test_the_stripped_text_is_what_it_is_under_every_version_of_python():
    assert strip_python('x = f"{a:#x}"  # c\n"""not a docstring"""\n') == (
        'x = f"{a:#x}"\n"""not a docstring"""'
    )
    assert strip_cuda(CUDA) == (
        "\n#pragma once\n\n#define SQUARE(x) ((x) * (x))\n\n#include "
        '"other.cuh"\n__device__ int f(int a,int b){'
        'asm volatile("// no comment \\"%0\\" /* none */":"=r"(a));'
        "char slash='/',quote='\"';return a+ +b+1'000;}"
    )


@pytest.mark.parametrize(
    "before, after",
    [
        ("// Top.\n", ""),
        ("  // a macro", ""),
        ("/* A block\n   of lines. */\n", "// One 'line'.\n"),
        ("int a, int b) {", "int a,\n                 int b)\n{"),
        ("f(int", "f( int"),
        ("  return", "\treturn"),
        ("// two characters", '// it\'s "one"'),
        ("\n", "\r\n"),
    ],
)
def test_comments_and_white_space_of_cuda_do_not_count(before: str, after: str):
    changed = CUDA.replace(before, after)
    assert changed != CUDA
    assert strip_cuda(changed) == strip_cuda(CUDA)


@pytest.mark.parametrize(
    "before, after",
    [
        ("// no comment", "// a comment"),
        ("/* none */", ""),
        ("a + +b", "a ++b"),
        ("a + +b", "b + +a"),
        ("1'000", "1'001"),
        ("int f", "intf"),
        ("SQUARE(x) (", "SQUARE (x) ("),
        ("'/'", "'*'"),
        ("#pragma once\n", ""),
    ],
)
def test_a_changed_token_or_string_of_cuda_counts(before: str, after: str):
    changed = CUDA.replace(before, after)
    assert changed != CUDA
    assert strip_cuda(changed) != strip_cuda(CUDA)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package."""
    return Path(
        shutil.copytree(
            PACKAGE, tmp_path / "sparsetile", ignore=shutil.ignore_patterns("__pycache__", "bench")
        )
    )


def test_a_copy_has_the_digest_of_the_package(package: Path):
    assert code_digest(package) == code_digest()


def test_every_folder_and_file_that_is_named_exists_and_is_covered():
    covered = {path.relative_to(PACKAGE).as_posix() for path in code_files()}
    assert set(FILES) <= covered
    for folder in FOLDERS:
        assert any(name.startswith(f"{folder}/") for name in covered), folder
    assert {"jit/compiler.py", "systems/registry.py", "kernels/cuda/ptx/ptx.cuh"} <= covered
    assert not any(name.startswith(("kernels/cpu/", "reorder/", "tune/")) for name in covered)


@pytest.mark.parametrize("folder", [*FOLDERS, "kernels/cuda"])
def test_an_added_a_changed_and_a_removed_file_count(package: Path, folder: str):
    suffix = ".cuh" if folder == "kernels/cuda" else ".py"
    seen = {code_digest(package)}
    new = package / folder / f"extra{suffix}"
    new.write_text("int x;\n" if suffix == ".cuh" else "x = 1\n")
    seen.add(code_digest(package))
    new.write_text("int y;\n" if suffix == ".cuh" else "y = 1\n")
    seen.add(code_digest(package))
    new.rename(new.with_name(f"other{suffix}"))
    seen.add(code_digest(package))
    assert len(seen) == 4
    new.with_name(f"other{suffix}").unlink()
    assert code_digest(package) == code_digest()


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_vanishes_counts(package: Path, name: str):
    (package / name).unlink()
    assert code_digest(package) != code_digest()


def test_content_moved_from_one_file_to_the_next_counts(package: Path):
    one, two = package / "jit" / "y.py", package / "jit" / "z.py"
    one.write_text("a = 1\nb = 2\n")
    two.write_text("c = 3\n")
    before = code_digest(package)
    one.write_text("a = 1\n")
    two.write_text("b = 2\nc = 3\n")
    assert code_digest(package) != before


def test_files_that_are_no_code_between_plan_and_launch_do_not_count(package: Path):
    before = code_digest(package)
    (package / "kernels" / "notes.txt").write_text("no code")
    for name in ("kernels/cpu/loops.py", "reorder/rcm.py", "tune/floor.py", "cli/run.py"):
        path = package / name
        path.write_text(path.read_text() + "\nx = 1\n")
    assert code_digest(package) == before
