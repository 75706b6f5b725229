"""What systems share: the split of a build's seconds."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from sparsetile.engines.request import BuildTimer, Request
from sparsetile.plan import planner
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS
from tests.contracts.cases import csr_of, random_matrix


@pytest.fixture
def waited(monkeypatch) -> list[torch.device]:
    """Devices that were waited for."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", found.append)
    return found


def asked(device: str, timed: bool) -> Request:
    return SimpleNamespace(device=torch.device(device), timed=timed)  # type: ignore[return-value]


def test_a_part_is_booked_with_the_time_since_the_last_reading(waited):
    begun = time.perf_counter()
    timer = BuildTimer(asked("cpu", True))
    for part, pause in (("format", 0.01), ("schedule", 0.03), ("format", 0.01)):
        time.sleep(pause)
        timer(part)
    whole = time.perf_counter() - begun
    assert timer.seconds["format"] >= 0.02 and timer.seconds["schedule"] >= 0.03
    assert sum(timer.seconds.values()) <= whole, "nothing is booked twice"
    assert waited == [], "there is no device to wait for"


def test_the_device_is_waited_for_only_if_time_is_asked_for(waited):
    BuildTimer(asked("cuda:0", False))("format")
    assert waited == []
    BuildTimer(asked("cuda:0", True))("format")
    assert waited == [torch.device("cuda", 0)] * 2


def test_the_planner_waits_for_the_device_only_if_it_is_given_one(waited):
    before = planner._read_clock(None)
    assert planner._read_clock(torch.device("cpu")) >= before and waited == []
    planner._read_clock(torch.device("cuda", 0))
    assert waited == [torch.device("cuda", 0)]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_says_what_its_format_and_its_schedule_took(name: str):
    system = SYSTEMS[name]
    csr = csr_of(random_matrix(60, 40, 0.2))
    stage = system.build(Request(csr, 16, torch.float32, Permutation("identity", None), timed=True))
    assert list(stage.seconds) == ["format", "schedule"]
    assert all(seconds >= 0 for seconds in stage.seconds.values())
    assert sum(stage.seconds.values()) > 0
