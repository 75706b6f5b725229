"""The ring's rules are noticed when they are broken, so that a replay that passes kept them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.replay_ring import Ring, assert_no_conflicts

WARP = np.array([0])
LANE = np.arange(32)[None]
AT = LANE * 16
DATA = np.arange(512, dtype=np.uint8).reshape(1, 32, 16)


@pytest.fixture
def ring() -> Ring:
    """A ring of two stages of 512 bytes, whose first is being copied."""
    made = Ring(1, 1024)
    made.copy(WARP[:, None], AT, DATA)
    made.commit(WARP)
    return made


def test_what_was_copied_waited_for_and_synchronised_is_read(ring):
    ring.wait(WARP, 0)
    ring.sync(WARP)
    assert np.array_equal(ring.read(WARP, AT, 16), DATA)
    ring.end()


def test_reading_is_refused_before_the_copy_the_wait_and_the_barrier(ring):
    with pytest.raises(AssertionError, match="read before it was copied"):
        ring.read(WARP, AT + 512, 16)
    with pytest.raises(AssertionError, match="read before it was copied"):
        ring.read(WARP, AT, 16)
    ring.wait(WARP, 1)  # one group may be under way: this one
    ring.sync(WARP)
    with pytest.raises(AssertionError, match="read before it was copied"):
        ring.read(WARP, AT, 16)
    ring.wait(WARP, 0)
    with pytest.raises(AssertionError, match="read before it was copied"):
        ring.read(WARP, AT, 16)


def test_overwriting_is_refused_before_all_has_been_read_and_a_barrier_passed(ring):
    with pytest.raises(AssertionError, match="overwritten before it was read"):
        ring.copy(WARP, AT, DATA)
    ring.wait(WARP, 0)
    ring.sync(WARP)
    with pytest.raises(AssertionError, match="overwritten before it was read"):
        ring.copy(WARP, AT, DATA)
    with pytest.raises(AssertionError, match="copied and not read"):
        ring.end()
    ring.read(WARP, AT, 16)
    with pytest.raises(AssertionError, match="overwritten while lanes may still read"):
        ring.copy(WARP, AT, DATA)
    ring.sync(WARP)
    ring.copy(WARP, AT, DATA)
    with pytest.raises(AssertionError, match="copied and not read"):
        ring.end()


@pytest.mark.parametrize("width", [4, 8, 16])
def test_small_copies_have_the_same_rules(width):
    ring, at = Ring(2, 64), np.array([16, 16])
    both, data = np.array([0, 1]), np.arange(2 * width, dtype=np.uint8).reshape(2, width)
    ring.copy(both, at, data)
    ring.commit(both)
    ring.wait(np.array([1]), 0)
    ring.sync(both)
    assert np.array_equal(ring.read(np.array([1]), at[:1], width), data[1:])
    with pytest.raises(AssertionError, match="read before it was copied"):
        ring.read(np.array([0]), at[:1], width)
    with pytest.raises(AssertionError, match="read before it was copied"):
        ring.read(np.array([1]), at[:1] + width, width)
    with pytest.raises(AssertionError, match="misaligned"):
        ring.copy(both, at + 2, data)
    with pytest.raises(AssertionError, match="overwritten while lanes may still read"):
        ring.copy(np.array([1]), at[:1], data[1:])
    ring.sync(both)
    ring.copy(np.array([1]), at[:1], data[1:])


def test_bytes_are_read_as_often_as_their_copy_says():
    ring, at = Ring(1, 16), np.array([4])
    word = np.arange(4, dtype=np.uint8).reshape(1, 4)
    ring.copy(WARP, at, word, reads=np.array([[0, 2]]))  # its upper half twice
    ring.commit(WARP)
    ring.wait(WARP, 0)
    ring.sync(WARP)
    assert ring.read(WARP, at + 2, 2).tolist() == [[2, 3]]
    with pytest.raises(AssertionError, match="copied and not read"):
        ring.end()
    ring.sync(WARP)
    with pytest.raises(AssertionError, match="overwritten before it was read"):
        ring.copy(WARP, at, word)
    ring.read(WARP, at + 2, 2)
    ring.end()
    with pytest.raises(AssertionError, match="more often than its copy said"):
        ring.read(WARP, at, 2)


def test_places_outside_the_ring_misaligned_or_copied_twice_are_refused(ring):
    with pytest.raises(AssertionError, match="outside"):
        ring.copy(WARP, AT + 528, DATA)
    with pytest.raises(AssertionError, match="misaligned"):
        ring.copy(WARP, AT + 4, DATA)
    with pytest.raises(AssertionError, match="two lanes"):
        ring.copy(WARP, AT // 32 * 32 + 512, DATA)


@pytest.mark.parametrize("row_bytes, width", [(64, 8), (128, 16), (256, 16), (512, 16)])
def test_the_16_bytes_between_rows_keep_banks_apart(row_bytes, width):
    """Lane 4g + t reads row 2t at its group's columns."""
    g, t = LANE >> 2, LANE & 3
    assert_no_conflicts(2 * t * (row_bytes + 16) + g * width, width)
    with pytest.raises(AssertionError, match="bank conflict"):
        assert_no_conflicts(2 * t * row_bytes + g * width, width)
