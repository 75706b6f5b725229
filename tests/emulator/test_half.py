"""Products through a copy of B in 16 bits, run on the host thread by thread."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import H200
from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.launch.interface import PLAIN, Epilogue
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, registry, runner
from sparsetile.systems.half import runner as half_runner
from tests.contracts.cases import csr_of
from tests.emulator.build import host_compiler
from tests.emulator.products import (
    assert_same,
    expected,
    load_on_host,
    operand,
    whole_numbers,
)
from tests.emulator.test_csr import uneven
from tests.host import cut_rows, h200, unread_scratch

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None) -> None:
    load_on_host(monkeypatch, folder, half_runner, scratch=unread_scratch, machine=h200)


def build(csr: st.CSR, n: int, order: Tensor | None = None) -> BuiltSystem:
    permutation = Permutation("identity" if order is None else "given", order)
    return SYSTEMS["half"].build(Request(csr, n, torch.float32, permutation, ceilings=H200))


def product(
    csr: st.CSR, B: Tensor, epilogue: Epilogue = PLAIN, built: BuiltSystem | None = None
) -> Tensor:
    built = build(csr, B.shape[-1]) if built is None else built
    shape = (*B.shape[:-2], csr.shape[0], B.shape[-1])
    out = torch.full(shape, 7.0 if epilogue.beta else torch.nan)
    runner(built.recipe).spmm(built.tensors, csr.values, None, B, out, epilogue)
    return out


def assert_rounded(csr: st.CSR, B: Tensor, built: BuiltSystem | None = None) -> None:
    """As near as TF32's rounding of B alone leaves every element."""
    found, wanted = product(csr, B, built=built), expected(csr, B)
    values = None if csr.values is None else csr.values.abs()
    sizes = expected(csr.with_values(values), B.abs())
    near = (found - wanted).abs() <= (2.0**-11 + 2.0**-18) * sizes + 2.0**-140  # subnormal sums
    finite = torch.isfinite(wanted)
    assert bool((near | ~finite).all())
    assert torch.equal(torch.isfinite(found), finite) and torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize("n", [8, 64, 128, 136, 256, 512, 20, 33])
def test_whole_numbers_are_exact_and_what_is_not_finite_stays_in_its_rows(n: int):
    csr = csr_of(uneven())
    B = operand(csr, n, torch.float32, special=True)
    assert_same(product(csr, B), expected(csr, B))


@pytest.mark.parametrize("n", [1032, 1100])
def test_rows_of_b_that_a_warp_does_not_hold(n: int):
    csr = csr_of(whole_numbers(20, 30, 0.3))
    B = operand(csr, n, torch.float32, special=True)
    assert_same(product(csr, B), expected(csr, B))
    B[5] *= 2.0**-60
    B[6, 3] = 2.0**-40
    assert_rounded(csr, B)


def test_row_orders_batches_patterns_and_epilogues():
    csr = csr_of(uneven())
    order = torch.randperm(csr.shape[0], generator=torch.Generator().manual_seed(3))
    B = operand(csr, 64, torch.float32, 2, special=True)
    assert_same(product(csr, B, built=build(csr, 64, order)), expected(csr, B))
    terms = Epilogue(alpha=2.0, beta=3.0, bias=torch.arange(64.0), relu=True)
    wanted = torch.relu(2 * expected(csr, B) + 21 + torch.arange(64.0))
    assert_same(product(csr, B, terms), wanted)
    pattern = csr_of(uneven(), pattern=True)
    assert_same(product(pattern, B[0]), expected(pattern, B[0]))


def test_rows_are_cut_and_joined(monkeypatch: pytest.MonkeyPatch):
    cut_rows(monkeypatch, longer=150, length=128)
    csr = csr_of(uneven(390))
    built = build(csr, 128)
    assert json.loads(built.recipe.partition(":")[2])["plain"]["slots"] > 0
    B = operand(csr, 128, torch.float32, special=True)
    assert_same(product(csr, B, built=built), expected(csr, B))


@pytest.mark.parametrize("pattern", [False, True])
def test_bundles_of_rows(pattern: bool):
    """Four rows that share their columns; some rows of B do not fit the copy."""
    base = whole_numbers(16, 200, 0.5)
    csr = csr_of(sp.csr_array(sp.kron(base, np.ones((4, 1)))), pattern=pattern)
    built = build(csr, 64)
    assert "bundles" in built.choices, "what the case is about"
    B = operand(csr, 64, torch.float32, special=True)
    assert_same(product(csr, B, built=built), expected(csr, B))
    B[10:60, 3] = 2.0**-40
    B[70] *= 2.0**70
    B[70, 1] = 1.0
    assert_rounded(csr, B, built)


