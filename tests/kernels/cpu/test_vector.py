"""The vector operations of the CPU kernels, where no result of a kernel would show a fault."""

from __future__ import annotations

import ctypes
import threading

import numba
import numpy as np
import pytest

from sparsetile.kernels.cpu.vector import claim, lane_count, load, store, total


@numba.njit
def _total(address: int, like: float) -> float:
    return total(load(like, address, 0, 1, False, 0))


@numba.njit
def _copy(source: int, target: int, count: int, like: float) -> None:
    store(target, 0, load(like, source, 0, 1, True, count), True, count)


@numba.njit
def _widen(source: int, target: int, count: int, like: float) -> None:
    store(target, 0, load(like, source, 0, 1, True, count), False, 0)


@numba.njit
def _lanes(like: float) -> int:
    return lane_count(like, 2)


@numba.njit(nogil=True)
def _claim_many(counter: int, seen: np.ndarray) -> None:
    while True:
        number = claim(counter)
        if number >= seen.size:
            break
        seen[number] += 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lanes_are_added_by_halves_in_one_order(dtype: type[np.floating]) -> None:
    numbers = np.random.default_rng(0).standard_normal(64 // dtype().itemsize).astype(dtype)
    halves = numbers
    while halves.size > 1:
        halves = halves[: halves.size // 2] + halves[halves.size // 2 :]
    assert _total(numbers.ctypes.data, dtype(0)) == halves[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_mask_bounds_what_is_written_and_reads_zero_beyond(dtype: type[np.floating]) -> None:
    lanes = 64 // dtype().itemsize
    source = np.arange(1, lanes + 1, dtype=dtype)
    for count in range(lanes + 1):
        target = np.full(lanes, -1, dtype=dtype)
        _copy(source.ctypes.data, target.ctypes.data, count, dtype(0))
        assert (target[:count] == source[:count]).all()
        assert (target[count:] == -1).all()
        _widen(source.ctypes.data, target.ctypes.data, count, dtype(0))
        assert (target[:count] == source[:count]).all()
        assert (target[count:] == 0).all()


def test_two_units_hold_128_bytes() -> None:
    assert _lanes(np.float32(0)) == 32
    assert _lanes(np.float64(0)) == 16


@numba.njit
def _part_lanes(like: float) -> tuple[int, int, int]:
    return lane_count(like, -2), lane_count(like, -4), lane_count(like, -16)


def test_parts_of_a_unit_hold_one_element_at_least() -> None:
    assert _part_lanes(np.float32(0)) == (8, 4, 1)
    assert _part_lanes(np.float64(0)) == (4, 2, 1)


def test_threads_that_claim_from_one_counter_share_every_number_once() -> None:
    counter = ctypes.c_int64(0)
    seen = np.zeros(200_000, dtype=np.int64)
    arguments = (ctypes.addressof(counter), seen)
    threads = [threading.Thread(target=_claim_many, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (seen == 1).all()
