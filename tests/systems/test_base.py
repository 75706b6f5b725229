"""What systems share: the split of a build's seconds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparsetile.plan import planner
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, Request, base
from sparsetile.systems.base import BuildTimer
from tests.contracts.cases import csr_of, random_matrix


class Watch:
    """A clock that ticks once per reading, and a device that notes who waits for it."""

    def __init__(self) -> None:
        self.ticks = 0.0
        self.waited: list[torch.device] = []

    def perf_counter(self) -> float:
        self.ticks += 1.0
        return self.ticks


@pytest.fixture
def watch(monkeypatch) -> Watch:
    found = Watch()
    monkeypatch.setattr(base, "time", SimpleNamespace(perf_counter=found.perf_counter))
    monkeypatch.setattr(torch.cuda, "synchronize", found.waited.append)
    return found


def asked(device: str, timed: bool) -> Request:
    return SimpleNamespace(device=torch.device(device), timed=timed)  # type: ignore[return-value]


def test_a_part_is_booked_with_the_time_since_the_last_reading(watch: Watch):
    timer = BuildTimer(asked("cpu", True))
    timer("format")
    watch.ticks += 5
    timer("schedule")
    timer("format")
    assert timer.seconds == {"format": 2.0, "schedule": 6.0}
    assert watch.waited == [], "there is no device to wait for"


def test_the_device_is_waited_for_only_where_time_is_asked_for(watch: Watch):
    BuildTimer(asked("cuda:0", False))("format")
    assert watch.waited == []
    BuildTimer(asked("cuda:0", True))("format")
    assert watch.waited == [torch.device("cuda", 0)] * 2


def test_the_planner_waits_for_the_device_only_where_it_is_given_one(watch: Watch):
    before = planner._read_clock(None)
    assert planner._read_clock(torch.device("cpu")) >= before and watch.waited == []
    planner._read_clock(torch.device("cuda", 0))
    assert watch.waited == [torch.device("cuda", 0)]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_says_what_its_format_and_its_schedule_took(name: str):
    system = SYSTEMS[name]
    csr = csr_of(random_matrix(60, 40, 0.2))
    stage = system.build(Request(csr, 16, torch.float32, Permutation("identity", None), timed=True))
    assert list(stage.seconds) == ["format", "schedule"]
    assert all(seconds >= 0 for seconds in stage.seconds.values())
    assert sum(stage.seconds.values()) > 0
