"""What a product on windows leaves to later launches: windows in pieces, and sums that are not
finite. The product itself, which the emulator has no instructions for, is played by this test: tile
by tile in float64, with the zeros that tiles store."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import H200
from sparsetile.engines.request import Request
from sparsetile.engines.tiles import tile_runner
from sparsetile.kernels import KernelSpec
from sparsetile.launch.interface import PLAIN, Epilogue
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, runner
from tests.contracts.cases import csr_of
from tests.emulator.build import HostKernel, host_compiler
from tests.emulator.products import assert_same, expected, whole_numbers
from tests.host import answer_on_host

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN, INF = torch.nan, torch.inf


def window_columns(built: Any, first: int, end: int) -> Tensor:
    """Rows of B behind tiles ``first`` to ``end`` of ``wcsr``."""
    staged = built.tensors["columns"].reshape(-1, 8)[first:end]
    return staged[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(-1).long()


class Product:
    """Stands in for a product's kernel: leaves partial sums, rows of C, and flags."""

    name = "spmm_wcsr"

    def __init__(self, csr: st.CSR, built: Any, B: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        self.csr, self.built, self.B, self.out, self.epilogue = csr, built, B, out, epilogue
        self.dense = torch.zeros(csr.shape, dtype=torch.float64)
        values = torch.ones(csr.nnz) if csr.values is None else csr.values
        self.dense[csr.row_ids(), csr.indices.long()] = values.double()
        self.asked = self.whole = self.cut = 0
        self.slots = max(int(built.tensors["items"][:, 3].max()) + 1, 0)
        self.memory: tuple[Tensor, Tensor] | None = None
        self.later: list[str] = []

    def launch(self, grid: Any, threads: int, stream: int, params: Any, **_: Any) -> None:
        _, slabs, batches = grid
        columns = 128 if self.B.shape[-1] <= 128 else 256
        partials, flags = self.memory
        partials = partials[: slabs * batches * self.slots * 64 * columns * 4]
        partials = partials.view(torch.float32).reshape(batches, slabs, self.slots, 4, -1, 32, 4)
        unit_columns = 256 // self.B.element_size()
        windows = -(-self.csr.shape[0] // 64)
        flags = flags.reshape(batches, slabs, windows, 4, columns // unit_columns)
        B = self.B if self.B.dim() == 3 else self.B[None]
        C = self.out if self.out.dim() == 3 else self.out[None]
        order = self.built.tensors["order"].tolist() or list(range(self.csr.shape[0]))
        for z, y in np.ndindex(batches, slabs):
            some = slice(y * columns, min((y + 1) * columns, B.shape[-1]))
            for window, first, end, slot in self.built.tensors["items"].tolist():
                rows = order[window * 64 : window * 64 + 64]
                A = torch.zeros(64, (end - first) * 8, dtype=torch.float64)
                ids = window_columns(self.built, first, end)
                seen = torch.tensor([i == 0 or ids[i] != ids[i - 1] for i in range(len(ids))])
                A[: len(rows)] = self.dense[rows][:, ids] * seen  # the last column is repeated
                tile = torch.zeros(64, columns, dtype=torch.float64)
                tile[:, : some.stop - some.start] = A @ B[z, ids, some].double()
                tile = tile.float()
                if slot >= 0:
                    self.cut += 1
                    partials[z, y, slot] = fragments(tile, self.B.dtype)
                    continue
                self.whole += 1
                for strip in range(4):
                    mine = slice(strip * 16, strip * 16 + 16)
                    if not tile[mine].isfinite().all():
                        flags[z, y, window, strip] = (1 << unit_columns // 32) - 1
                        continue
                    for r, row in enumerate(rows[mine]):
                        C[z, row, some] = self.finish(tile[mine][r], row, some, C[z, row, some])
        self.asked = int((flags != 0).sum())

    def finish(self, sums: Tensor, row: int, some: slice, before: Tensor) -> Tensor:
        sums = sums[: some.stop - some.start] * self.epilogue.alpha
        if self.epilogue.mean:
            sums = sums / max(int(self.csr.indptr[row + 1] - self.csr.indptr[row]), 1)
        if self.epilogue.beta:
            sums = sums + self.epilogue.beta * before.float()
        if self.epilogue.bias is not None:
            sums = sums + self.epilogue.bias[some]
        return (sums.relu() if self.epilogue.relu else sums).to(before.dtype)


class BMatProduct(Product):
    """Stands in for ``spmm_bmat``, which joins its pieces itself: leaves rows of C, and flags."""

    name = "spmm_bmat"

    def launch(self, grid: Any, threads: int, stream: int, params: Any, **_: Any) -> None:
        _, slabs, batches = grid
        tensors, meta = self.built.tensors, runner(self.built.recipe).meta
        stack, width = int(meta["stack"]), int(meta["width"])
        starts, piece_columns = tensors["window_tile_ptr"].tolist(), 128 // self.B.element_size()
        parts = (len(starts) - 1) * stack
        flags = self.memory[1][-slabs * batches * parts * -(-width // 2) :]
        flags = flags.reshape(batches, slabs, parts, -1)
        B = self.B if self.B.dim() == 3 else self.B[None]
        C = self.out if self.out.dim() == 3 else self.out[None]
        order = tensors["order"].tolist() or list(range(self.csr.shape[0]))
        for z, y, part in np.ndindex(batches, slabs, parts):
            rows = order[part * 16 : part * 16 + 16]
            window = slice(starts[part // stack], starts[part // stack + 1])
            ids = tensors["columns"].reshape(-1, 8)[window].reshape(-1).long()
            ids = ids[ids >= 0]
            sums = (self.dense[rows][:, ids] @ B[z, ids].double()).float()
            for piece in range(width):
                first = (y * width + piece) * piece_columns
                some = slice(first, min(first + piece_columns, B.shape[-1]))
                if not rows or some.stop <= first:
                    continue
                if not sums[:, some].isfinite().all():
                    flags[z, y, part, piece // 2] |= 1 << piece % 2
                    continue
                for r, row in enumerate(rows):
                    C[z, row, some] = self.finish(sums[r, some], row, some, C[z, row, some])
        self.asked = int((flags != 0).sum())


def fragments(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """[64, columns] as lanes hold it: strip, word of four, lane, element (wcsr.cuh)."""
    columns = tile.shape[1]
    strip, half, g = 4, 2, 8
    if dtype is F32:  # column 16e + 4t + j of each 32
        split = tile.reshape(strip, half, g, columns // 32, 2, 4, 4)
        lanes = split.permute(0, 3, 6, 2, 5, 1, 4)
    else:  # column 8j + 2t + e
        split = tile.reshape(strip, half, g, columns // 32, 4, 4, 2)
        lanes = split.permute(0, 3, 4, 2, 5, 1, 6)
    return lanes.reshape(strip, columns // 8, 32, 4)


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None):
    """Return a function that multiplies, and what was played of it."""

    def multiply(
        csr: st.CSR,
        B: Tensor,
        epilogue: Epilogue = PLAIN,
        *,
        out_dtype: torch.dtype | None = None,
        order: Tensor | None = None,
        blocks: int | None = None,
        system: str = "wcsr",
        ablation: str | None = None,
    ) -> tuple[Tensor, Product]:
        permutation = Permutation("identity" if order is None else "given", order)
        if system == "wcsr":
            ablation = "tall"
        request = Request(csr, B.shape[-1], B.dtype, permutation, ablation=ablation, ceilings=H200)
        built = SYSTEMS[system].build(request)
        shape = (*B.shape[:-2], csr.shape[0], B.shape[-1])
        out = torch.full(shape, 7.0 if epilogue.beta else NAN, dtype=out_dtype or B.dtype)
        played = (Product if system == "wcsr" else BMatProduct)(csr, built, B, out, epilogue)

        def scratch(device: Any, stream: int, size: int, counters: int, owner: int = 0) -> Any:
            assert owner, "a later launch reads it"
            played.memory = (
                torch.full((size,), 255, dtype=torch.uint8),
                torch.zeros(counters, dtype=torch.int32),
            )
            return played.memory

        def load(spec: KernelSpec, config: Any, *rest: Any) -> Any:
            if spec.name == played.name:
                return played
            played.later.append(spec.name)
            return HostKernel(spec, config, folder)

        facts = SimpleNamespace(processors=H200.processors if blocks is None else blocks)
        answer_on_host(
            monkeypatch, tile_runner, load=load, scratch=scratch, machine=lambda device: facts
        )
        runner(built.recipe).spmm(built.tensors, csr.values, None, B, out, epilogue)
        assert played.memory is not None and not played.memory[1].any(), "flags are taken back"
        return out, played

    return multiply


def long_windows(rows: int = 100, cols: int = 1800, dtype: torch.dtype = F32) -> st.CSR:
    """Windows of two hundred tiles, and rows without any entry."""
    matrix = whole_numbers(rows, cols, 0.04).tolil()
    matrix[rows // 3] = 0
    return csr_of(sp.csr_array(matrix), dtype=dtype)


def small(csr: st.CSR, n: int, dtype: torch.dtype, *lead: int) -> Tensor:
    return torch.randint(-2, 3, (*lead, csr.shape[1], n)).to(dtype)


def spoil(B: Tensor, share: float = 0.01) -> Tensor:
    """Rows of NaN, some with infinities of both signs, or with one number in one column."""
    maker = torch.Generator().manual_seed(5)
    for i, row in enumerate((torch.rand(B.shape[-2], generator=maker) < share).nonzero().tolist()):
        kind = i % 4
        if kind == 3:
            B[..., row[0], i % B.shape[-1]] = NAN
        else:
            B[..., row[0], :] = (NAN, INF, -INF)[kind]
    return B


@pytest.mark.parametrize("dtype, n", [(F32, 96), (F32, 268), (F16, 136), (BF16, 72)], ids=str)
def test_long_windows_keep_what_is_not_finite_to_rows_that_refer_to_it(product, dtype, n):
    csr = long_windows(dtype=dtype)
    B = spoil(small(csr, n, dtype))
    C, played = product(csr, B)
    assert played.cut, "windows in pieces"
    wanted = expected(csr, B)
    assert 0.1 < float(wanted.isfinite().double().mean()) < 0.9
    assert_same(C, wanted)


def test_one_row_of_nan_and_few_blocks_of_threads(product):
    csr = long_windows()
    B = small(csr, 128, F32)
    B[int(csr.indices[100]), 40] = NAN
    for blocks in (1, 2):  # each goes through many units
        assert_same(product(csr, B, blocks=blocks)[0], expected(csr, B))


def test_what_is_finite_is_left_alone(product):
    csr = long_windows(dtype=F16)
    B = small(csr, 64, F16)
    C, played = product(csr, B)
    assert_same(C, expected(csr, B))
    assert played.asked == 0


def check_epilogue(product, bias, dtype, out_dtype, **how):
    """Multiply two batches in another row order, with every step of an epilogue."""
    csr, columns = long_windows(70, 900, dtype), bias.numel()
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2))
    B = spoil(small(csr, columns, dtype, 2), 0.02)
    B[1, 3] = INF
    epilogue = Epilogue(alpha=0.5, beta=2.0, bias=bias, relu=True)
    C, played = product(csr, B, epilogue, out_dtype=out_dtype, order=order, **how)
    wanted = 0.5 * expected(csr, B) + 14.0 + bias
    assert_same(C, torch.where(wanted < 0, 0.0, wanted))
    return played


def check_mean(product, columns, **how):
    """Multiply a pattern and divide by the lengths of its rows."""
    csr = long_windows(70, 900)
    pattern = st.CSR(csr.indptr, csr.indices, None, csr.shape)
    B = spoil(small(pattern, columns, F32))
    C, played = product(pattern, B, Epilogue(mean=True), **how)
    lengths = (csr.indptr[1:] - csr.indptr[:-1]).clamp(min=1)[:, None]
    wanted = (expected(pattern, B).float() / lengths.float()).double()
    torch.testing.assert_close(C.double(), wanted, rtol=1e-6, atol=0, equal_nan=True)
    return played


@pytest.mark.parametrize("out_dtype", [F32, F16])
def test_epilogue_batches_and_another_order(product, out_dtype):
    check_epilogue(product, torch.arange(72).float(), F16, out_dtype)


def test_mean_of_a_pattern(product):
    check_mean(product, 68)


def test_infinities_and_stored_zeros_of_A(product):
    csr = long_windows(dtype=F16)
    csr.values[5], csr.values[77], csr.values[300] = INF, NAN, 0.0
    B = small(csr, 64, F16)
    B[int(csr.indices[300]), 3] = INF  # a stored zero times Inf is NaN
    assert_same(product(csr, B)[0], expected(csr, B))


# -- windows as a whole, which few SMs and many columns lead to


@pytest.mark.parametrize("dtype, n", [(F32, 268), (F16, 264), (BF16, 136)], ids=str)
def test_whole_windows_keep_what_is_not_finite_to_rows_that_refer_to_it(product, dtype, n):
    csr = long_windows(dtype=dtype)
    B = spoil(small(csr, n, dtype))
    C, played = product(csr, B, blocks=1)
    assert played.cut and played.later == ["join_wcsr", "redo_windows"]
    wanted = expected(csr, B)
    assert 0.1 < float(wanted.isfinite().double().mean()) < 0.9
    assert_same(C, wanted)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_whole_windows_of_one_tile_of_some_and_of_none(product, dtype):
    """Beside a window in pieces; teams have one tile, or none, or steps that are not full."""
    matrix = sp.lil_array((64 * 7 - 20, 1000))
    matrix[:64] = whole_numbers(64, 1000, 0.04)
    for window, tiles in enumerate((1, 0, 2, 3, 5, 9), 1):
        rows = slice(window * 64, min(window * 64 + 64, matrix.shape[0]))
        if tiles:
            full = whole_numbers(rows.stop - rows.start, tiles * 8, 0.3).tolil()
            full[0] = 1.0
            matrix[rows, : tiles * 8] = full
    csr = csr_of(sp.csr_array(matrix), dtype=dtype)
    B = small(csr, 200, dtype)
    B[3, 150], B[20], B[70, :40], B[999] = NAN, INF, -INF, NAN
    C, played = product(csr, B, blocks=1)
    assert played.cut and played.whole and played.asked
    assert played.later[-1] == "redo_windows"
    assert_same(C, expected(csr, B))


@pytest.mark.parametrize("dtype, column", [(F32, 0), (F32, 175), (F16, 267)], ids=str)
def test_whole_windows_of_which_few_columns_are_asked_for(product, dtype, column):
    csr = long_windows(200, 900, dtype)
    B = small(csr, 272, dtype)
    B[int(csr.indices[100]), column] = NAN
    C, played = product(csr, B, blocks=3)
    assert played.later[-1] == "redo_windows"
    assert_same(C, expected(csr, B))


@pytest.mark.parametrize("dtype, out_dtype", [(F32, F32), (F16, F32), (BF16, BF16)], ids=str)
def test_whole_windows_with_epilogue_batches_and_another_order(product, dtype, out_dtype):
    bias = (torch.arange(136) % 8).float()
    played = check_epilogue(product, bias, dtype, out_dtype, blocks=1)
    assert played.later[-1] == "redo_windows"


def test_whole_windows_of_a_pattern_and_their_mean(product):
    assert check_mean(product, 132, blocks=1).later[-1] == "redo_windows"


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_infinities_and_stored_zeros_of_A_in_whole_windows(product, dtype):
    csr = long_windows(dtype=dtype)
    csr.values[5], csr.values[77], csr.values[300] = INF, NAN, 0.0
    B = small(csr, 132 if dtype is F32 else 136, dtype)
    B[int(csr.indices[300]), 3] = INF  # a stored zero times Inf is NaN
    C, played = product(csr, B, blocks=1)
    assert played.later[-1] == "redo_windows"
    assert_same(C, expected(csr, B))


VOLTRIX = [
    (F32, 96, None), (F32, 268, "windows of 32"), (F16, 136, "bits"), (BF16, 72, "windows of 32"),
    (F16, 40, None),
]  # fmt: skip


@pytest.mark.parametrize("dtype, n, ablation", VOLTRIX, ids=str)
def test_long_windows_of_voltrix(product, dtype, n, ablation):
    csr = long_windows(dtype=dtype)
    B = spoil(small(csr, n, dtype))
    C, played = product(csr, B, system="voltrix", ablation=ablation)
    assert played.asked
    assert_same(C, expected(csr, B))


def test_epilogue_and_batches_of_voltrix(product):
    csr = long_windows(70, 1300, F16)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2))
    B = spoil(small(csr, 72, F16, 2), 0.02)
    B[1, 3, 9] = -INF
    bias = torch.arange(72).float()
    C, _ = product(
        csr, B, Epilogue(alpha=0.5, beta=2.0, bias=bias, relu=True), order=order, system="voltrix"
    )
    wanted = 0.5 * expected(csr, B) + 14.0 + bias
    assert_same(C, torch.where(wanted < 0, 0.0, wanted))


def test_a_pattern_of_voltrix_with_stored_bits_alone(product):
    csr = long_windows(70, 1300)
    pattern = st.CSR(csr.indptr, csr.indices, None, csr.shape)
    B = spoil(small(pattern, 68, F32))
    assert_same(product(pattern, B, system="voltrix", blocks=1)[0], expected(pattern, B))
