"""Products of rows on CUDA cores, run on the host thread by thread."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import H200
from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.engines.rows import lengths as rows
from sparsetile.engines.rows import runner as csr_runner
from sparsetile.engines.rows import won
from sparsetile.kernels import KernelSpec
from sparsetile.kernels import csr as kernel
from sparsetile.kernels.csr import narrow_tiles, vector_width
from sparsetile.launch import bound as bound_launches
from sparsetile.launch.interface import PLAIN, Epilogue
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, runner
from tests.contracts.cases import csr_of, equal_rows
from tests.emulator.build import HostKernel, host_compiler
from tests.host import answer_on_host, cut_rows, h200, unread_scratch

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


class Loaded(list[dict[str, Any]]):
    """Configurations of the kernels that were loaded."""


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None) -> Loaded:
    """Kernels are loaded for the host; scratch memory holds what nobody should read."""
    found = Loaded()

    def load(spec: KernelSpec, config: Any, *rest: Any) -> HostKernel:
        found.append(dict(config))
        return HostKernel(spec, config, folder)

    answer_on_host(monkeypatch, csr_runner, won, load=load, machine=h200, scratch=unread_scratch)
    return found


def uneven(longest: int = 300, cols: int = 400) -> sp.csr_array:
    """Rows of every length up to 40, some longer ones, empty ones; small whole numbers."""
    lengths = [*range(41), 0, 63, 64, 65, 127, 128, 129, 171, longest, 0]
    rng = np.random.default_rng(5)
    order = rng.permutation(len(lengths))
    columns = [np.sort(rng.choice(cols, lengths[i], replace=False)) for i in order]
    indices = np.concatenate(columns)
    data = (np.arange(indices.size) % 7 + 1.0) * (-1.0) ** np.arange(indices.size)
    indptr = np.concatenate([[0], np.cumsum([c.size for c in columns])])
    return sp.csr_array((data, indices, indptr), shape=(len(lengths), cols))


def build(csr: st.CSR, n: int, dtype: torch.dtype, order: Tensor | None = None) -> BuiltSystem:
    permutation = Permutation("identity" if order is None else "given", order)
    return SYSTEMS["csr"].build(Request(csr, n, dtype, permutation, ceilings=H200))


def sections(built: BuiltSystem) -> list[int]:
    return json.loads(built.recipe.partition(":")[2])["plain"]["sections"]


def product(
    built: BuiltSystem,
    csr: st.CSR,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    epilogue: Epilogue = PLAIN,
) -> Tensor:
    shape = (*B.shape[:-2], csr.shape[0], B.shape[-1])
    out = torch.full(shape, 7.0 if epilogue.beta else torch.nan, dtype=out_dtype or B.dtype)
    runner(built.recipe).spmm(built.tensors, csr.values, None, B, out, epilogue)
    return out


def expected(csr: st.CSR, B: Tensor) -> Tensor:
    """Entry by entry in float64: nothing that is not stored takes part."""
    values = torch.ones(csr.nnz) if csr.values is None else csr.values
    terms = values.double().unsqueeze(-1) * B.double()[..., csr.indices.long(), :]
    zeros = torch.zeros((*B.shape[:-2], csr.shape[0], B.shape[-1]), dtype=torch.float64)
    return zeros.index_add(-2, csr.row_ids(), terms)


def operand(csr: st.CSR, n: int, dtype: torch.dtype, *lead: int) -> Tensor:
    """Small whole numbers, so that sums are exact in float32, with NaN and Inf in three rows."""
    B = torch.randint(-2, 3, (*lead, csr.shape[1], n)).to(dtype)
    B[..., 3, 0], B[..., 7, n - 1], B[..., -1, n // 2] = torch.nan, torch.inf, -torch.inf
    return B


def assert_same(C: Tensor, wanted: Tensor) -> None:
    assert torch.equal(C.nan_to_num(nan=12345.0), wanted.to(C.dtype).nan_to_num(nan=12345.0))


@pytest.mark.parametrize(
    "dtype, n", [(F32, 32), (F32, 64), (F32, 20), (F16, 32), (F16, 64), (BF16, 128)]
)
def test_small_products_share_rows_among_the_warps_of_a_block(loaded, dtype, n):
    csr = csr_of(uneven(), dtype=dtype)
    built = build(csr, n, dtype)
    assert sections(built) == [16, 0, 16, 0, 19], "over 32, over 16, the others"
    B = operand(csr, n, dtype)
    assert_same(product(built, csr, B, F32), expected(csr, B))
    (config,) = loaded
    assert config["kShared"] and config["kHeads"] and config["kLanes"] == 8


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("partial", [4, 8])
def test_small_products_without_each_of_their_parts(loaded, heads, partial, constants):
    constants(kernel, SMALL_HEADS=heads, SMALL_PARTIAL=partial)
    constants(rows, SHARED_LENGTHS=(64,))
    csr = csr_of(uneven())
    built = build(csr, 32, F32)
    B = operand(csr, 32, F32)
    assert_same(product(built, csr, B), expected(csr, B))
    assert (loaded[0]["kHeads"], loaded[0]["kPartial"]) == (heads, partial)


def test_rows_are_cut_into_shared_pieces(monkeypatch):
    cut_rows(monkeypatch, longer=150, length=128)
    csr = csr_of(uneven(390))
    built = build(csr, 32, F32)
    assert json.loads(built.recipe.partition(":")[2])["plain"]["slots"] == 2 + 3
    B = operand(csr, 32, F32)
    assert_same(product(built, csr, B), expected(csr, B))


@pytest.mark.parametrize("n, dtype", [(128, F32), (33, F32), (32, torch.float64), (24, F16)])
def test_other_widths_take_a_plan_for_small_products_without_its_heads(loaded, n, dtype):
    csr = csr_of(uneven())
    built = build(csr, 32, F32)
    assert sections(built)[0] > 0
    values = None if csr.values is None else csr.values.to(dtype)
    B = operand(csr, n, dtype)
    out = torch.full((csr.shape[0], n), torch.nan, dtype=F32 if dtype is F16 else dtype)
    runner(built.recipe).spmm(built.tensors, values, None, B, out)
    assert_same(out, expected(csr, B))
    assert loaded[0]["kShared"] and not loaded[0]["kHeads"]


@pytest.mark.parametrize(
    "dtype, n", [(F32, 128), (F32, 100), (F32, 127), (F32, 65), (F16, 512), (BF16, 260)]
)
def test_wider_products_share_rows_among_the_warps_of_a_block(loaded, dtype, n):
    csr = csr_of(uneven(), dtype=dtype)
    built = build(csr, n, dtype)
    assert sections(built)[0] == 3, "over 128"
    B = operand(csr, n, dtype)
    assert_same(product(built, csr, B, F32), expected(csr, B))
    (config,) = loaded
    assert config["kShared"] and not config["kHeads"]


@pytest.mark.parametrize(
    "lengths, dtype, n, tile",
    [
        (lambda i: i % 7, F16, 512, (8, 8, 4, 2)),
        (lambda i: 4 + i % 9, BF16, 512, (8, 16, 4, 2)),
        (lambda i: 100 + i % 20, F16, 512, (8, 32, 1, 8)),
        (lambda i: 100 + i % 20, F32, 128, (4, 16, 2, 4)),
        (lambda i: 4 + i % 16, F32, 32, (4, 8, 1, 8)),
        (lambda i: 4 + i % 16, F16, 32, (4, 8, 1, 8)),
    ],
)
def test_rows_of_known_lengths_have_tiles_of_their_own(loaded, constants, lengths, dtype, n, tile):
    constants(rows, SMALL_WAVES=0.0)  # not a small product
    constants(kernel, MIDDLING_LEAST=50)
    rng = np.random.default_rng(2)
    found = [np.sort(rng.choice(200, lengths(i), replace=False)) for i in range(70)]
    indptr = np.concatenate([[0], np.cumsum([each.size for each in found])])
    data = np.arange(indptr[-1]) % 5 - 2.0
    csr = csr_of(sp.csr_array((data, np.concatenate(found), indptr), (70, 200)), dtype=dtype)
    B = operand(csr, n, dtype)
    assert_same(product(build(csr, n, dtype), csr, B, F32), expected(csr, B))
    assert tuple(loaded[0][name] for name in ("kVec", "kLanes", "kTimes", "kUnroll")) == tile


def test_row_orders_batches_patterns_and_epilogues():
    csr = csr_of(uneven())
    order = torch.randperm(csr.shape[0], generator=torch.Generator().manual_seed(3))
    B = operand(csr, 32, F32, 2)
    assert_same(product(build(csr, 32, F32, order), csr, B), expected(csr, B))
    terms = Epilogue(alpha=2.0, beta=3.0, bias=torch.arange(32.0), relu=True)
    wanted = torch.relu(2 * expected(csr, B) + 21 + torch.arange(32.0))
    assert_same(product(build(csr, 32, F32), csr, B, epilogue=terms), wanted)
    pattern = csr_of(uneven(), pattern=True)
    B = operand(pattern, 32, F16)
    assert_same(product(build(pattern, 32, F16), pattern, B, F32), expected(pattern, B))


def test_extrema_of_a_plan_with_shared_rows():
    csr = csr_of(uneven())
    built = build(csr, 32, F32)
    B = torch.randn(csr.shape[1], 32)
    work = runner(built.recipe)
    out, args = torch.empty(csr.shape[0], 32), torch.empty(csr.shape[0], 32, dtype=torch.int16)
    assert work.place_dtype is torch.int16
    work.extremum(built.tensors, csr.values, B, out, args, True)
    terms = csr.values.unsqueeze(1) * B[csr.indices.long()]
    for row, (begin, end) in enumerate(zip(csr.indptr[:-1], csr.indptr[1:], strict=True)):
        mine = terms[begin:end]
        wanted = mine.max(0) if begin < end else None
        assert torch.equal(out[row], torch.zeros(32) if wanted is None else wanted.values)
        assert torch.equal(args[row], torch.full((32,), -1) if wanted is None
                           else wanted.indices.short())  # fmt: skip


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("pattern", [False, True])
def test_bound_extrema_are_those_of_the_runner(monkeypatch, reduce, cut, pattern):
    answers = {"scratch": unread_scratch, "record_stream": lambda *read: None}
    answer_on_host(monkeypatch, bound_launches, **answers)
    if cut:
        cut_rows(monkeypatch, 64, 16)
    csr = csr_of(uneven(), pattern=pattern)
    built = build(csr, 20, F32)
    work = runner(built.recipe)
    bound = work.bind_extremum(built.tensors, csr.values)
    for B in (torch.randn(csr.shape[1], 20), torch.randn(csr.shape[1], 24)[:, 1:21]):
        out, args = torch.empty(csr.shape[0], 20), torch.empty(csr.shape[0], 20, dtype=torch.int16)
        work.extremum(built.tensors, csr.values, B, out, args, reduce == "max")
        for _ in range(2):  # prepared, then found again
            mine, places = bound(B, reduce, True)
            assert torch.equal(mine, out) and torch.equal(places, args)
            alone, none = bound(B, reduce, False)
            assert torch.equal(alone, out) and not none.numel()
    assert bound(torch.randn(20, csr.shape[1]).t(), reduce, True) is None  # needs a copy


def test_sampled_products_of_a_plan_with_shared_rows():
    csr = csr_of(uneven())
    built = build(csr, 32, F32)
    G, B = (torch.randint(-3, 4, (size, 32)).float() for size in csr.shape)
    found = runner(built.recipe).sddmm(built.tensors, G, B)
    assert torch.equal(found, (G[csr.row_ids()] * B[csr.indices.long()]).sum(1))


@pytest.mark.parametrize(
    "dtype, n",
    [
        *itertools.product([F32], [1, 2, 3, 4, 6, 7, 8, 12, 16]),
        # Accesses of eight columns; of fewer, one width each: the rest is as in float32.
        *itertools.product([F16], [1, 2, 8, 12, 16]),
        # Accesses of two columns and of one; tiles and accesses of bfloat16 are those of float16.
        *itertools.product([torch.float64], [1, 2, 3, 8, 16]), (BF16, 1), (BF16, 6), (BF16, 16),
    ],
)  # fmt: skip
def test_few_columns_are_read_side_by_side_by_every_tile(monkeypatch, loaded, dtype, n, constants):
    constants(rows, UNCUT_NARROW=40, SHORT_SEGMENT=64, SHARED_UNCUT=64)
    csr = csr_of(uneven(390), dtype=dtype)
    built = build(csr, n, dtype)
    assert json.loads(built.recipe.partition(":")[2])["plain"]["slots"] > 2
    B, vector = operand(csr, n, dtype), vector_width(dtype, n)
    fitting = [t for t in narrow_tiles(dtype) if t.vector == vector and t.slab >= n]
    for tile in [t for t in fitting if t.slab == min(t.slab for t in fitting)]:
        monkeypatch.setattr("sparsetile.kernels.csr.choose_narrow_tile", lambda *_, t=tile: t)
        runner(built.recipe)._launches.clear()
        assert_same(product(built, csr, B), expected(csr, B))
        assert loaded[-1]["kParts"] == tile.parts
        assert loaded[-1]["kShared"] and not loaded[-1]["kHeads"]
    two = operand(csr, n, dtype, 2)
    assert_same(product(built, csr, two), expected(csr, two))


@pytest.mark.parametrize("n", [1, 8, 16])
def test_few_columns_of_a_plan_with_bundles_are_read_side_by_side(loaded, n):
    csr = csr_of(equal_rows(20, 600))
    built = build(csr, 32, F32)
    assert "mixed_items" in built.tensors and "heads" not in built.tensors
    B = operand(csr, n, F32)
    assert_same(product(built, csr, B), expected(csr, B))
    assert loaded[-1]["kParts"] > 1


@pytest.mark.parametrize(
    "dtype, n, longest",
    [(F32, 32, 300), (torch.float64, 40, 300), (BF16, 24, 300), (F32, 5, 2**15)],
)
def test_gradients_of_an_extremum_go_to_the_rows_that_won(monkeypatch, loaded, dtype, n, longest):
    """Places have 16 bits if the longest row has fewer than 2^15 entries."""
    cut_rows(monkeypatch, longer=150, length=128)
    csr = csr_of(uneven(longest, max(400, longest)), dtype=dtype)
    order = csr.transpose_order()
    back = csr.transposed(order)
    built, turned = build(csr, n, dtype), build(back, n, dtype)
    work = runner(turned.recipe)
    place = runner(built.recipe).place_dtype
    assert place is (torch.int32 if longest == 2**15 else torch.int16)
    for lead in ((), (2,)) if longest < 2**15 else ((),):
        C = torch.empty((*lead, csr.shape[0], n), dtype=dtype)
        args = torch.empty(C.shape, dtype=place)
        B = torch.randint(-2, 3, (*lead, csr.shape[1], n)).to(dtype)
        runner(built.recipe).extremum(built.tensors, csr.values, B, C, args, True)
        empty = args < 0
        grad = torch.randint(-3, 4, C.shape).to(dtype).masked_fill(empty, torch.nan)
        out = torch.full(B.shape, torch.nan, dtype=dtype)
        values = None if csr.values is None else csr.values[order]
        work.won(turned.tensors, values, grad, args, order.long(), csr.indptr, out)
        entry = (csr.indptr[:-1, None] + args).masked_fill(empty, 0)
        won = (grad.double() * csr.values.double()[entry]).masked_fill(empty, 0)
        wanted = torch.zeros(B.shape, dtype=torch.float64)
        wanted.scatter_add_(-2, csr.indices.long()[entry], won)
        assert torch.equal(out, wanted.to(dtype))
    assert {each["kArgs"] for each in loaded if "kArgs" in each} == {kernel.PLACES[place]}
