"""The window kernel replayed: B is read from where its producers put it, and C is A·B.

A replay that passes says something only if it fails where a rule is broken: waits, descriptors,
places and numbers are left out or changed here once each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from sparsetile import CSR
from sparsetile.formats.bittcf import round_tf32
from sparsetile.kernels.wcsr import SPMM_WCSR, STAGED_COLUMNS, wcsr_config, window_tiles
from sparsetile.systems import processors, tile_runner, wcsr, wcsr_runner
from tests.contracts.cases import MATRICES, csr_of, random_matrix
from tests.kernels import replay_wcsr
from tests.kernels.replay import Machine, device_fields, host_letters
from tests.kernels.replay_bcsr import Turn
from tests.kernels.replay_cases import WindowCase, strided, with_tiles
from tests.kernels.replay_mma import G, T
from tests.kernels.replay_wcsr import (
    OCTETS,
    PRODUCERS,
    REPLAYS,
    WARP,
    WARPS,
    Block,
    Product,
    Shared,
    Steps,
    column_place,
    core_matrices,
    exchange,
    fields_of,
    fragment_places,
    plain_descriptor,
    staged,
    swizzled,
)
from tests.kernels.replay_wgmma import Barrier, Descriptor, box_places, descriptor
from tests.kernels.whole_numbers import operand, reference, whole_numbers

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = [F32, F16, BF16]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(REPLAYS)
    made.install(monkeypatch)
    pad = wcsr_runner.pad

    def held(matrix: Tensor, by: tuple[int, int]) -> Tensor:
        padded = pad(matrix, by)
        made.hold(padded)
        return padded

    monkeypatch.setattr(wcsr_runner, "pad", held)
    return made


class Finite(WindowCase):
    """A product in which nothing may be computed again: what is NaN by mistake would be mended."""

    def spmm(self, B: Tensor, out: Tensor | None = None, **epilogue: Any) -> Tensor:
        found = super().spmm(B, out, **epilogue)
        assert self.machine.recomputed == 0, "sums were not finite"
        return found


def windows(tiles: list[int], dtype: torch.dtype, pattern: bool = False, last: int = 13) -> CSR:
    """A matrix whose windows of 64 rows have these tiles; the last has ``last`` rows."""
    return with_tiles(tiles, dtype, pattern, stack=8, last=last)


def test_host_and_device_name_the_same_kinds_of_parameters_in_the_same_order():
    fields = device_fields(SPMM_WCSR)
    assert [letter for _, letter in fields] == host_letters(SPMM_WCSR)
    names = [name for name, _ in fields]
    assert names == [
        "items", "parent_of_slot", "nodes", "arrivals", "b", "c", "window_row_ptr",
        "strip_value_ptr", "columns", "bitmaps", "values", "order", "indptr", "bias", "partials",
        "b_row_bytes", "c_row_stride", "b_batch_stride", "c_batch_stride", "alpha", "beta",
        "item_count", "rows", "n", "slot_count", "node_count", "epilogue", "mean", "relu",
    ]  # fmt: skip
    assert names.index("arrivals") == tile_runner._ARRIVALS
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
    """Odd tiles, odd steps, more steps than stages, more steps than one load of value offsets."""
    monkeypatch.setattr(processors, "PROCESSORS", 1)
    csr = windows([tiles], dtype)
    B = operand(csr, 8, dtype)
    case = Finite(machine, csr, 8, dtype)
    assert case.meta["slots"] == 0
    assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("workers", [2, 3, 7, 40])
def test_cut_windows_are_joined_whichever_block_comes_last(machine, monkeypatch, dtype, workers):
    monkeypatch.setattr(wcsr, "A_SHARE", 1)
    csr = windows([2, 97, 0, 0, 41, 1], dtype)
    csr = csr.with_values(csr.values.sign())  # sums that 16 bits hold
    for n, slabs in ((24, 1), (264, 2)):
        monkeypatch.setattr(processors, "PROCESSORS", workers * slabs)
        B = operand(csr, n, dtype).clamp(max=1)
        case = Finite(machine, csr, n, dtype)
        assert case.meta["slots"] > 1
        assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))


def test_the_bits_do_not_depend_on_who_comes_first(machine, monkeypatch):
    monkeypatch.setattr(processors, "PROCESSORS", 6)
    csr = csr_of(random_matrix(64, 700, 0.3))
    B = torch.randn(700, 16)
    case = Finite(machine, csr, 16, F32)
    assert case.meta["slots"] >= 3
    results = []
    for machine.seed in range(4):
        results.append(case.spmm(B))
    assert all(torch.equal(one, results[0]) for one in results)
    rounded = round_tf32(csr.values).double(), round_tf32(B).double()
    exact = reference(csr.with_values(rounded[0]), rounded[1])
    assert torch.allclose(results[0].double(), exact, rtol=1e-5, atol=1e-5)


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


# -- mistakes are seen


def _always_open(ring: str) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        make = Block.__init__

        def made(self, *given) -> None:
            make(self, *given)
            for barrier in getattr(self, ring):
                barrier.wait = lambda parity: iter(())

        patch.setattr(Block, "__init__", made)

    return change


def _field(call: str, which: int, text: str) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        fields = fields_of(call)
        fields[which] = text
        patch.setattr(replay_wcsr, "fields_of", lambda name: fields)

    return change


def _set(owner: object, name: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def _rings_begin_again(patch: pytest.MonkeyPatch) -> None:
    consume = Block.consume

    def again(self, warp, at, begin, end, tile):
        return consume(
            self, warp, (Turn(self.p.stages), Turn(self.p.tile_stages)), begin, end, tile
        )

    patch.setattr(Block, "consume", again)


def _groups_take_the_same(patch: pytest.MonkeyPatch) -> None:
    make = Steps.__init__
    patch.setattr(Steps, "__init__", lambda self, block, group: make(self, block, 0))


def _tails_are_whole(patch: pytest.MonkeyPatch) -> None:
    decode = Block.decode
    patch.setattr(
        Block, "decode", lambda self, warp, at, tiles: decode(self, warp, at, self.p.step_tiles)
    )


def _rows_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    row_of = Product.row_of
    patch.setattr(Product, "row_of", lambda self, window, r: row_of(self, window, r ^ 1))


def _one_arrival_more(patch: pytest.MonkeyPatch) -> None:
    make = Barrier.__init__
    patch.setattr(Barrier, "__init__", lambda self, count: make(self, count + (count == 8)))


def _lost_tail_of_a_step(patch: pytest.MonkeyPatch) -> None:
    copy = Shared.copy_bytes

    def shorter(self, to, source, first, size, barrier):
        copy(self, to, source, first, max(size - 16, 16), barrier)
        barrier.bytes -= min(size - 16, 16)

    patch.setattr(Shared, "copy_bytes", shorter)


MISTAKES = {
    "no wait for tiles": _always_open("tiles_full"),
    "no wait for the tiles' readers": _always_open("tiles_empty"),
    "no wait for rows of B": _always_open("full"),
    "no wait for the rows' readers": _always_open("empty"),
    "no fence": _set(Shared, "fence", lambda *_: None),
    "rings begin again with each item": _rings_begin_again,
    "both groups of producers take the same steps": _groups_take_the_same,
    "a barrier counts one more": _one_arrival_more,
    "a step's tail belongs to its window": _tails_are_whole,
    "copies of tiles lack a piece": _lost_tail_of_a_step,
    "rows of C": _rows_of_a_neighbour,
    "registers of sums": _set(
        replay_wcsr, "fragment_places", lambda sums: tuple(reversed_halves(sums))
    ),
}
OF_FLOAT32 = {
    "places of columns": _set(replay_wcsr, "column_place", lambda lane: lane),
    "next k": _field("plain_descriptor", 1, "kCols * 8"),
    "next columns": _field("plain_descriptor", 2, "256"),
    "next tile": _field("plain_descriptor", 0, "i * kCols * 16"),
    "rounding": _set(replay_wcsr, "round_tf32", lambda bits: bits),
}
OF_16_BITS = {
    "swizzle": _set(replay_wcsr, "swizzled", lambda lane, row: lane + 0 * row),
    "next columns": _field("descriptor", 1, "kStepRows * 64"),
    "next k": _field("descriptor", 2, "2048"),
    "next tile": _field("descriptor", 0, "i * 512"),
    "order of ids": _set(replay_wcsr, "staged", lambda column: column),
    "exchange": _set(replay_wcsr, "exchange", lambda word: word),
}


def reversed_halves(sums: int) -> list[np.ndarray]:
    row, column = fragment_places(sums)
    return [row ^ 8, column]


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_product_needs_each_of_its_rules(machine, monkeypatch, mistake, dtype):
    assert _is_seen(machine, monkeypatch, MISTAKES[mistake], dtype)


@pytest.mark.parametrize("mistake", OF_FLOAT32)
def test_float32_needs_each_of_its_rules(machine, monkeypatch, mistake):
    assert _is_seen(machine, monkeypatch, OF_FLOAT32[mistake], F32)


@pytest.mark.parametrize("mistake", OF_16_BITS)
def test_16_bits_need_each_of_their_rules(machine, monkeypatch, mistake):
    assert _is_seen(machine, monkeypatch, OF_16_BITS[mistake], F16)


def _is_seen(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[pytest.MonkeyPatch], None],
    dtype: torch.dtype,
) -> bool:
    monkeypatch.setattr(processors, "PROCESSORS", 2)
    csr = windows([45, 3, 50, 1, 7, 9, 37], dtype)
    csr = csr.with_values(csr.values.sign())
    B = operand(csr, 72, dtype).clamp(max=1)
    B[:, 1] = torch.where(B[:, 1].isnan(), B[:, 1], torch.arange(len(B)).to(dtype) % 2)
    expected = reference(csr, B)
    if dtype is F32:  # what is cut instead of rounded shows
        B = B + 3 * 2.0**-12
        expected = reference(csr, round_tf32(B))
    case = Finite(machine, csr, 72, dtype)

    def right() -> bool:
        found = case.spmm(B).double()
        return torch.allclose(found, expected, rtol=2.0**-14, atol=2.0**-8, equal_nan=False)

    assert right()
    with monkeypatch.context() as patch:
        mistake(patch)
        for machine.seed in range(5):  # a missing wait shows in some orders alone
            try:
                if not right():
                    return True
            except AssertionError:
                return True
    return False


@pytest.mark.parametrize("field, change", [(0, 1), (1, 1), (2, -1), (3, 1)])
def test_a_wrong_schedule_does_not_pass(machine, monkeypatch, field, change):
    monkeypatch.setattr(processors, "PROCESSORS", 3)
    monkeypatch.setattr(wcsr, "A_SHARE", 1)
    csr = windows([30, 3, 50, 1], F32)
    case = Finite(machine, csr, 8, F32)
    items = case.stage.parts[7][: case.meta["items"]]
    one = int(torch.nonzero(items[:, 3] < 0 if field == 0 else items[:, 3] >= 0)[0])
    B = operand(csr, 8, F32) + 1
    expected = reference(csr, B).to(F32)
    assert torch.equal(case.spmm(B), expected)
    items[one, field] += change
    with pytest.raises(AssertionError):
        assert torch.equal(case.spmm(B), expected)


@pytest.mark.parametrize("part", ["strip_value_ptr", "column", "bit", "worker"])
def test_a_wrong_number_of_the_format_does_not_pass(machine, monkeypatch, part):
    monkeypatch.setattr(processors, "PROCESSORS", 2)
    csr = windows([9, 3, 20, 1], F32)
    case = Finite(machine, csr, 8, F32)
    B = operand(csr, 8, F32)
    B[:, 0] = torch.arange(len(B))  # no two rows are equal
    expected = reference(csr, B).to(F32)
    assert torch.equal(case.spmm(B), expected)
    if part == "strip_value_ptr":
        case.stage.parts[1][5] += 1
    elif part == "column":
        case.stage.parts[2][1, 5] += 1
    elif part == "bit":
        case.stage.parts[3][2, 3] ^= 1
    else:
        case.stage.parts[7][case.meta["items"], 0] += 1  # an item of nobody
    with pytest.raises(AssertionError):
        assert torch.equal(case.spmm(B), expected)


@pytest.mark.parametrize("part, tiles", [(1, 1), (2, 3), (3, 3)])
def test_without_its_margin_the_last_step_would_be_read_past_the_end(machine, part, tiles):
    """The last window has one tile of a step of four."""
    csr = windows([3, 1], F32)
    case = Finite(machine, csr, 8, F32)
    parts = list(case.stage.parts)
    strips = WARPS if part == 1 else 1
    kept = (4 + tiles) * strips + (4 if part == 1 else 0)
    fits, short = parts[part][:kept].clone(), parts[part][: kept - 1].clone()
    machine.hold(fits, short)
    B = operand(csr, 8, F32)
    machine.hold(B)
    out = torch.empty(csr.shape[0], 8)
    machine.hold(out)
    for held, enough in ((short, False), (fits, part != 1)):
        parts[part] = held
        run = lambda: case.runner.spmm(parts, csr.values, case.packed, B, out)  # noqa: E731
        if enough:
            run()
            assert torch.equal(out, reference(csr, B).to(F32))
        else:
            with pytest.raises(AssertionError, match="access to elements"):
                run()
