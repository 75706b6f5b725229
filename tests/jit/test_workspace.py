"""Scratch of cut rows: shared on a stream, its own in a captured graph, never freed too early."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.overrides import TorchFunctionMode

from sparsetile.jit.workspace import scratch, zeroed_flag


class OnTheHost(TorchFunctionMode):
    """Memory that is asked for on a GPU comes from the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        asked = dict(kwargs or {})
        if str(asked.get("device")).startswith("cuda"):
            asked["device"] = "cpu"
        return func(*args, **asked)


@pytest.fixture(autouse=True)
def _host_memory(capturing) -> Iterator[None]:
    capturing(False)
    with OnTheHost():
        yield


STREAMS = itertools.count(10**9)


@pytest.fixture
def stream() -> int:
    """A stream that no other test has launched on."""
    return next(STREAMS)


def test_launches_of_one_stream_share_memory_that_suffices(stream):
    first = scratch(0, stream, 1000, 10)
    assert scratch(0, stream, 400, 3) is first
    assert scratch(0, stream, 1000, 10) is first


def test_streams_and_devices_have_memory_of_their_own(stream):
    places = {
        scratch(device, each, 100, 1)[0].data_ptr()
        for device in (0, 1)
        for each in (stream, -stream)
    }
    assert len(places) == 4


def in_a_thread(work):
    def on_the_host():
        with OnTheHost():  # a mode is its thread's own
            return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(on_the_host).result()


def owned(stream: int, size: int = 100) -> torch.Tensor:
    return scratch(0, stream, size, 1, threading.get_ident())[0]


def test_owned_buffers_are_not_shared_between_threads(stream):
    shared, mine = scratch(0, stream, 100, 1)[0], owned(stream)
    others = in_a_thread(lambda: owned(stream))
    assert len({each.data_ptr() for each in (shared, mine, others)}) == 3
    assert owned(stream) is mine


def test_owned_buffers_end_with_their_thread(stream):
    held = in_a_thread(lambda: weakref.ref(owned(stream)))
    assert held() is None


def test_outgrown_owned_buffers_are_freed(stream):
    first = weakref.ref(owned(stream))
    owned(stream, 5000)
    assert first() is None


@pytest.mark.parametrize("asked", [(5000, 10), (1000, 99), (1001, 11)])
def test_memory_grows_to_what_is_asked_and_at_least_twofold(asked, stream):
    scratch(0, stream, 1000, 10)
    memory, arrivals = scratch(0, stream, *asked)
    assert memory.numel() >= max(asked[0], 2000) and arrivals.numel() >= max(asked[1], 20)
    assert not bool(arrivals.any())


def test_outgrown_buffers_stay_alive_for_running_launches(stream):
    first = [weakref.ref(part) for part in scratch(0, stream, 1000, 10)]
    larger = scratch(0, stream, 4000, 10)
    assert all(part() is not None for part in first)
    assert all(part() is not new for part, new in zip(first, larger, strict=True))


def test_a_captured_graph_gets_memory_of_its_own_each_time(capturing, stream):
    shared = scratch(0, stream, 1000, 10)
    capturing(True)
    one, other = scratch(0, stream, 100, 4), scratch(0, stream, 100, 4)
    assert len({part[0].data_ptr() for part in (shared, one, other)}) == 3
    capturing(False)
    assert scratch(0, stream, 1000, 10) is shared


def test_a_flag_begins_at_zero_each_time(stream):
    first = zeroed_flag(0, stream)
    assert int(first) == 0
    first.fill_(1)
    assert zeroed_flag(0, stream) is first and int(first) == 0


def test_threads_and_streams_have_flags_of_their_own(stream):
    mine = zeroed_flag(0, stream)
    assert zeroed_flag(0, -stream) is not mine
    assert in_a_thread(lambda: zeroed_flag(0, stream)).data_ptr() != mine.data_ptr()


def test_a_captured_graph_gets_a_flag_of_its_own(capturing, stream):
    mine = zeroed_flag(0, stream)
    capturing(True)
    assert zeroed_flag(0, stream) is not mine


def test_a_flag_made_in_inference_mode_can_be_zeroed_outside(stream):
    with torch.inference_mode():
        first = zeroed_flag(0, stream)
    first.fill_(1)
    assert int(zeroed_flag(0, stream)) == 0
