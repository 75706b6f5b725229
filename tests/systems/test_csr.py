"""What the csr system decides: lengths of items, the order of slabs, and what a grid holds."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from sparsetile.balance import l2_reloads
from sparsetile.engines.request import Request
from sparsetile.engines.rows import lengths as row_lengths
from sparsetile.engines.rows import runner as csr_runner
from sparsetile.engines.rows import work as row_work
from sparsetile.engines.rows.lengths import (
    BUSY_WARPS,
    FEW,
    FEW_SEGMENT,
    FEW_UNCUT,
    LANES_PER_SM,
    LONGEST_SEGMENT,
    MANY,
    MANY_NARROW,
    SHARED_LENGTHS,
    SHARED_UNCUT,
    SHORT_SEGMENT,
    SMALL_WAVES,
    SPARE,
    UNCUT,
    UNCUT_NARROW,
    WIDE_LENGTHS,
    WIDER_SHARED,
    ItemLengths,
    item_lengths,
    segment_length,
)
from sparsetile.formats.units import Units
from sparsetile.intake import as_csr
from sparsetile.kernels.csr import LOCAL, LOCAL_BUNDLES, SMALL_BYTES, RowShape
from sparsetile.launch.interface import Epilogue
from sparsetile.reorder import Permutation
from sparsetile.systems import runner
from sparsetile.systems.csr.system import CSRSystem
from tests.contracts.cases import csr_of, random_matrix, with_dense_row
from tests.host import answer_on_host

NARROW, WIDE = 128, 512  # bytes of a row of B


def rows_of(*lengths: int) -> Units:
    length = torch.tensor(lengths)
    begin = torch.cumsum(length, 0) - length
    return Units(torch.arange(len(lengths)), begin, length, torch.zeros(len(lengths)).bool())


@pytest.mark.parametrize("row_bytes, limit", [(NARROW, UNCUT_NARROW), (WIDE, UNCUT)])
def test_no_row_is_cut_if_none_is_very_long(row_bytes, limit):
    assert segment_length(rows_of(3, limit, 40), row_bytes) >= limit
    assert segment_length(rows_of(3, limit + 1, 40), row_bytes) == SHORT_SEGMENT


@pytest.mark.parametrize("row_bytes, many", [(NARROW, MANY_NARROW), (WIDE, MANY)])
def test_items_are_longer_if_entries_are_many(row_bytes, many):
    short_rows = [20] * (many // 20 - 100)
    few, enough = rows_of(1000, *short_rows[:-1000]), rows_of(1000, *short_rows, *[20] * 100)
    assert segment_length(few, row_bytes) == SHORT_SEGMENT
    assert segment_length(enough, row_bytes) == 2 * SHORT_SEGMENT


def test_rows_that_are_nearly_all_long_give_each_warp_one_item():
    entries = 512 * BUSY_WARPS
    assert segment_length(rows_of(*[entries // 100] * 100), WIDE) == 512


@pytest.mark.parametrize("total, expected", [(10**8, LONGEST_SEGMENT), (10**5, SHORT_SEGMENT)])
def test_the_share_of_a_warp_has_limits(total, expected):
    assert segment_length(rows_of(*[total // 20] * 20), WIDE) == expected


@pytest.mark.parametrize(
    "row_bytes, uncut", [(NARROW, UNCUT), (WIDE, FEW_UNCUT), (1024, FEW_UNCUT), (2048, UNCUT)]
)
def test_long_rows_of_few_entries_are_cut_short(row_bytes, uncut):
    many = [2] * 60_000  # fill the GPU: no rows of a small product
    kept, cut = rows_of(*many, uncut), rows_of(*many, uncut + 1)
    assert item_lengths(kept, row_bytes, 132) == ItemLengths(UNCUT_NARROW, WIDE_LENGTHS[0])
    assert item_lengths(cut, row_bytes, 132) == ItemLengths(FEW_SEGMENT, WIDE_LENGTHS[0])
    enough = item_lengths(rows_of(*[2] * (FEW // 2), 300), WIDE, 132)
    assert enough.longest == SHORT_SEGMENT, "they hide the long row"


def test_rows_have_a_warp_sooner_if_most_are_short():
    assert item_lengths(rows_of(*[2] * 90_000, 40), WIDE, 132).wide == WIDE_LENGTHS[0]
    assert item_lengths(rows_of(*[2] * 90_000, 16), WIDE, 132).wide is None, "none is longer"
    assert item_lengths(rows_of(*[6] * 90_000, 40), WIDE, 132).wide is None


@pytest.mark.parametrize(
    "row_bytes, mean, shared",
    [(512, 5, True), (512, 4, False), (1024, 15, True), (1024, 14, False), (2048, 30, False)],
)
def test_blocks_share_long_rows_of_wider_products_if_the_mean_row_is_long(row_bytes, mean, shared):
    rows = rows_of(*[mean] * 20_000, 300)
    found = item_lengths(rows, row_bytes, 132)
    assert not found.small and (found.shared == WIDER_SHARED) == shared
    assert found.shared is not None or found.longest <= SHORT_SEGMENT
    assert item_lengths(rows, row_bytes, 132, shares=False).shared is None
    for other in (
        rows_of(*[mean] * 20_000, WIDER_SHARED),  # no row is longer
        rows_of(*[mean] * 20_000, 6000),  # of which there would be many pieces
        rows_of(*[mean] * 20_000, *[200] * 15_000),  # most entries are in such rows
        rows_of(*[35] * 20_000, 300),  # many entries
    ):
        assert item_lengths(other, row_bytes, 132).shared is None


@pytest.mark.parametrize("longest, uncut", [(512, 512), (513, 1024), (1024, 1024), (1025, 512)])
def test_a_row_that_alone_would_need_a_tree_is_not_cut(longest, uncut):
    rows = rows_of(*[3] * lanes_of(1.0), longest)
    assert item_lengths(rows, NARROW, 132).longest == uncut
    assert item_lengths(rows, NARROW, 132, shares=False).longest == 512


def test_one_long_row_makes_a_product_small():
    short = [3] * lanes_of(1.0)
    assert item_lengths(rows_of(*short, 129), NARROW, 132).small
    assert not item_lengths(rows_of(*short, 128), NARROW, 132).small


@pytest.mark.parametrize("row_bytes", [NARROW, WIDE])
def test_entries_of_short_items_are_known_from_lengths(row_bytes):
    draw = torch.Generator().manual_seed(3)
    for longest in (20, 70, 200, 700):
        long = torch.randint(20, longest + 1, (60,), generator=draw).tolist()
        for count in (50, 30_000):
            units = rows_of(*torch.randint(0, 9, (count,), generator=draw).tolist(), *long)
            lengths = item_lengths(units, row_bytes, 132)
            if not lengths.small:  # tiles are chosen as if short rows among many had no warp
                lengths = dataclasses.replace(lengths, wide=None)
            made = lengths.schedule(units)
            short = made.items[sum(made.sections[:3]) :]
            entries = int((short[:, 2] - short[:, 1]).sum())
            assert lengths.short(units) == (short.shape[0], entries)
            assert item_lengths(units, row_bytes, 132).short(units) == lengths.short(units)


def lanes_of(waves: float) -> int:
    """Groups of eight lanes that fill an H200 so often."""
    return round(waves * 132 * LANES_PER_SM / 8)


def test_few_long_rows_of_a_small_product_have_a_thread_block_and_middling_ones_a_warp():
    short = [3] * lanes_of(1.0)
    found = item_lengths(rows_of(*short, *[20] * 50, *[100] * 50), NARROW, 132)
    assert found == ItemLengths(UNCUT_NARROW, WIDE_LENGTHS[0], SHARED_LENGTHS[0], True)
    spare = SPARE * 132 * LANES_PER_SM
    many = [100] * int(spare / 96 + 1)
    found = item_lengths(rows_of(*short, *many, *[300] * 9), NARROW, 132)
    assert found.shared == 128, "only what few rows exceed"
    middling = [20] * int(spare / 24 + 1)
    long = [100] * 60
    assert item_lengths(rows_of(*short, *middling, *long), NARROW, 132).wide == 24
    alone = item_lengths(rows_of(*middling, *long), NARROW, 132)
    assert alone.wide == 16, "lanes without work are spare"


def test_rows_of_a_small_product_are_cut_late_if_blocks_share_them():
    rows = rows_of(*[3] * 1000, 400, 3000)
    assert segment_length(rows, NARROW) == SHORT_SEGMENT
    found = item_lengths(rows, NARROW, 132)
    assert found.longest == SHARED_UNCUT and found.schedule(rows).slot_count == 6
    assert found.schedule(rows).sections[0] == 7


@pytest.mark.parametrize(
    "row_bytes, waves, small",
    [(NARROW, 1.0, True), (SMALL_BYTES + 4, 1.0, False), (NARROW, SMALL_WAVES + 0.1, False)],
)
def test_wide_products_and_those_that_fill_the_gpu_are_not_small(row_bytes, waves, small):
    rows = rows_of(*[3] * lanes_of(waves), *[100] * 100)
    found = item_lengths(rows, row_bytes, 132)
    assert found.small == small and (found.shared is not None) == small
    assert item_lengths(rows_of(), row_bytes, 132) == ItemLengths(SHORT_SEGMENT)


def test_rows_and_bundles_that_leave_the_gpu_unfilled_have_a_warp_each():
    count = 132 * LANES_PER_SM // 32
    even = rows_of(*[48] * count)
    assert item_lengths(even, NARROW, 132).wide == WIDE_LENGTHS[0]
    assert item_lengths(even, NARROW, 132).small
    assert item_lengths(rows_of(*[48] * (count + 1)), NARROW, 132) == ItemLengths(UNCUT_NARROW)
    bundles = dataclasses.replace(even, bundled=torch.ones(count, dtype=torch.bool))
    assert item_lengths(bundles, NARROW, 132) == ItemLengths(UNCUT_NARROW, WIDE_LENGTHS[0])
    assert item_lengths(bundles, SMALL_BYTES + 4, 132) == ItemLengths(UNCUT_NARROW)
    assert item_lengths(bundles, NARROW, 66) == ItemLengths(UNCUT_NARROW), "it is filled"


def test_rows_of_about_the_same_length_keep_their_groups():
    found = item_lengths(rows_of(*[60] * lanes_of(0.9)), NARROW, 132)
    assert found == ItemLengths(UNCUT_NARROW)
    short = item_lengths(rows_of(*[3] * lanes_of(0.9)), NARROW, 132)
    assert short == ItemLengths(UNCUT_NARROW), "no row is long"


def test_a_matrix_without_rows_has_an_item_length_all_the_same():
    assert segment_length(rows_of(), WIDE) == SHORT_SEGMENT


@pytest.mark.parametrize("bundles, limit", [(False, LOCAL), (True, LOCAL_BUNDLES)])
def test_slabs_come_first_if_rows_of_b_are_used_near_each_other(bundles, limit):
    assert RowShape(row_reloads=limit).slabs_first(bundles)
    assert not RowShape(row_reloads=limit + 0.01).slabs_first(bundles)
    assert not RowShape(row_reloads=0.0).slabs_first(bundles)  # B fits the cache: nothing to gain


def recipe_of(csr, n: int) -> dict:
    request = Request(csr, n, torch.float32, Permutation("identity", None))
    return json.loads(CSRSystem().build(request).recipe.partition(":")[2])


def band(rows: int):
    row = torch.arange(rows).repeat_interleave(3)
    col = (row + torch.tensor([-1, 0, 1]).repeat(rows)).clamp(0, rows - 1)
    coo = torch.sparse_coo_tensor(torch.stack([row, col]), torch.ones(row.numel()), (rows, rows))
    return as_csr(coo.coalesce())


def test_a_band_is_walked_row_by_row_in_wide_products_only(constants):
    constants(l2_reloads, CACHE_BYTES=64 * 2048)
    matrix = band(3000)
    whole = RowShape(**recipe_of(matrix, 512)["shape"]).row_reloads
    assert 1.0 <= whole <= LOCAL
    assert recipe_of(matrix, 128)["shape"]["row_reloads"] == 0.0  # one slab


def test_rows_of_b_in_no_order_take_narrow_slabs_one_after_the_other(constants, monkeypatch):
    constants(l2_reloads, CACHE_BYTES=64 * 512)
    # A wide slab of B is over L2, a narrow one is not.
    monkeypatch.setattr(row_lengths, "l2_bytes", lambda device: 3000 * 256)
    generator = torch.Generator().manual_seed(1)
    col = torch.randint(0, 3000, (30_000,), generator=generator)
    row = torch.arange(3000).repeat_interleave(10)
    coo = torch.sparse_coo_tensor(torch.stack([row, col]), torch.ones(30_000), (3000, 3000))
    shape = recipe_of(as_csr(coo.coalesce()), 512)["shape"]
    assert shape["slab_reloads"] > 2.5 and shape["row_reloads"] == 0.0


# -- launches


@dataclass
class Launched:
    """One launch, as a kernel sees it."""

    grid: tuple[int, int, int]
    params: dict


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, fresh_runners: None, gpu_facts) -> list[Launched]:
    """Launches on a GPU that is pretended."""
    gpu_facts()
    found: list[Launched] = []
    kernel = SimpleNamespace(
        launch=lambda grid, threads, stream, params, **_: found.append(Launched(grid, dict(params)))
    )
    memory = SimpleNamespace(data_ptr=lambda: 1000)
    answer_on_host(
        monkeypatch, csr_runner, stream=7,
        load=lambda spec, config, *rest: kernel, scratch=lambda *asked: (memory, memory),
    )  # fmt: skip
    return found


def built_of(matrix, n: int):
    csr = csr_of(matrix)
    return CSRSystem().build(Request(csr, n, torch.float32, Permutation("identity", None)))


def test_batches_whose_partial_sums_are_large_go_in_pieces(launched, monkeypatch, constants):
    built = built_of(with_dense_row(40, 60_000, 11), 32)
    work = runner(built.recipe)
    assert work._plain.slots
    B, out = torch.ones(5, 60_000, 32), torch.empty(5, 40, 32)
    asked = []
    memory = SimpleNamespace(data_ptr=lambda: 1000)
    answer_on_host(
        monkeypatch, csr_runner, scratch=lambda *given: asked.append(given[2]) or [memory] * 2
    )
    work.spmm(built.tensors, torch.ones(work.nnz), None, B, out)
    assert [each.grid[2] for each in launched] == [5]
    one = asked[0] // 5
    constants(csr_runner, MAX_SCRATCH=2 * one + 1)
    launched.clear()
    work.spmm(built.tensors, torch.ones(work.nnz), None, B, out)
    assert [each.grid[2] for each in launched] == [2, 2, 1]
    assert asked[1:] == [2 * one, 2 * one, one]
    step = 60_000 * 32 * 4
    assert [each.params["b"] - B.data_ptr() for each in launched] == [0, 2 * step, 4 * step]


def wide_operands(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of B at odd addresses, so that slabs are narrow."""
    return torch.ones(4, n + 1)[:, 1:], torch.empty(3, n)


