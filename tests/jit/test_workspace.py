"""Scratch of cut rows: shared on a stream, its own in a captured graph, never freed too early."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sparsetile.jit import workspace as module
from sparsetile.jit.workspace import scratch, zeroed_flag


@pytest.fixture(autouse=True)
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch in host memory, of this test's own."""

    def allocate(device: int, partial_bytes: int, arrivals: int):
        return (
            torch.empty(partial_bytes, dtype=torch.uint8),
            torch.zeros(arrivals, dtype=torch.int32),
        )

    monkeypatch.setattr(module, "_allocate", allocate)
    monkeypatch.setattr(module, "_new_flag", lambda device: torch.zeros(1, dtype=torch.int64))
    monkeypatch.setattr(module, "_shared", {})
    monkeypatch.setattr(module, "_owned", module._Owned())
    monkeypatch.setattr(module, "_outgrown", [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_launches_of_one_stream_share_memory_that_suffices():
    first = scratch(0, 1, 1000, 10)
    assert scratch(0, 1, 400, 3) is first
    assert scratch(0, 1, 1000, 10) is first


def test_streams_and_devices_have_memory_of_their_own():
    places = {
        scratch(device, stream, 100, 1)[0].data_ptr() for device in (0, 1) for stream in (5, 6)
    }
    assert len(places) == 4


def in_a_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def owned() -> torch.Tensor:
    return scratch(0, 5, 100, 1, threading.get_ident())[0]


def test_what_has_an_owner_is_shared_with_no_other_thread():
    shared, mine, others = scratch(0, 5, 100, 1)[0], owned(), in_a_thread(owned)
    assert len({each.data_ptr() for each in (shared, mine, others)}) == 3
    assert owned() is mine


def test_what_has_an_owner_goes_with_its_thread():
    held = in_a_thread(lambda: weakref.ref(owned()))
    assert held() is None


def test_what_has_an_owner_and_was_outgrown_is_not_kept():
    first = weakref.ref(owned())
    scratch(0, 5, 5000, 1, threading.get_ident())
    assert first() is None and not module._outgrown


@pytest.mark.parametrize("asked", [(5000, 10), (1000, 99), (1001, 11)])
def test_memory_grows_to_what_is_asked_and_at_least_twofold(asked):
    scratch(0, 1, 1000, 10)
    memory, arrivals = scratch(0, 1, *asked)
    assert memory.numel() >= max(asked[0], 2000) and arrivals.numel() >= max(asked[1], 20)
    assert not bool(arrivals.any())


def test_outgrown_memory_stays_alive_for_launches_under_way():
    first = scratch(0, 1, 1000, 10)
    scratch(0, 1, 4000, 10)
    assert any(held[0] is first[0] and held[1] is first[1] for held in module._outgrown)


def test_a_captured_graph_gets_memory_of_its_own_each_time(monkeypatch):
    shared = scratch(0, 1, 1000, 10)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    one, other = scratch(0, 1, 100, 4), scratch(0, 1, 100, 4)
    assert len({part[0].data_ptr() for part in (shared, one, other)}) == 3
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert scratch(0, 1, 1000, 10) is shared


def test_a_flag_begins_at_zero_each_time():
    first = zeroed_flag(0, 5)
    first.fill_(1)
    assert zeroed_flag(0, 5) is first and int(first) == 0


def test_threads_and_streams_have_flags_of_their_own():
    mine = zeroed_flag(0, 5)
    assert zeroed_flag(0, 6) is not mine
    assert in_a_thread(lambda: zeroed_flag(0, 5)).data_ptr() != mine.data_ptr()


def test_a_captured_graph_gets_a_flag_of_its_own(monkeypatch):
    mine = zeroed_flag(0, 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert zeroed_flag(0, 5) is not mine


def test_a_flag_made_in_inference_mode_can_be_put_back_outside():
    with torch.inference_mode():
        first = zeroed_flag(0, 5)
    first.fill_(1)
    assert int(zeroed_flag(0, 5)) == 0
