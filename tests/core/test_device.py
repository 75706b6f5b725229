"""Facts about devices: known GPUs, scaled ones, and the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from sparsetile.core.device import H200, Machine, capability, l2_bytes, machine, processors


@pytest.fixture
def ceilings_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machine]]:
    """What is found for a GPU with these properties."""

    def find(**properties: object) -> Machine:
        told = SimpleNamespace(**properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        machine.cache_clear()
        return machine(torch.device("cuda", 0))

    yield find
    machine.cache_clear()


def test_the_measured_ceilings_are_those_of_the_h200(ceilings_of):
    found = ceilings_of(name="NVIDIA H200", multi_processor_count=132)
    assert (found.dram, found.l2_gather, found.launch) == (4.2e12, 9.1e12, 2.5e-6)
    assert (found.tensor_flops_16, found.tensor_flops_64) == (250e12, 350e12)


def test_another_gpu_is_scaled_by_its_clocks_and_processors(ceilings_of):
    found = ceilings_of(
        name="Half an H200", multi_processor_count=66,
        memory_clock_rate=1_000_000, memory_bus_width=4096, L2_cache_size=12345,
    )  # fmt: skip
    # Two transfers a clock of 512 bytes at 1 GHz, 87.5 % of which a copy reaches.
    assert found.dram == pytest.approx(2 * 1e9 * 512 * 0.875)
    assert found.l2_gather == pytest.approx(9.1e12 / 2) and found.l2_bytes == 12345
    assert found.tensor_flops_64 == pytest.approx(175e12)


def test_a_gpu_that_tells_nothing_of_its_memory_is_scaled_by_processors(ceilings_of):
    found = ceilings_of(name="Silent", multi_processor_count=33)
    assert found.dram == pytest.approx(4.2e12 / 4) and found.l2_bytes > 0


def test_the_cpu_has_ceilings_too():
    assert machine(torch.device("cpu")).name == "CPU"


def test_a_plan_built_on_a_host_is_for_an_h200():
    host = torch.device("cpu")
    assert (
        (processors(host), l2_bytes(host)) == (H200.processors, H200.l2_bytes) == (132, 60 * 2**20)
    )


def test_a_plan_built_on_a_gpu_is_for_that_gpu(ceilings_of):
    ceilings_of(name="small", multi_processor_count=8, L2_cache_size=2**20)
    there = torch.device("cuda", 0)
    assert (processors(there), l2_bytes(there)) == (8, 2**20)


def test_a_chosen_gpu_has_its_own_limits_and_the_ceilings_of_the_one_at_hand(
    ceilings_of, environment
):
    environment(SPARSETILE_CAPABILITY="8.6:82:6")
    found = ceilings_of(name="NVIDIA H200", multi_processor_count=132)
    assert (found.processors, found.l2_bytes) == (82, 6 * 2**20)
    assert (found.shared_block, found.shared_processor) == (99 * 1024, 100 * 1024)
    assert found.dram == H200.dram and found.name == "NVIDIA H200 as sm86", (
        "timings kept on disk are of the other GPU"
    )
    environment(SPARSETILE_CAPABILITY="8.0")
    found = ceilings_of(name="NVIDIA H200", multi_processor_count=132)
    assert found.shared_block == 163 * 1024 and found.processors == 132


def test_the_shared_memory_of_a_gpu_follows_its_capability(ceilings_of):
    assert (H200.shared_block, H200.shared_processor) == (227 * 1024, 228 * 1024)
    assert ceilings_of(name="other", multi_processor_count=1).shared_block == 227 * 1024


def test_a_capability_newer_than_the_gpu_is_refused(monkeypatch, environment):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert capability(0) == (8, 9)
    environment(SPARSETILE_CAPABILITY="9.0")
    with pytest.raises(ValueError) as caught:
        capability(0)
    assert str(caught.value) == (
        "settings: SPARSETILE_CAPABILITY must be at most the GPU's, 8.9, got 9.0. "
        "Unset it or give an older one."
    )
