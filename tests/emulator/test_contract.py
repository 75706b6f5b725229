"""What every system with device code must do, run on the host thread by thread.

A system joins by being registered. Those whose kernels have instructions that are not emulated are
left out (``runs_on_host``): a GPU runs them, and test_redo.py what comes behind their products.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import H200
from sparsetile.engines.request import Request
from sparsetile.kernels import KERNELS
from sparsetile.launch.interface import PLAIN, Epilogue
from sparsetile.reorder import Permutation
from sparsetile.systems import runner
from tests.contracts.cases import MATRICES, csr_of
from tests.contracts.subjects import Subject, subjects
from tests.emulator.build import host_compiler, runs_on_host
from tests.emulator.products import (
    assert_same,
    expected,
    load_everything_on_host,
    operand,
    whole_numbers,
)

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

WIDTH = 32


def on_host(subject: Subject) -> bool:
    """Whether a product of the system launches kernels of ours, all of which can be emulated."""
    system = subject.system
    kernels = [KERNELS[name] for name in system.kernels]
    return bool(kernels) and "cpu" not in system.devices and all(map(runs_on_host, kernels))


EMULATED = [subject for subject in subjects() if on_host(subject)]
every_system = pytest.mark.parametrize("subject", EMULATED, ids=str)


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None) -> list[str]:
    return load_everything_on_host(monkeypatch, folder)


def product(
    subject: Subject,
    csr: st.CSR,
    B: Tensor,
    epilogue: Epilogue = PLAIN,
    order: Tensor | None = None,
) -> Tensor:
    permutation = Permutation("identity" if order is None else "given", order)
    request = Request(
        csr, B.shape[-1], B.dtype, permutation, ablation=subject.ablation, ceilings=H200
    )
    built = subject.system.build(request)
    work = runner(built.recipe)
    packed = work.pack(built.tensors, csr.values, B.dtype) if work.packed_names else None
    shape = (*B.shape[:-2], csr.shape[0], B.shape[-1])
    out = torch.full(shape, 7.0 if epilogue.beta else torch.nan, dtype=B.dtype)
    work.spmm(built.tensors, csr.values, packed, B, out, epilogue)
    return out


def test_most_systems_with_device_code_are_run():
    names = {subject.name for subject in EMULATED}
    assert len(names) >= 5 and len(EMULATED) >= 12


@every_system
def test_hard_matrices(subject: Subject, loaded: list[str]):
    for name in ("no rows", "no columns", "no entries", "one by one", "odd sizes", "empty rows"):
        matrix = MATRICES[name]()
        matrix.data[:] = torch.arange(matrix.nnz).remainder(7).add(1).numpy()
        csr = csr_of(matrix, dtype=subject.element)
        B = operand(csr, WIDTH, subject.element)
        assert_same(product(subject, csr, B), expected(csr, B))
    assert loaded and set(loaded) <= set(KERNELS)


@every_system
def test_numbers_that_are_not_finite_reach_only_rows_that_refer_to_them(subject: Subject):
    csr = csr_of(whole_numbers(50, 44, 0.2), dtype=subject.element)
    B = operand(csr, WIDTH, subject.element, special=True)
    assert_same(product(subject, csr, B), expected(csr, B))


@every_system
def test_epilogue_batches_and_another_order(subject: Subject):
    csr = csr_of(whole_numbers(50, 44, 0.3), dtype=subject.element)
    B = operand(csr, WIDTH, subject.element, 2)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    bias = torch.arange(WIDTH).float()
    epilogue = Epilogue(alpha=0.5, beta=2.0, bias=bias, relu=True)
    found = product(subject, csr, B, epilogue, order if subject.system.ordered else None)
    assert_same(found, torch.relu(0.5 * expected(csr, B) + 14.0 + bias))