@pytest.mark.parametrize("n", [64, 20])
def test_every_element_is_rounded_as_tf32_would(n: int):
    generator = torch.Generator().manual_seed(n)
    matrix = uneven()
    matrix.data = np.random.default_rng(1).standard_normal(matrix.nnz)
    csr = csr_of(matrix)
    B = torch.randn(csr.shape[1], n, generator=generator)
    assert_rounded(csr, B)
    # Columns of very different sizes: no power of two fits a row, so that B itself is read.
    assert_rounded(csr, B * torch.logspace(-12, 12, n, dtype=torch.float32))
    # Rows of very different sizes do fit, up to a point.
    sizes = torch.logspace(-30, 30, csr.shape[1], base=10.0).float()
    assert_rounded(csr, B * sizes[:, None])
    # Subnormals, and the largest numbers there are.
    tiny = B.clone()
    tiny[::3] *= 1e-39
    tiny[1::3, 0] = 3e38
    assert_rounded(csr, tiny * 1e-2)


def test_values_of_any_size():
    """Where A's values times a scale might leave float32, B itself is read."""
    for size in (1e-38, 1e-30, 1e30, 1e37):
        matrix = uneven()
        matrix.data = np.random.default_rng(1).standard_normal(matrix.nnz) * size
        csr = csr_of(matrix)
        B = torch.randn(400, 16) / size**0.5 if size > 1 else torch.randn(400, 16)
        assert_rounded(csr, B)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-44, 1e30, torch.inf])
def test_one_value_of_another_size_changes_nothing_in_other_rows(size: float):
    """It is multiplied with B itself, and all other entries with the copy."""
    csr = csr_of(uneven())
    csr.values[:] = torch.randn(csr.nnz)
    B = torch.randn(400, 64)
    before = product(csr, B)
    csr.values[5] = size
    own = int(csr.row_ids()[5])
    others = torch.arange(csr.shape[0]) != own
    assert not torch.equal(before, expected(csr, B).float())  # B was rounded
    assert torch.equal(product(csr, B)[others], before[others])
    assert_rounded(csr, B)


def test_values_of_one_size_need_no_packing():
    csr = csr_of(uneven())
    built = build(csr, 64)
    assert runner(built.recipe).packed_names == ()
    assert runner(built.recipe).pack(built.tensors, csr.values, torch.float32) == {}


@pytest.mark.parametrize("n", [64, 256])
@pytest.mark.parametrize("begin", [0, 1])
def test_rows_that_do_not_fit_are_gathered_once(
    monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None, n: int, begin: int
):
    """Of long rows without a fitting one the copy is not gathered after the first chunk."""
    csr = csr_of(whole_numbers(40, 400, 0.8))
    B = torch.randn(400, n + 1)[:, begin : begin + n]
    taken = []
    for factor in (1.0, 2.0**60):
        loaded = load_on_host(monkeypatch, folder, half_runner, options={"counted": True})
        registry._runners.clear()
        product(csr, B * factor)
        (gathering,) = (each for each in loaded if each.name == "spmm_half")
        taken.append(sum(gathering.steps))
    fits, wide = taken
    assert 0 < wide < fits  # a gather from the copy and another from B take more


def test_values_that_are_not_finite():
    matrix = uneven()
    csr = csr_of(matrix)
    csr.values[5], csr.values[100], csr.values[200] = torch.inf, torch.nan, -torch.inf
    B = operand(csr, 16, torch.float32)
    B[::2] *= 2.0**-60  # rows that are read as they are
    assert_rounded(csr, B)


def test_values_that_are_not_finite_meet_infinities_of_B():
    csr = csr_of(uneven())
    csr.values[::7] = torch.inf
    B = operand(csr, 16, torch.float32)
    B[::3, ::2], B[1::3, 1::2] = torch.inf, -torch.inf
    assert_rounded(csr, B)


def test_strides_and_narrow_alignments():
    csr = csr_of(uneven())
    wide = operand(csr, 80, torch.float32)
    for begin in (0, 1, 4):
        B = wide[:, begin : begin + 64]
        built = build(csr, 64)
        out = torch.full((csr.shape[0], 70), torch.nan)
        for place in (0, 2, 3):
            C = out[:, place : place + 64]
            runner(built.recipe).spmm(built.tensors, csr.values, None, B, C)
            assert_same(C, expected(csr, B))


def test_no_entries_no_columns_and_empty_rows():
    for shape in ((3, 5), (3, 0), (1, 1)):
        csr = csr_of(sp.csr_array(shape))
        B = torch.full((shape[1], 16), torch.nan)
        assert torch.equal(product(csr, B), torch.zeros(shape[0], 16))


def test_a_copy_that_would_be_too_large_is_made_in_parts(constants):
    csr = csr_of(uneven())
    B = operand(csr, 320, torch.float32, special=True)
    bias = torch.arange(320.0)
    constants(half_runner, MOST_COPIED=400 * 200 * 2)
    wanted = expected(csr, B) + bias
    assert_same(product(csr, B, Epilogue(bias=bias)), wanted)