def test_more_slabs_than_a_grid_is_high_are_walked_along_it(launched, constants):
    n = 5000
    constants(row_work, MAX_SLABS=100)
    built = built_of(random_matrix(3, 4, 0.9), n)
    B, out = wide_operands(n)
    work = runner(built.recipe)
    work.spmm(built.tensors, torch.ones(work.nnz), None, B, out)
    (launch,) = launched
    slabs = launch.params["slabs"]
    assert slabs > 100 and launch.grid == (slabs, 1, 1) and launch.params["slab_fast"]


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_more_blocks_than_a_grid_is_long_are_launched_in_parts(launched, mode, constants):
    built = built_of(random_matrix(3, 4, 0.9), 5000)
    work, n = runner(built.recipe), 5000
    B, out = wide_operands(n)
    bias, args = torch.arange(float(n)), torch.empty(3, n, dtype=torch.int16)
    constants(row_work, MAX_SLABS=1, MAX_BLOCKS=7)
    if mode == "sum":
        work.spmm(built.tensors, torch.ones(work.nnz), None, B, out, Epilogue(bias=bias))
    else:
        work.extremum(built.tensors, torch.ones(work.nnz), B, out, args, True)
    assert len(launched) > 2 and all(each.grid[0] <= 7 for each in launched)
    at = 0
    for each in launched:
        assert each.params["b"] == B.data_ptr() + 4 * at
        assert each.params["c"] == out.data_ptr() + 4 * at
        other = bias.data_ptr() + 4 * at if mode == "sum" else args.data_ptr() + 2 * at
        assert each.params["bias" if mode == "sum" else "args"] == other
        assert each.params["c_row_stride"] == n
        at += each.params["n"]
    assert at == n
    assert work.prepare_launches(built.tensors, None, None, torch.ones(4, n)) is None
