"""Machine ceilings and the floor: the least time physics allows for one product.

floor = max(launch, compulsory, min(g1, max(g16, f16), max(g64, f64))), where *compulsory* moves
A, the used rows of B, and C once through DRAM; gW gathers the distinct (window of W rows, column)
pairs of B through L2; fW multiplies them on Tensor Cores. The floor holds for the given row
order: an order that lowers the distinct pairs lowers it.

The H200's ceilings were measured (DRAM copy, random gather from L2, dense products); other GPUs'
come from their clocks and widths, scaled by what an H200 reaches of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from sparsetile.formats.pairs import distinct_pairs
from sparsetile.intake.csr import CSR

__all__ = ["H200", "Floor", "Machine", "floor_seconds", "machine"]


@dataclass(frozen=True)
class Machine:
    """Ceilings of one device: bytes per second, flops per second, seconds per launch."""

    name: str
    dram: float
    l2_gather: float
    l2_bytes: int
    tensor_flops_16: float  # 16-row tiles through mma.sync, 32-bit inputs
    tensor_flops_64: float  # 64-row tiles through wgmma, 32-bit inputs
    dense_flops: float  # plain matrix product in the same type
    launch: float


H200 = Machine("NVIDIA H200", 4.2e12, 9.1e12, 60 * 2**20, 250e12, 350e12, 390e12, 2.5e-6)
# The share of the theoretical DRAM rate that the H200's copy reaches: 4.2 of 4.8 TB/s.
_DRAM_SHARE = 0.875
_CPU = Machine("CPU", 20e9, 60e9, 32 * 2**20, 100e9, 100e9, 100e9, 5e-6)


@functools.cache
def machine(device: torch.device) -> Machine:
    """Return the ceilings of a device."""
    if device.type != "cuda":
        return _CPU
    properties = torch.cuda.get_device_properties(device)
    if properties.name == H200.name:
        return H200
    share = properties.multi_processor_count / 132
    clock = getattr(properties, "memory_clock_rate", 0) * 1e3  # kHz -> Hz
    width = getattr(properties, "memory_bus_width", 0) / 8
    dram = 2 * clock * width * _DRAM_SHARE or H200.dram * share
    return Machine(
        properties.name,
        dram,
        max(dram, H200.l2_gather * share),
        getattr(properties, "L2_cache_size", 0) or 32 * 2**20,
        H200.tensor_flops_16 * share,
        H200.tensor_flops_64 * share,
        H200.dense_flops * share,
        H200.launch,
    )


@dataclass(frozen=True)
class Floor:
    """The floor and which term set it."""

    seconds: float
    term: str


def floor_seconds(
    csr: CSR, n: int, dtype: torch.dtype, ceilings: Machine, perm: torch.Tensor | None = None
) -> Floor:
    """Return the least time of one product of width ``n`` on a machine."""
    item = dtype.itemsize
    rows, _ = csr.shape
    used_columns = int(torch.unique(csr.indices).numel()) if csr.nnz else 0
    value_bytes = 0 if csr.values is None else item
    compulsory = ((4 + value_bytes) * csr.nnz + item * n * (used_columns + rows)) / ceilings.dram

    def gather(pairs: int) -> float:
        return item * n * (pairs + rows) / ceilings.l2_gather

    speedup = 4 / item  # 16-bit types double the Tensor Core rate
    routes = {"gather by row": gather(csr.nnz)}
    for window, rate in ((16, ceilings.tensor_flops_16), (64, ceilings.tensor_flops_64)):
        pairs = distinct_pairs(csr, window, perm)
        flops = 2 * window * pairs * n / (rate * speedup)
        routes[f"gather by {window}-row window"] = max(gather(pairs), flops)
    best = min(routes, key=routes.__getitem__)
    terms = {"launch": ceilings.launch, "compulsory traffic": compulsory, best: routes[best]}
    top = max(terms, key=terms.__getitem__)
    return Floor(terms[top], top)
