"""``-p sparsetile.pyg.plugin`` runs tests that know nothing of sparsetile under the patch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")

_TESTS = """
import torch
from torch_geometric.nn import GCNConv
from torch_geometric.utils import spmm


def test_a_layer_runs_on_sparsetile():
    import sparsetile.pyg
    from sparsetile.nn import cache

    assert sparsetile.pyg.is_patched()
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    GCNConv(4, 4)(torch.randn(3, 4), edge_index)
    assert len(cache._graphs) == 1


def test_names_that_tests_import_are_exchanged():
    assert hasattr(spmm, "__wrapped__")
"""


def _run_tests(folder: Path, said: Path) -> None:
    os.chdir(folder)
    words = ["-p", "sparsetile.pyg.plugin", "-p", "no:cacheprovider", "-p", "no:xdist"]
    with said.open("w") as out, contextlib.redirect_stdout(out):
        code = pytest.main([*words, "--capture=no", str(folder)])
    os._exit(code)


def test_the_plugin_patches_before_tests_are_imported(tmp_path):
    """In a fork: a process of its own would import torch and PyG again."""
    (tmp_path / "test_layers.py").write_text(_TESTS)
    said = tmp_path / "said.txt"
    child = multiprocessing.get_context("fork").Process(target=_run_tests, args=(tmp_path, said))
    child.start()
    child.join()
    assert child.exitcode == 0, said.read_text()
    assert "2 passed" in said.read_text() and "PyG runs on sparsetile" in said.read_text()
