"""The window kernel replayed: B is read from where its producers put it, and C is A·B.

That a broken rule is seen is in ``test_decode_wcsr_rules.py``.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparsetile import CSR
from sparsetile.core import device as processors
from sparsetile.formats.bittcf import round_tf32
from sparsetile.kernels.wcsr import (
    JOIN_WCSR,
    SPMM_WCSR,
    STAGED_COLUMNS,
    wcsr_config,
    window_tiles,
)
from sparsetile.systems.shared import tile_runner as tile_runner
from sparsetile.systems.wcsr import runner as wcsr_runner
from sparsetile.systems.wcsr import system as wcsr
from tests.contracts.cases import MATRICES, csr_of
from tests.kernels import replay_wcsr
from tests.kernels.replay import Machine, device_fields, host_letters
from tests.kernels.replay_cases import FiniteWindowCase as Finite
from tests.kernels.replay_cases import WindowCase, strided, with_tiles
from tests.kernels.replay_mma import G, T
from tests.kernels.replay_wcsr import (
    GROUPS,
    OCTETS,
    PRODUCERS,
    WARP,
    WARPS,
    Block,
    Product,
    column_place,
    core_matrices,
    fields_of,
    first_copy,
    fragment_places,
    plain_descriptor,
    swizzled,
)
from tests.kernels.replay_wcsr_rings import COPIERS, TileCopies
from tests.kernels.replay_wcsr_stores import exchange, staged
from tests.kernels.replay_wgmma import Descriptor, box_places, descriptor
from tests.kernels.whole_numbers import operand, reference, whole_numbers

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = [F32, F16, BF16]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return replay_wcsr.install(monkeypatch)


def windows(tiles: list[int], dtype: torch.dtype, pattern: bool = False, last: int = 13) -> CSR:
    """A matrix whose windows of 64 rows have these tiles; the last has ``last`` rows."""
    return with_tiles(tiles, dtype, pattern, stack=8, last=last)


def test_host_and_device_name_the_same_kinds_of_parameters_in_the_same_order():
    fields = device_fields(SPMM_WCSR)
    assert device_fields(JOIN_WCSR) == fields and host_letters(JOIN_WCSR) == host_letters(SPMM_WCSR)
    assert [letter for _, letter in fields] == host_letters(SPMM_WCSR)
    names = [name for name, _ in fields]
    assert names == [
        "items", "unused", "cuts", "unused_either", "b", "c", "window_row_ptr",
        "strip_value_ptr", "columns", "bitmaps", "values", "order", "indptr", "bias", "partials",
        "b_row_bytes", "c_row_stride", "b_batch_stride", "c_batch_stride", "alpha", "beta",
        "item_count", "rows", "n", "slot_count", "cut_count", "epilogue", "mean", "relu",
    ]  # fmt: skip
    assert names.index("unused_either") == tile_runner._ARRIVALS
    assert (names.index("b"), names.index("c")) == (tile_runner._B, tile_runner._C)
    assert names.index("partials") == tile_runner._PARTIALS
    assert names.index("b") * 8 == tile_runner._OPERANDS_OFFSET, "what a bound product patches"


# -- rows of B against operands, address by address


@pytest.mark.parametrize("cols", [128, 256])
def test_float32_lies_in_core_matrices_where_its_descriptor_finds_it(cols):
    """Staged id i of a tile is k = i; column 4l + j of 32 is n = 8j + 2 (l % 4) + l / 4."""
    steps = 4
    start, leading, stride = (
        [eval(field, {"i": i, "kCols": cols}) for i in range(steps)]
        for field in fields_of("plain_descriptor")
    )
    lane = np.arange(8)
    for i in range(steps):
        found = Descriptor.of(plain_descriptor(2048 + start[i], leading[i], stride[i]))
        for k in range(8):
            chunk, row = divmod(8 * i + k, 4)  # of four staged ids
            for j in range(4):
                for block in range(cols // 32):
                    put = 2048 + chunk * cols * 16 + block * 512 + column_place(lane) * 16
                    n = 32 * block + 8 * j + 2 * (lane % 4) + lane // 4
                    wanted = core_matrices(found, np.array(k), n)
                    assert np.array_equal(put + j * 128 + row * 4, wanted)


@pytest.mark.parametrize("cols", [128, 256])
def test_16_bits_lie_in_the_swizzle_where_their_descriptor_finds_them(cols):
    step_tiles = 8
    rows = 8 * step_tiles
    put = np.concatenate(
        [box_places(2048 + box * rows * 128, rows, 64) for box in range(cols // 64)], axis=1
    )
    lane, row = np.arange(8), np.arange(rows)[:, None]
    stored = 2048 + row * 128 + swizzled(lane, row) * 16
    assert np.array_equal(stored, put[:, :64:8]), "threads put it where the copy engine would"
    for i in range(0, step_tiles, 2):
        names = {"i": i, "kStepRows": rows}
        start, leading, stride = (eval(field, names) for field in fields_of("descriptor"))
        found = Descriptor.of(descriptor(2048 + start, leading, stride))
        addresses = found.mn_major(np.arange(16)[:, None], np.arange(cols))
        assert np.array_equal(addresses, put[8 * i : 8 * i + 16])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", window_tiles(), ids=lambda tile: f"{tile.columns} columns")
def test_producers_load_and_store_each_part_of_a_step_once(machine, monkeypatch, dtype, tile):
    """Which row and column each thread loads, and that what it stores fills the stage."""
    csr = windows([tile.step_tiles(dtype)], dtype, last=64)
    made: list[Product] = []
    monkeypatch.setattr(Product, "run", lambda self, grid: made.append(self))
    monkeypatch.setattr(Product, "check_writes", lambda *_: None)
    Finite(machine, csr, tile.columns, dtype).spmm(operand(csr, tile.columns, dtype))
    block = Block(made[0], 0, 0, 0)
    product = block.p
    loaded, stored = [], []
    monkeypatch.setattr(
        block, "load_inside", lambda row, column: loaded.append((row, column)) or np.zeros((32, 4))
    )
    monkeypatch.setattr(block.shared, "store", lambda at, words: stored.append(at))
    monkeypatch.setattr(
        block.shared, "read", lambda at, kind, count=1: at[:, None] // 4 + np.arange(count)
    )
    for warp in range(WARPS, WARPS + PRODUCERS // WARP):
        for half in range(2):
            block.load_rows(warp, 0, True, half)
            block.store_rows(warp, np.zeros((product.loads, 32, 4), np.uint32), 0, half)
    rows, columns = (np.concatenate(part) for part in zip(*loaded, strict=True))
    each = 16 // dtype.itemsize
    seen = np.zeros((product.step_rows, tile.columns), dtype=int)
    np.add.at(seen, (rows[:, None], columns[:, None] + np.arange(each)), 1)
    assert (seen == 1).all()
    places = np.sort(np.concatenate(stored))
    assert np.array_equal(places, np.arange(0, product.stage_bytes, 16))
    assert OCTETS * 8 == PRODUCERS


def test_column_ids_are_staged_as_the_kernel_takes_them():
    """k = t of TF32 is column 2t, k = t + 4 column 2t + 1, as the lanes decode them."""
    t = np.arange(4)
    columns = np.array(STAGED_COLUMNS)
    assert np.array_equal(columns[t], 2 * t) and np.array_equal(columns[t + 4], 2 * t + 1)
    assert np.array_equal(columns[staged(np.arange(8))], np.arange(8))


def test_registers_of_a_warp_hold_every_sum_once_and_stores_have_neighbouring_columns():
    row, column = fragment_places(64)
    assert len({*zip(row.ravel().tolist(), column.ravel().tolist(), strict=True)}) == 16 * 128
    # float32: sums e, 4 + e, 8 + e, 12 + e of a group are columns 16e + 4t and on of B.
    n_of = np.empty(32, dtype=int)
    lane = np.arange(8)
    for j in range(4):
        n_of[4 * lane + j] = 8 * j + column_place(lane)
    column_of = np.argsort(n_of)
    for e in range(2):
        mine = column_of[column[:, [e, 4 + e, 8 + e, 12 + e]]]
        assert np.array_equal(mine, (16 * e + 4 * T)[:, None] + np.arange(4))
    # 16 bits: after the exchange lane t has eight neighbours.
    first, second = (exchange(column[:, [e, 4 + e, 8 + e, 12 + e]]) for e in range(2))
    eight = np.stack([first, second], 2).reshape(32, 8)
    assert np.array_equal(eight, (8 * T)[:, None] + np.arange(8))
    assert np.array_equal(row[:, 0], G) and np.array_equal(row[:, 2], G + 8)


# -- whole products


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [8, 128, 136, 256, 264])
def test_the_replay_of_windows_is_their_product(machine, dtype, pattern, n):
    csr = windows([3, 1, 0, 9, 4], dtype, pattern)
    B = operand(csr, n, dtype)
    assert torch.equal(Finite(machine, csr, n, dtype).spmm(B), reference(csr, B).to(dtype))
    width = window_tiles()[n > 128]
    assert machine.configs[-1] == wcsr_config(dtype, width, not pattern)


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("name", MATRICES)
def test_the_replay_of_every_matrix_is_its_product(machine, monkeypatch, name, pattern):
    """Rows of B that no entry names are NaN, but for row 0, which a step's tail reads."""
    monkeypatch.setattr(processors, "PROCESSORS", 7)
    for dtype, n in ((F32, 7), (F16, 16)):
        csr = whole_numbers(name, dtype, pattern)
        B = operand(csr, n, dtype)
        B[:1] = B[:1].nan_to_num()
        found = Finite(machine, csr, n, dtype).spmm(B)
        assert torch.equal(found, reference(csr, B).to(dtype))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("tiles", [*range(1, 10), 31, 33, 70, 140])
