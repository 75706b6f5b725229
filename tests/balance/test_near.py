"""Schedules made on the host of units that lie on a GPU: the same as those made there."""

from __future__ import annotations

import pytest
import torch
from tests.balance.decoding import SCHEDULES, VARIANTS

from sparsetile.formats import units as module
from sparsetile.formats.units import Units

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
POLICIES = [
    pytest.param(policy, options, id=f"{kind}, {name}")
    for kind, policy in SCHEDULES.items()
    for name, options in VARIANTS[kind].items()
]


def some_units(device: str) -> Units:
    length = torch.randint(0, 40, (300,), generator=torch.Generator().manual_seed(2))
    length[17] = 5000
    return Units.from_offsets(torch.cat([torch.zeros(1).long(), length.cumsum(0)]).to(device))


def test_units_on_the_host_stay_as_they_are():
    units = some_units("cpu")
    assert units.near() is units


@pytest.mark.parametrize(("policy", "options"), POLICIES)
def test_a_schedule_moves_with_all_its_tensors(policy, options):
    units = some_units("cpu")
    if policy.reason(units) is not None:
        pytest.skip("another kind of units")
    made = policy.make(units, **options)
    moved = made.to(torch.device("meta"))
    assert all(tensor.is_meta for tensor in moved.tensors().values())
    assert moved.item_count == made.item_count and type(moved) is policy


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("policy", "options"), POLICIES)
def test_the_same_as_made_on_the_gpu(policy, options):
    units = some_units("cuda")
    if policy.reason(units) is not None:
        pytest.skip("another kind of units")
    there = policy.make(units, **options).tensors()
    here = policy.make(units.near(), **options).to(torch.device("cuda")).tensors()
    assert there.keys() == here.keys()
    for name, tensor in there.items():
        assert here[name].is_cuda and torch.equal(here[name], tensor), name


@pytest.mark.gpu
@needs_gpu
def test_units_in_no_order_come_as_they_are_and_many_stay(monkeypatch):
    units = some_units("cuda")
    rows = torch.randperm(units.count, device="cuda")
    mixed = Units(units.label[rows], units.begin[rows], units.length[rows], rows % 3 == 0)
    near = mixed.near()
    for name in ("label", "begin", "length", "bundled"):
        found, given = getattr(near, name), getattr(mixed, name)
        assert found.dtype is given.dtype and torch.equal(found, given.cpu())
    monkeypatch.setattr(module, "HOST_UNITS", units.count - 1)
    assert units.near() is units
