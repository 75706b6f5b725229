"""Facts about devices: SMs, L2, measured ceilings. Plans, cost models and floors read them here.

The H200's ceilings were measured (DRAM copy, random gather from L2, dense products). Those of other
GPUs are the H200's, scaled by what the driver says of both: SMs, clocks, bus width, and the rate of
the Tensor Cores of their compute capability. A plan built on a machine without its GPU assumes an
H200.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparsetile.core import settings
from sparsetile.core.errors import value_error

__all__ = [
    "H200", "HOST", "SMALLEST_L2_BYTES", "Machine", "capability", "capability_name", "l2_bytes",
    "machine", "processors", "scaled_machine", "shared_bytes",
]  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """One device: its sizes, and its ceilings in bytes, flops and seconds."""

    name: str
    processors: int  # SMs; 0 on a host
    l2_bytes: int  # bytes of the last cache before DRAM, as the driver reports it
    # dram, l2_gather: bytes per second of a DRAM copy, and of random gathers that hit L2.
    dram: float
    l2_gather: float
    # tensor_flops_16, tensor_flops_64: flops per second of 16-row tiles through ``mma.sync`` and of
    # 64-row tiles through ``wgmma``, 32-bit inputs.
    tensor_flops_16: float
    tensor_flops_64: float
    dense_flops: float  # flops per second of a plain matrix product in 32-bit inputs
    launch: float  # shortest time of a product in seconds
    # Bytes of shared memory that a thread block may use, and that an SM has for its blocks.
    shared_block: int = 227 * 1024
    shared_processor: int = 228 * 1024
    scaled: bool = False  # whether the ceilings are another GPU's, scaled


# 60 MiB of L2 is what the H200's driver reports; a product shares about 50 with everything else.
H200 = Machine("NVIDIA H200", 132, 60 * 2**20, 4.2e12, 9.1e12, 250e12, 350e12, 390e12, 2.5e-6)
# L2 of an A100, the smallest of the data-centre GPUs that the kernels were measured for (H100: 50,
# H200: 60). Choices that must be the same on all of them assume this size.
SMALLEST_L2_BYTES = 40 * 2**20
HOST = Machine("CPU", 0, 32 * 2**20, 20e9, 60e9, 100e9, 100e9, 100e9, 5e-6)
# The share of the theoretical DRAM rate that the H200's copy reaches: 4.2 of 4.8 TB/s.
_DRAM_SHARE = 0.875
# The H200's highest SM clock in Hz, as its driver reports it.
_CLOCK = 1.98e9
# Flops per clock of an SM in 16 bits with sums in float32, dense, by compute capability or else by
# its major number (NVIDIA's architecture whitepapers); GeForce GPUs have half of it.
_FLOPS = {(8, 0): 2048}
_FLOPS_BY_MAJOR = {8: 1024, 9: 4096, 10: 8192, 12: 1024}
_FLOPS_OLDER = 512
# The share of it that ``mma.sync`` reaches on sm_90; only ``wgmma`` reaches all.
_SYNC_SHARE = 0.62


# KB of shared memory of an SM by compute capability (CUDA programming guide, technical
# specifications). A thread block may use 1 KB less. Others have as much as sm_90 or sm_89, by their
# major number: GPUs for workstations have less.
_SHARED_KB = {(8, 0): 164, (8, 6): 100, (8, 7): 164, (8, 9): 100}
_SHARED_KB_BY_MAJOR = {8: 100, 12: 100}
_SHARED_KB_ELSE = 228


def capability(device: torch.device | int) -> tuple[int, int]:
    """Return the compute capability that kernels are made for: the GPU's, or the chosen one.

    ``SPARSETILE_CAPABILITY`` chooses it; it cannot be newer than the GPU.
    """
    there = torch.cuda.get_device_capability(device)
    chosen = settings.chosen_gpu()
    if chosen is None:
        return there
    if chosen.capability > there:
        raise value_error(
            "settings", "SPARSETILE_CAPABILITY", f"at most the GPU's, {there[0]}.{there[1]}",
            f"{chosen.capability[0]}.{chosen.capability[1]}", "Unset it or give an older one",
        )  # fmt: skip
    return chosen.capability


def shared_bytes(of: tuple[int, int]) -> int:
    """Return the bytes of shared memory of an SM of a compute capability."""
    kilobytes = _SHARED_KB.get(of) or _SHARED_KB_BY_MAJOR.get(of[0], _SHARED_KB_ELSE)
    return kilobytes * 1024


@functools.cache
def machine(device: torch.device) -> Machine:
    """Return the facts of a device."""
    if device.type != "cuda":
        return HOST
    found, chosen = _real(device), settings.chosen_gpu()
    if chosen is None:
        return found
    shared = shared_bytes(capability(device))
    return replace(
        found, name=f"{found.name} as {chosen.slug}", shared_block=shared - 1024,
        processors=chosen.processors or found.processors,
        l2_bytes=chosen.l2_bytes or found.l2_bytes, shared_processor=shared,
    )  # fmt: skip


def _real(device: torch.device) -> Machine:
    properties = torch.cuda.get_device_properties(device)
    if properties.name == H200.name:
        return H200
    return scaled_machine(properties, torch.cuda.get_device_capability(device))


def scaled_machine(properties: Any, of: tuple[int, int]) -> Machine:
    """Return the facts of a GPU that nobody measured, from torch's properties of it.

    ``of`` is its compute capability. Clocks that the driver does not report are taken to be an
    H200's, and so is the DRAM bandwidth per SM.
    """
    shared, name = shared_bytes(of), properties.name
    count = int(properties.multi_processor_count)
    clock = getattr(properties, "clock_rate", 0) * 1e3  # kHz -> Hz
    share = count / H200.processors * (clock / _CLOCK if clock else 1.0)
    transfers = 2 * getattr(properties, "memory_clock_rate", 0) * 1e3
    width = getattr(properties, "memory_bus_width", 0) / 8
    dram = transfers * width * _DRAM_SHARE or H200.dram * count / H200.processors
    rate = _FLOPS.get(of) or _FLOPS_BY_MAJOR.get(of[0], _FLOPS_OLDER)
    flops = share * rate / _FLOPS_BY_MAJOR[9] / (2 if "GeForce" in name else 1)
    # Before sm_90, and on sm_120, ``mma.sync`` reaches all of the rate.
    sync = flops if of[0] in (9, 10) else flops / _SYNC_SHARE
    return Machine(
        name, count, int(getattr(properties, "L2_cache_size", 0)) or 32 * 2**20, dram,
        max(dram, H200.l2_gather * share), H200.tensor_flops_16 * sync,
        H200.tensor_flops_64 * flops, H200.dense_flops * flops, H200.launch, shared - 1024, shared,
        scaled=True,
    )  # fmt: skip


def _gpu(device: torch.device) -> Machine:
    """The GPU that a plan on ``device`` is built for; an H200 if ``device`` is the host."""
    return machine(device) if device.type == "cuda" else H200


def processors(device: torch.device) -> int:
    """SMs of the GPU that a plan on ``device`` is built for."""
    return _gpu(device).processors


def l2_bytes(device: torch.device) -> int:
    """Bytes of L2 of the GPU that a plan on ``device`` is built for."""
    return _gpu(device).l2_bytes


def capability_name(device: torch.device) -> str:
    """Return the compute capability of a CUDA device as ``sm_90``."""
    major, minor = capability(device)
    return f"sm_{major}{minor}"