def test_a_window_of_any_length_goes_through_both_rings(machine, monkeypatch, dtype, tiles):
    """Odd tiles, odd steps, more steps than stages, than warps that copy."""
    monkeypatch.setattr(processors, "PROCESSORS", 1)
    csr = windows([tiles], dtype)
    B = operand(csr, 8, dtype)
    case = Finite(machine, csr, 8, dtype)
    assert case.meta["slots"] == 0
    assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))


@pytest.mark.parametrize("tiles", [1, 9, 40, 90, 140])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_the_warps_that_bring_B_copy_As_tiles_in_turn(machine, monkeypatch, dtype, tiles):
    """Warp w of group g copies step 2w + g, and then every eighth."""
    monkeypatch.setattr(processors, "PROCESSORS", 1)
    copied = []
    copy = TileCopies.next

    def spy(self):
        if self.at.more():
            copied.append((self.number_of_warp, self.at.number))
        return copy(self)

    make = TileCopies.__init__
    made = itertools.count()

    def numbered(self, block, first):
        make(self, block, first)
        self.number_of_warp = first
        next(made)

    monkeypatch.setattr(TileCopies, "__init__", numbered)
    monkeypatch.setattr(TileCopies, "next", spy)
    csr = windows([tiles, 2, 0, 3], dtype)
    case = Finite(machine, csr, 8, dtype)
    B = operand(csr, 8, dtype)
    assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))
    each = window_tiles()[0].step_tiles(dtype)
    steps = sum(-(-count // each) for count in (tiles, 2, 3))
    assert sorted(step for _, step in copied) == list(range(steps)), "each once"
    assert all(step % COPIERS == first for first, step in copied)
    assert next(made) == COPIERS == GROUPS * PRODUCERS // WARP
    firsts = sorted(first_copy(g, w) for g in range(GROUPS) for w in range(COPIERS // GROUPS))
    assert firsts == list(range(COPIERS))


@pytest.mark.parametrize("dealt", [False, True])
def test_more_windows_than_blocks_of_threads_keep_their_rings(machine, monkeypatch, dealt):
    monkeypatch.setattr(processors, "PROCESSORS", 3)
    monkeypatch.setattr(processors, "L2_BYTES", 0 if dealt else 2**30)
    csr = windows([3, 1, 0, 9, 4, 0, 0, 2, 5, 1, 1, 6, 0, 2, 8, 3], F16)
    B = operand(csr, 40, F16)
    case = Finite(machine, csr, 40, F16)
    assert case.meta["workers"] == 3
    assert torch.equal(case.spmm(B), reference(csr, B).to(F16))


def test_values_may_begin_anywhere_in_sixteen_bytes(machine):
    for dtype, each in ((F32, 4), (F16, 8)):
        csr = windows([5, 3, 4, 7, 9, 2, 3, 6, 5], dtype)
        for drop in range(each):  # the last values end anywhere, too
            keep = csr.nnz - drop
            cut = CSR(csr.indptr.clamp(max=keep), csr.indices[:keep], csr.values[:keep], csr.shape)
            case = Finite(machine, cut, 8, dtype)
            case.packed[keep:] = float("nan")  # what fills the last piece is never used
            B = operand(cut, 8, dtype)
            assert torch.equal(case.spmm(B), reference(cut, B).to(dtype))
        begins = case.stage.parts[1][::WARPS][: case.meta["items"]]
        assert len({int(begin) % each for begin in begins}) > 2


def test_a_full_step_fills_its_place(machine):
    for dtype, before in ((F32, 3), (F16, 7), (F16, 0)):
        dense = np.zeros((128, 80))
        dense[0, :before] = 1
        dense[64:] = np.random.default_rng(1).integers(1, 4, (64, 80))
        csr = csr_of(sp.csr_array(dense), dtype=dtype)
        B = operand(csr, 8, dtype)
        assert torch.equal(Finite(machine, csr, 8, dtype).spmm(B), reference(csr, B).to(dtype))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_an_order_of_the_rows_changes_nothing(machine, dtype):
    csr = whole_numbers("odd sizes", dtype)
    B = operand(csr, 24, dtype)
    case = Finite(machine, csr, 24, dtype, order=torch.randperm(csr.shape[0]))
    assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))


@pytest.mark.parametrize("how", ["row stride", "misaligned", "same batch again"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("dtype, n", [(F16, 40), (F16, 13), (F32, 40), (F32, 13)])
def test_any_stride_and_batch_of_B_and_C_is_right(machine, how, batch, dtype, n):
    csr = windows([3, 2], dtype)
    B = strided(operand(csr, n, dtype, batch), how)
    rows = csr.shape[0]
    out = strided(torch.full((*batch, rows, n), 7.0, dtype=dtype), "row stride")
    around = torch.as_strided(out, (*batch, rows, n + 5), out.stride())
    Finite(machine, csr, n, dtype).spmm(B, out)
    assert torch.equal(out, reference(csr, B).to(dtype))
    assert bool(around[..., n:].isnan().all()), "columns beyond C were written"


def test_operands_of_whole_accesses_are_not_copied(machine, monkeypatch):
    monkeypatch.setattr(wcsr_runner, "pad", None)
    monkeypatch.setattr(wcsr_runner, "padded_like", None)
    csr = windows([3, 2], F16)
    B = operand(csr, 48, F16)[:, :40]
    out = torch.full((csr.shape[0], 48), 7.0, dtype=F16)
    Finite(machine, csr, 40, F16).spmm(B, out[:, :40])
    assert torch.equal(out[:, :40], reference(csr, B).to(F16)) and bool((out[:, 40:] == 7).all())


@pytest.mark.parametrize("dtype, out_dtype", [(F32, F32), (F16, F16), (F16, F32), (BF16, F32)])
@pytest.mark.parametrize("n", [24, 21])
def test_alpha_beta_mean_bias_and_relu_act_on_the_right_elements(
    machine, monkeypatch, dtype, out_dtype, n
):
    monkeypatch.setattr(processors, "PROCESSORS", 3)
    monkeypatch.setattr(wcsr, "A_SHARE", 1)
    csr = windows([3, 0, 1, 29, 2], dtype)
    B, bias = operand(csr, n, dtype), torch.arange(n, dtype=F32) - 9
    rows = csr.shape[0]
    plain, before = reference(csr, B), torch.randint(-3, 4, (rows, n)).to(out_dtype)
    case = Finite(machine, csr, n, dtype, order=torch.randperm(rows))
    machine.hold(bias)
    empty = torch.empty(rows, n, dtype=out_dtype)
    found = case.spmm(B, before.clone(), alpha=0.5, beta=2.0)
    assert torch.equal(found, (plain / 2 + 2 * before).to(out_dtype))
    found = case.spmm(B, empty, alpha=2.0, bias=bias, relu=True)
    assert torch.equal(found, torch.relu(2 * plain + bias).to(out_dtype))
    lengths = csr.row_lengths().clamp(min=1).unsqueeze(1)
    mean = case.spmm(B, empty, mean=True).double()
    assert torch.allclose(mean, plain / lengths, rtol=torch.finfo(out_dtype).eps)
    assert machine.configs[-1]["OUTPUT"] == {F32: "F32", F16: "F16"}[out_dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("workers", [1, 4])
def test_inf_and_nan_of_B_reach_only_the_rows_that_refer_to_them(
    machine, monkeypatch, dtype, workers
):
    monkeypatch.setattr(processors, "PROCESSORS", workers)
    monkeypatch.setattr(wcsr, "A_SHARE", 1)
    csr = windows([2, 30, 3], dtype)
    B = operand(csr, 12, dtype).nan_to_num()
    B[3, 2], B[40, 5], B[41, 5] = float("inf"), float("nan"), -float("inf")
    case = WindowCase(machine, csr, 12, dtype)
    assert (case.meta["slots"] > 0) is (workers > 1)
    found = case.spmm(B, relu=True, alpha=-1.0)
    assert machine.recomputed > 0
    dense = torch.zeros(csr.shape, dtype=torch.bool)
    dense[csr.row_ids(), csr.indices.long()] = True
    assert torch.equal(found[:, 5].isnan(), dense[:, 40])
    finite = ~(dense[:, 40] | dense[:, 41])
    expected = torch.relu(-reference(csr, B.nan_to_num(posinf=0, neginf=0))).to(dtype)
    assert torch.equal(found[finite, 5], expected[finite, 5])
    others = [column for column in range(12) if column not in (2, 5)]
    assert torch.equal(found[:, others], expected[:, others])


def test_float32_is_rounded_to_tf32_not_cut(machine):
    csr = csr_of(sp.csr_array(np.eye(64)))
    B = torch.randn(64, 8)
    found = Finite(machine, csr, 8, F32).spmm(B)
    assert torch.equal(found, round_tf32(B)) and not torch.equal(found, B)


def test_the_quick_way_of_a_bound_product_is_the_same(machine):
    csr = windows([3, 2, 1], F16)
    case = Finite(machine, csr, 32, F16)
    bound = case.runner.bind(case.stage.parts, csr.values, case.packed)
    for n in (32, 7):
        B = operand(csr, n, F16)
        machine.hold(B)
        assert torch.equal(bound(B), reference(csr, B).to(F16))
        assert torch.equal(bound(B), reference(csr, B).to(F16))
    assert [prepared is None for prepared in bound._prepared.values()] == [False, True]
