"""Scratch of cut rows: shared on a stream, its own in a captured graph, never freed too early."""

from __future__ import annotations

import pytest
import torch

from sparsetile.jit import workspace as module
from sparsetile.jit.workspace import scratch


@pytest.fixture(autouse=True)
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch in host memory, of this test's own."""

    def allocate(device: int, partial_bytes: int, arrivals: int):
        return (
            torch.empty(partial_bytes, dtype=torch.uint8),
            torch.zeros(arrivals, dtype=torch.int32),
        )

    monkeypatch.setattr(module, "_allocate", allocate)
    monkeypatch.setattr(module, "_buffers", {})
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


def test_what_has_an_owner_is_shared_with_nobody_else():
    places = {scratch(0, 5, 100, 1, owner)[0].data_ptr() for owner in (0, 7, 8, 7)}
    assert len(places) == 3


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
