"""``-p sparsetile.pyg.plugin`` runs tests that know nothing of sparsetile under the patch."""

from __future__ import annotations

import subprocess
import sys

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


def test_the_plugin_patches_before_tests_are_imported(tmp_path):
    (tmp_path / "test_layers.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "sparsetile.pyg.plugin"]
    command += ["-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout and "PyG runs on sparsetile" in done.stdout
