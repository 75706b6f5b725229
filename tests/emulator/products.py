"""What tests of whole products on the host share: matrices, the reference, loading."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.kernels import KernelSpec
from tests.contracts.cases import random_matrix
from tests.emulator.build import HostKernel
from tests.host import answer_on_host, h200, one_processor, unread_scratch

__all__ = [
    "assert_same",
    "expected",
    "load_everything_on_host",
    "load_on_host",
    "operand",
    "whole_numbers",
]


def load_on_host(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *modules: ModuleType,
    options: Mapping[str, Any] = MappingProxyType({}),
    **answers: Callable[..., Any],
) -> list[HostKernel]:
    """``modules`` launch kernels that are loaded for the host, with a kernel's ``options``.

    Returns the kernels, as they are loaded.
    """
    loaded: list[HostKernel] = []

    def load(spec: KernelSpec, config: Any, *rest: Any) -> HostKernel:
        loaded.append(HostKernel(spec, config, folder, **options))
        return loaded[-1]

    answer_on_host(monkeypatch, *modules, load=load, **answers)
    return loaded


def load_everything_on_host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """As :func:`load_on_host` for whichever system there is: in every module of systems and engines
    that asks for a device, its context, its stream or its memory. Returns names of kernels as they
    are loaded."""
    loaded: list[str] = []

    def load(spec: KernelSpec, config: Any, *rest: Any) -> HostKernel:
        loaded.append(spec.name)
        return HostKernel(spec, config, folder)

    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("sparsetile.systems.", "sparsetile.engines."))
    ]
    answer_on_host(
        monkeypatch, *modules, load=load,
        processors=one_processor, machine=h200, scratch=unread_scratch,
    )  # fmt: skip
    return loaded


def whole_numbers(rows: int, cols: int, density: float) -> sp.csr_array:
    """Entries from -7 to 7, none of them 0: sums are exact in every type."""
    matrix = sp.csr_array(random_matrix(rows, cols, density))
    matrix.data = (np.arange(matrix.nnz) % 7 + 1.0) * (-1.0) ** np.arange(matrix.nnz)
    return matrix


def expected(csr: st.CSR, B: Tensor) -> Tensor:
    """Entry by entry in float64: nothing that is not stored takes part."""
    values = torch.ones(csr.nnz) if csr.values is None else csr.values
    terms = values.double().unsqueeze(-1) * B.double()[..., csr.indices.long(), :]
    zeros = torch.zeros((*B.shape[:-2], csr.shape[0], B.shape[-1]), dtype=torch.float64)
    return zeros.index_add(-2, csr.row_ids(), terms)


def operand(csr: st.CSR, n: int, dtype: torch.dtype, *lead: int, special: bool = False) -> Tensor:
    B = torch.randint(-4, 5, (*lead, csr.shape[1], n)).to(dtype)
    if special:
        B[..., 3, 0], B[..., 7, n - 1], B[..., -1, n // 2] = torch.nan, torch.inf, -torch.inf
    return B


def assert_same(C: Tensor, wanted: Tensor) -> None:
    assert torch.equal(C.nan_to_num(nan=12345.0), wanted.to(C.dtype).nan_to_num(nan=12345.0))
