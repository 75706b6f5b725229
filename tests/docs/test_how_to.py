"""Every Python block of the how-to pages runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import doctest
import functools
import io
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import DOCS, Block, blocks

PAGES = sorted(path for path in (DOCS / "how-to").glob("*.md") if path.name != "index.md")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    # What torchrun sets for the only process of a group.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment(RANK=0, WORLD_SIZE=1, MASTER_PORT=port, MASTER_ADDR="127.0.0.1")
    # The default backend needs a C++ compiler. What it is given is the same.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    if "sparsetile.pyg" in sys.modules:
        sys.modules["sparsetile.pyg"].unpatch()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run_page(path: Path, found: list[Block]) -> None:
    """Run Python blocks in one namespace; a text block must be what the last one printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in found:
        if block.kind == "text":
            assert doctest.OutputChecker().check_output(block.text, printed, FLAGS), (
                f"{path.name}:{block.line} shows\n{block.text}\nbut it prints\n{printed}"
            )
            printed = ""
            continue
        assert not printed, f"{path.name}:{block.line}: the page does not show {printed!r}"
        code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        printed = out.getvalue()
    assert not printed


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_block_runs_and_prints_what_the_page_shows(path: Path):
    found = blocks(path, "python", "text")
    assert found
    run_page(path, found)


def test_a_page_that_shows_something_else_is_noticed():
    with pytest.raises(AssertionError, match=r"page\.md:5 shows"):
        run_page(Path("page.md"), [Block("python", "print(2)", 1), Block("text", "3\n", 5)])
    with pytest.raises(AssertionError, match="does not show '2"):
        run_page(Path("page.md"), [Block("python", "print(2)", 1), Block("python", "1", 5)])


def test_the_index_lists_every_page():
    listed = (DOCS / "how-to" / "index.md").read_text(encoding="utf-8")
    assert all(f"]({path.name})" in listed for path in PAGES)
