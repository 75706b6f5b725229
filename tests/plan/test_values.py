"""Values that a plan holds: kept in place, packed again, cast once, followed where asked."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.plan.values import HeldValues

F16, F32 = torch.float16, torch.float32


class Doubling:
    """A runner that packs twice each value, and counts how often."""

    needs_packed_values = True

    def __init__(self) -> None:
        self.packed = 0

    def pack(self, tensors, values: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
        self.packed += 1
        return {"twice": torch.zeros(0) if values is None else 2 * values}


def put(held: HeldValues, values: torch.Tensor | None) -> bool:
    return held.take(*held.prepare(values))


def test_new_values_are_written_where_the_old_ones_are():
    """Captured graphs and bindings hold the addresses."""
    held = HeldValues(Doubling(), {}, F32)
    assert put(held, torch.tensor([1.0, 2.0])), "bound for the first time"
    values, packed = held.held, held.packed["twice"]
    assert not put(held, torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert held.held is values and values.tolist() == [3.0, 4.0] and values.dtype is F32
    assert held.packed["twice"] is packed and packed.tolist() == [6.0, 8.0]


def test_a_pattern_that_gets_values_is_bound_anew_and_so_is_one_that_loses_them():
    held = HeldValues(Doubling(), {}, F32)
    assert put(held, None) and put(held, torch.ones(2)) and put(held, None)
    assert held.now is None and held.packed["twice"].numel() == 0


def test_a_cast_is_made_once_and_forgotten_when_values_change():
    runner = Doubling()
    held = HeldValues(runner, {}, F32)
    put(held, torch.tensor([1.0, 2.0]))
    assert held.operands(F32) == (held.held, held.packed)
    cast = held.operands(F16)
    assert cast[0].dtype is F16 and held.operands(F16)[0] is cast[0] and runner.packed == 2
    put(held, torch.tensor([5.0, 6.0]))
    assert held.operands(F16)[0].tolist() == [5.0, 6.0]


def test_followed_and_given_values_come_before_held_ones_and_are_not_packed():
    held = HeldValues(Doubling(), {}, F32)
    put(held, torch.zeros(2))
    source = torch.tensor([1.0, 2.0], requires_grad=True)
    held.follow = lambda: source * 3
    assert held.now.tolist() == [3.0, 6.0]
    values, packed = held.operands(F32)
    assert values.requires_grad and packed is None
    given, packed = held.operands(F16, torch.ones(2))
    assert given.tolist() == [1.0, 1.0] and given.dtype is F16 and packed is None
