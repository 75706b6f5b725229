"""Windows in pieces replayed: the second kernel adds them up in order, and each rule is needed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparsetile import CSR
from sparsetile.core import device as processors
from sparsetile.formats.bittcf import round_tf32
from sparsetile.jit import LoadedKernel
from sparsetile.kernels import wcsr as kernels
from sparsetile.kernels.wcsr import choose_join_tile, join_config, window_tiles
from sparsetile.systems.shared import tile_runner as tile_runner
from sparsetile.systems.wcsr import system as wcsr
from tests.contracts.cases import csr_of, random_matrix
from tests.kernels import replay_wcsr, replay_wcsr_join
from tests.kernels.replay import Machine
from tests.kernels.replay_cases import FiniteWindowCase as Finite
from tests.kernels.replay_cases import WindowCase, with_tiles
from tests.kernels.replay_wcsr import WARPS, Product
from tests.kernels.replay_wcsr_join import AT_ONCE, Join, batches_of
from tests.kernels.whole_numbers import operand, reference

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = [F32, F16, BF16]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return replay_wcsr.install(monkeypatch)


def windows(tiles: list[int], dtype: torch.dtype) -> CSR:
    """A matrix whose windows of 64 rows have these tiles; the last has 13 rows."""
    return with_tiles(tiles, dtype, stack=8, last=13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("workers", [2, 3, 7, 40])
def test_pieces_of_cut_windows_are_added_up_by_the_second_kernel(
    machine, monkeypatch, dtype, workers
):
    monkeypatch.setattr(wcsr, "A_SHARE", 1)
    csr = windows([2, 97, 0, 0, 41, 1], dtype)
    csr = csr.with_values(csr.values.sign())  # sums that 16 bits hold
    for n, slabs in ((24, 1), (264, 2)):
        monkeypatch.setattr(processors, "PROCESSORS", workers * slabs)
        B = operand(csr, n, dtype).clamp(max=1)
        case = Finite(machine, csr, n, dtype)
        assert case.meta["slots"] > 1
        assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))
        joined = choose_join_tile(window_tiles()[n > 128], case.meta["nodes"], case.meta["slots"])
        assert machine.configs[-1] == join_config(dtype, joined, True)


@pytest.mark.parametrize("many", [1, 1000])
def test_a_window_in_many_pieces_beside_whole_ones(machine, monkeypatch, many):
    """Every number of slots that is left after those taken four at a time, by one warp or more."""
    monkeypatch.setattr(wcsr, "A_SHARE", 1)
    monkeypatch.setattr(kernels, "MANY_PIECES", many)
    csr = windows([1, 230, 2], F16)
    csr = csr.with_values(csr.values.sign())
    B = operand(csr, 8, F16).clamp(max=1)
    left = set()
    for workers in (5, 6, 7, 8, 9):
        monkeypatch.setattr(processors, "PROCESSORS", workers)
        case = Finite(machine, csr, 8, F16)
        assert case.meta["nodes"] == 1 and case.meta["slots"] > 3
        left.add(case.meta["slots"] % AT_ONCE)
        assert torch.equal(case.spmm(B), reference(csr, B).to(F16))
    assert left == set(range(AT_ONCE))


def test_the_second_kernel_follows_the_first_on_its_stream_and_no_third_overlaps(
    machine, monkeypatch
):
    """Scratch is the stream's: the next product must not fill it while this one is added up."""
    monkeypatch.setattr(processors, "PROCESSORS", 4)
    launched = []
    launch = LoadedKernel.launch

    def spy(self, grid, threads, stream, *params, overlap):
        launched.append((self.compiled.source.entry, grid, threads, overlap))
        launch(self, grid, threads, stream, *params, overlap=overlap)

    monkeypatch.setattr(LoadedKernel, "launch", spy)
    csr = windows([100], F32)
    Finite(machine, csr, 264, F32).spmm(operand(csr, 264, F32, (3,)))
    assert launched == [
        ("spmm_wcsr", (2, 2, 3), 384, False),
        ("join_wcsr", (8, 2, 3), 128, True),
    ]
    launched.clear()
    csr = windows([10], F32)
    Finite(machine, csr, 8, F32).spmm(operand(csr, 8, F32))
    assert launched == [("spmm_wcsr", (1, 1, 1), 384, True)]


