"""Tensors that end where memory ends: whoever reads past the last element ends the process or,
on a GPU, gets an error."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

__all__ = ["guarded", "guarded_on_gpu"]


def guarded(values: Tensor) -> Tensor:
    """Return a copy in the host's memory, before a page that nobody may read."""
    size = values.numel() * values.element_size()
    before = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, before + mmap.PAGESIZE)
    copy = torch.frombuffer(memory, dtype=values.dtype, offset=before - size, count=values.numel())
    page = ctypes.c_void_p(copy.data_ptr() + size)
    assert ctypes.CDLL(None).mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return copy.view(values.shape).copy_(values)


@contextlib.contextmanager
def guarded_on_gpu(values: Tensor) -> Iterator[Tensor]:
    """Give a copy on the current GPU, before addresses that are reserved and have no memory."""
    from cuda.bindings import driver

    def call(name: str, *arguments: object) -> object:
        error, *results = getattr(driver, name)(*arguments)
        assert error == driver.CUresult.CUDA_SUCCESS, f"{name}: {error}"
        return results[0] if results else None

    place = driver.CUmemLocation()
    place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    place.id = torch.cuda.current_device()
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location = place
    access = driver.CUmemAccessDesc()
    access.location = place
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    unit = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    step = call("cuMemGetAllocationGranularity", wanted, unit)
    size = values.numel() * values.element_size()
    before = -(-size // step) * step  # type: ignore[operator]
    first = call("cuMemAddressReserve", before + step, 0, 0, 0)
    memory = call("cuMemCreate", before, wanted, 0)
    call("cuMemMap", first, before, 0, memory, 0)
    call("cuMemSetAccess", first, before, [access], 1)
    given = (int(first) + before - size, False)  # type: ignore[call-overload]
    # By bytes: the interface has no bfloat16.
    bytes_of = {"shape": (size,), "typestr": "|u1", "data": given, "version": 3}
    copy = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=bytes_of), device="cuda")
    yield copy.view(values.dtype).view(values.shape).copy_(values)
    torch.cuda.synchronize()
    call("cuMemUnmap", first, before)
    call("cuMemRelease", memory)
    call("cuMemAddressFree", first, before + step)
