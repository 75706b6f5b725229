"""The window kernel's rules broken one by one: its replay sees each of them.

A replay that passes says something only if it fails where a rule is broken: waits, descriptors,
places and numbers are left out or changed here once each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from sparsetile import CSR
from sparsetile.core import device as processors
from sparsetile.formats.bittcf import round_tf32
from sparsetile.kernels import wcsr as kernel
from sparsetile.systems.wcsr import system as wcsr
from tests.kernels import replay_wcsr, replay_wcsr_stores
from tests.kernels.replay import Machine
from tests.kernels.replay_bcsr import Turn
from tests.kernels.replay_cases import FiniteWindowCase as Finite
from tests.kernels.replay_cases import with_tiles
from tests.kernels.replay_wcsr import (
    GROUPS,
    WARPS,
    Block,
    Product,
    Shared,
    fields_of,
    fragment_places,
)
from tests.kernels.replay_wcsr_rings import COPIERS, TileCopies
from tests.kernels.replay_wgmma import Barrier
from tests.kernels.whole_numbers import operand, reference

F16, F32 = torch.float16, torch.float32


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return replay_wcsr.install(monkeypatch)


def windows(tiles: list[int], dtype: torch.dtype) -> CSR:
    """A matrix whose windows of 64 rows have these tiles; the last has 13 rows."""
    return with_tiles(tiles, dtype, stack=8, last=13)


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
    patch.setattr(replay_wcsr, "first_step", lambda group: 0)


def _tiles_are_given_back_before_they_are_decoded(patch: pytest.MonkeyPatch) -> None:
    def take_tiles(self, warp, turn, tiles, into):
        yield from self.tiles_full[turn.stage].wait(turn.parity)
        self.tiles_empty[turn.stage].arrive()
        for _ in range(200):
            yield
        into[:] = self.decode(warp, self.tiles + turn.stage * self.p.tile_bytes, tiles)
        turn.next()

    patch.setattr(Block, "take_tiles", take_tiles)


def _copies_wait_for_the_lap_before_the_last(patch: pytest.MonkeyPatch) -> None:
    """A tile stage is overwritten as soon as the last copy into it has landed."""
    make = TileCopies.next

    def next_(self):
        if self.at.number < self.block.p.tile_stages:
            return (yield from make(self))
        stage = self.at.tiles.stage
        barrier = self.block.tiles_empty[stage]
        yield from self.block.tiles_full[stage].wait(self.at.tiles.parity ^ 1)
        wait, barrier.wait = barrier.wait, lambda parity: iter(())
        copying = make(self)
        next(copying)
        barrier.wait = wait
        yield from copying

    patch.setattr(TileCopies, "next", next_)


def _values_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """What was looked up for a copy is not the copy's."""
    look_up = TileCopies.look_up

    def late(self):
        value, last = self.value, self.last
        look_up(self)
        if value or last:
            self.value, self.last = value, last

    patch.setattr(TileCopies, "look_up", late)


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
    "a warp copies the steps of the next": _set(
        replay_wcsr, "first_copy", lambda group, warp: (warp + 1) % 4 * GROUPS + group
    ),
    "a warp copies the steps of the one before": _set(
        replay_wcsr, "first_copy", lambda group, warp: (warp - 1) % 4 * GROUPS + group
    ),
    "two warps copy the same steps": _set(
        replay_wcsr, "first_copy", lambda group, warp: warp // 2 * 2 * GROUPS + group
    ),
    "both groups copy the same steps": _set(
        replay_wcsr, "first_copy", lambda group, warp: warp * GROUPS
    ),
    "a warp copies at another's turn": _set(replay_wcsr, "copying_turn", lambda warp: 3 - warp),
    "a warp never copies again": _set(replay_wcsr, "copying_turn", lambda warp: -1),
    "tiles are given back before they are decoded": _tiles_are_given_back_before_they_are_decoded,
    "a tile stage is overwritten early": _copies_wait_for_the_lap_before_the_last,
    "values of the step before": _values_of_the_step_before,
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
    "exchange": _set(replay_wcsr_stores, "exchange", lambda word: word),
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
    # Steps of 16 bits have twice the tiles: more than two rounds of copies for each block.
    monkeypatch.setattr(processors, "PROCESSORS", 2 if dtype is F32 else 1)
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


@pytest.mark.parametrize("stages, enough", [(COPIERS + 1, True), (COPIERS - 2, False)])
def test_copies_need_more_stages_than_warps_that_copy(machine, monkeypatch, stages, enough):
    monkeypatch.setattr(kernel, "TILE_STAGES", stages)
    monkeypatch.setattr(processors, "PROCESSORS", 1)
    csr = windows([90], F32)
    case, B = Finite(machine, csr, 8, F32), operand(csr, 8, F32)
    if enough:
        assert torch.equal(case.spmm(B), reference(csr, B).to(F32))
    else:
        with pytest.raises(AssertionError, match="threads wait for ever"):
            case.spmm(B)


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