@pytest.mark.parametrize("most, launches", [(1, 5), (2, 3), (3, 2), (5, 1)])
@pytest.mark.parametrize("n", [24, 21])
def test_batches_whose_partial_sums_exceed_the_scratch_go_in_pieces(
    machine, monkeypatch, most, launches, n
):
    monkeypatch.setattr(processors, "PROCESSORS", 3)
    monkeypatch.setattr(wcsr, "A_SHARE", 1)
    csr = windows([40, 2], F32)
    B = operand(csr, n, F32, (5,))
    B += torch.arange(5.0).reshape(5, 1, 1)  # no two matrices are equal
    case = Finite(machine, csr, n, F32)
    of_a_matrix = case.meta["slots"] * 64 * 128 * 4
    monkeypatch.setattr(tile_runner, "MAX_SCRATCH", most * of_a_matrix + of_a_matrix // 2)
    sizes = []
    scratch = machine.scratch
    monkeypatch.setattr(
        tile_runner, "scratch", lambda *given: sizes.append(given[2]) or scratch(*given)
    )
    before = torch.randint(-3, 4, (5, csr.shape[0], n)).float()
    found = case.spmm(B, before.clone(), beta=2.0)
    assert torch.equal(found, (reference(csr, B) + 2 * before).to(F32))
    assert len(sizes) == launches and max(sizes) == most * of_a_matrix
    assert sum(sizes) == 5 * of_a_matrix
    assert len(machine.configs) == 2 * launches, "each followed by its own second kernel"


def test_only_32_columns_of_a_cut_window_are_computed_again(machine, monkeypatch):
    monkeypatch.setattr(processors, "PROCESSORS", 4)
    monkeypatch.setattr(wcsr, "A_SHARE", 1)
    csr = windows([60], F16)
    B = operand(csr, 128, F16).nan_to_num()
    B[5, 70] = float("inf")
    seen = []
    exact = Join.exact
    monkeypatch.setattr(
        Join, "exact", lambda self, *given: seen.append(given[1:]) or exact(self, *given)
    )
    case = WindowCase(machine, csr, 128, F16)
    assert case.meta["slots"] > 1
    found = case.spmm(B)
    assert {(window, begin, end) for _, window, begin, end in seen} == {(0, 64, 96)}
    assert len(seen) == machine.recomputed <= WARPS
    expected = reference(csr, B.nan_to_num(posinf=0)).to(F16)
    names = torch.zeros(csr.shape, dtype=torch.bool)
    names[csr.row_ids(), csr.indices.long()] = True
    assert torch.equal(found[:, 70].isinf(), names[:, 5])
    expected[names[:, 5], 70] = found[names[:, 5], 70]
    assert torch.equal(found, expected)


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


# -- each rule broken once


def _another(method: str, change: Callable[..., tuple]) -> Callable[[pytest.MonkeyPatch], None]:
    """The join's or product's ``method`` with other arguments."""

    def patched(patch: pytest.MonkeyPatch) -> None:
        owner = Product if method == "store_partial" else Join
        usual = getattr(owner, method)
        patch.setattr(owner, method, lambda self, *given: usual(self, *change(*given)))

    return patched


def _order(
    change: Callable[[list[tuple[int, int]]], list[tuple[int, int]]],
) -> Callable[[pytest.MonkeyPatch], None]:
    """Slots in other batches, or in another order."""
    return lambda patch: patch.setattr(
        replay_wcsr_join, "batches_of", lambda slot, end: change(list(batches_of(slot, end)))
    )


def _one_by_one(batches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(slot + a, 1) for slot, count in batches for a in range(count)]


def _no_join(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(replay_wcsr.REPLAYS, "join_wcsr", lambda *_: None)


OF_PIECES = {
    "a slot is added twice": _order(lambda batches: [*batches, batches[-1]]),
    "a slot is left out": _order(lambda batches: batches[:-1]),
    "the last slots are taken four at a time, too": _order(
        lambda batches: [(slot, AT_ONCE) for slot, _ in batches]
    ),
    "slots out of order": _order(lambda batches: _one_by_one(batches)[::-1]),
    "two slots change places": _order(
        lambda batches: _one_by_one(batches)[2::-1] + _one_by_one(batches)[3:]
    ),
    "another strip's sums": _another(
        "add_slots", lambda block, warp, *rest: (block, warp ^ 1, *rest)
    ),
    "another group's sums": _another(
        "add_slots", lambda *given: (*given[:4], given[4] ^ 1, given[5])
    ),
    "another slab's sums": _another(
        "add_slots", lambda block, *rest: (SimpleNamespace(y=1 - block.y, z=block.z), *rest)
    ),
    "another matrix's sums": _another(
        "add_slots", lambda block, *rest: (SimpleNamespace(y=block.y, z=1 - block.z), *rest)
    ),
    "words of sums": _another(
        "store_partial",
        lambda block, warp, slot, sums: (block, warp, slot, np.roll(sums, 4, axis=1)),
    ),
    "lanes of sums": _another(
        "store_partial",
        lambda block, warp, slot, sums: (block, warp, slot, np.roll(sums, 1, axis=0)),
    ),
    "slots of pieces": _another(
        "store_partial", lambda block, warp, slot, sums: (block, warp, slot ^ 1, sums)
    ),
    "rows of another window": _another(
        "store_groups", lambda block, warp, window, *rest: (block, warp, window + 1, *rest)
    ),
    "nothing adds them up": _no_join,
}


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_cut_windows_are_right_by_their_rules(machine, monkeypatch, dtype):
    case, B, expected = _in_pieces(machine, monkeypatch, dtype)
    assert torch.equal(case.spmm(B), expected)


@pytest.mark.parametrize("mistake", OF_PIECES)
def test_cut_windows_need_each_of_their_rules(machine, monkeypatch, mistake):
    monkeypatch.setattr(kernels, "MANY_PIECES", 1000)  # a warp adds them all: no empty runs
    case, B, expected = _in_pieces(machine, monkeypatch, F16)
    OF_PIECES[mistake](monkeypatch)
    try:
        found = case.spmm(B)
    except AssertionError:
        return
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("mistake", ["slots out of order", "two slots change places"])
def test_sums_in_another_order_have_other_bits(machine, monkeypatch, mistake):
    """Each slot is added once: nothing but the sums can tell."""
    monkeypatch.setattr(kernels, "MANY_PIECES", 1000)
    case, B, expected = _in_pieces(machine, monkeypatch, F32)
    OF_PIECES[mistake](monkeypatch)
    found = case.spmm(B)
    assert bool((found[:, 64] == expected[:, 64] + 1).all())
    assert torch.equal(found[:, :64], expected[:, :64])
    assert torch.equal(found[:, 65:], expected[:, 65:])


def _in_pieces(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> tuple[Finite, torch.Tensor, torch.Tensor]:
    """Two cut windows, two slabs, two matrices; sums of row 64 that depend on the order.

    Its pieces have 2^24, 1, -2^24, 1, 1, ...: in this order the first 1 is lost.
    """
    monkeypatch.setattr(processors, "PROCESSORS", 32)
    monkeypatch.setattr(wcsr, "A_SHARE", 1)
    csr = windows([3, 100, 2, 25], dtype)
    case = Finite(machine, csr, 264, dtype)
    pieces = [item for item in case.stage.parts[7][: case.meta["items"]].tolist() if item[0] == 1]
    assert len(pieces) % AT_ONCE and len(pieces) > 2 * AT_ONCE and case.meta["nodes"] == 2
    begin, end = csr.indptr[64:66].tolist()
    column = csr.indices[begin:end].long()
    tile = 3 + (column - 3 * 8) // 8
    values = csr.values.sign()
    values[begin:end] = 0
    B = operand(csr, 264, dtype, (2,)).clamp(max=1)
    for number, (_, first, past, _) in enumerate(pieces):
        one = int(torch.nonzero((tile >= first) & (tile < past))[0])
        values[begin + one] = {0: 2.0**12, 2: -(2.0**12)}.get(number, 2.0**-12)
        B[:, column[one]] = 2.0**12
    csr = csr.with_values(values)
    expected = reference(csr, B)
    expected[:, 64] -= 1
    return Finite(machine, csr, 264, dtype), B, expected.to(dtype)
