"""The tree adds children in slot order, each once, whoever arrives last and how many it reads."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.replay import Array
from tests.kernels.replay_tree import Tree

LANES = 4
# Bytes of a lane's partial result, of which four, two and one are read at a time.
SIZES = [32, 64, 80]


def held(data: np.ndarray) -> Array:
    return Array(data.ctypes.data, data)


def tree_of(children: int, slot_bytes: int, layer: int = 0) -> Tree:
    """One node over the first slots; as much memory as two layers have, full of 0xFF."""
    slots = max(children, 1)
    memory = np.full(2 * slots * LANES * slot_bytes + 16, 0xFF, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % 16 :][: 2 * slots * LANES * slot_bytes]
    return Tree(
        held(np.zeros(slots, dtype=np.int32)),
        held(np.array([[0, children, -1, 0]], dtype=np.int32)),
        held(np.zeros(2, dtype=np.int32)),
        held(memory),
        first_counter=layer, first_slot=layer * slots, lanes=LANES, slot_bytes=slot_bytes,
    )  # fmt: skip


def partial(slot: int, size: int) -> np.ndarray:
    return np.full((LANES, size), slot, dtype=np.uint8) + np.arange(LANES, dtype=np.uint8)[:, None]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("children", [1, 2, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("last", ["first", "last"])
def test_children_are_joined_in_slot_order_by_whoever_arrives_last(size, children, last):
    tree = tree_of(children, size, layer=1)
    joined: list[int] = []

    def join(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
        assert np.array_equal(other, partial(int(other[0, 0]), size)), "lanes do not mix"
        joined.append(int(other[0, 0]))
        return mine

    arrivals = list(range(children))
    if last == "first":
        arrivals.reverse()
    for slot in arrivals[:-1]:
        assert tree.climb(slot, partial(slot, size), join) is None
    found = tree.climb(arrivals[-1], partial(arrivals[-1], size), join)
    assert np.array_equal(found, partial(0, size)), "the first child is what others are added to"
    assert joined == list(range(1, children))
    assert not tree.arrivals.data.any(), "counters are back at zero"
    below = tree.first_slot * LANES * size
    assert (tree.partials.data[:below] == 0xFF).all(), "another layer's slots are not touched"


def test_results_of_several_kinds_share_slots_as_long_as_they_fit():
    tree = tree_of(2, 64)
    assert tree.climb(0, partial(0, 16), lambda mine, other: mine + other) is None
    found = tree.climb(1, partial(1, 16), lambda mine, other: mine + other)
    assert np.array_equal(found, partial(0, 16) + partial(1, 16))
    with pytest.raises(AssertionError, match="slots fit"):
        tree.climb(0, partial(0, 80), lambda mine, other: mine)


@pytest.mark.parametrize("size", SIZES)
def test_no_slot_past_the_last_child_is_read(size):
    tree = tree_of(3, size)
    tree.partials.data = tree.partials.data[: 3 * LANES * size]  # memory ends there
    for slot in range(2):
        assert tree.climb(slot, partial(slot, size), lambda mine, other: mine) is None
    assert tree.climb(2, partial(2, size), lambda mine, other: mine) is not None
