"""nvmath-python as a baseline: said where it is missing, called as it is documented."""

from __future__ import annotations

import gc
import importlib.machinery
import sys
import types
from typing import Any

import pytest
import torch

from sparsetile.bench.baselines import BASELINES, Operands
from sparsetile.bench.worker import judge
from sparsetile.data.registry import generate

NVMATH = BASELINES["nvmath"]


class Matmul:
    """Behaves as nvmath.sparse.Matmul does: C is required and written in place."""

    freed = 0

    def __init__(self, a: Any, b: Any, c: Any, *, alpha: float, beta: float) -> None:
        assert a.layout is torch.sparse_csr and a.col_indices().dtype is torch.int32
        self.held, self.planned = (a, b, c, alpha, beta), False

    def plan(self) -> None:
        self.planned = True

    def execute(self) -> torch.Tensor:
        assert self.planned
        a, b, c, alpha, beta = self.held
        return c.copy_(alpha * (a.to_dense() @ b) + beta * c)

    def free(self) -> None:
        Matmul.freed += 1


def _install(monkeypatch: pytest.MonkeyPatch, sparse: Any) -> None:
    package = types.ModuleType("nvmath")
    package.__spec__ = importlib.machinery.ModuleSpec("nvmath", None)
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "nvmath", package)
    monkeypatch.setitem(sys.modules, "nvmath.sparse", sparse)
    if sparse is not None:
        package.sparse = sparse  # type: ignore[attr-defined]


def _operands() -> Operands:
    csr = generate("random", rows=30, cols=40, nnz=300, weighted=True, seed=1)
    return Operands(csr, torch.randn(40, 5), None, "spmm", "sum")


def test_a_machine_without_it_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvmath", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert NVMATH.missing() == "nvmath-python is not installed"
    assert NVMATH.reason(_operands()) == "nvmath-python is not installed"


def test_a_release_without_the_product_is_called_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, types.ModuleType("nvmath.sparse"))
    assert NVMATH.missing() == "nvmath-python is too old: it has no nvmath.sparse.Matmul"


def test_an_installation_that_does_not_load_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, None)  # importing it raises
    found = NVMATH.missing()
    assert found is not None and found.startswith("nvmath-python does not load (")


def test_the_product_is_planned_once_run_in_place_and_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sparse = types.ModuleType("nvmath.sparse")
    sparse.Matmul = Matmul  # type: ignore[attr-defined]
    _install(monkeypatch, sparse)
    operands = _operands()
    assert NVMATH.reason(operands) is None
    ready = NVMATH.prepare(operands)
    first, second = ready.run(), ready.run()
    assert first is second and ready.format_bytes > 0
    assert judge(operands, second).ok
    before = Matmul.freed
    del ready
    gc.collect()
    assert Matmul.freed == before + 1
