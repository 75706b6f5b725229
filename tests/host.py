"""A host that answers in place of a GPU: which device, context, stream and memory launches use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsetile.core.device import H200
from sparsetile.engines.rows import lengths
from sparsetile.kernels import KernelSpec, stages
from sparsetile.launch import staged

# What modules import to ask a GPU. A test may answer these, and nothing else, in another way.
QUESTIONS = {
    "current_device", "current_stream_handle", "device_index", "encode_matrix",
    "ensure_cuda_context", "faults_address", "machine", "on_device", "processors", "record_stream",
    "scratch", "zeroed_flag",
}  # fmt: skip


class OnGPU(Tensor):
    """A tensor in the host's memory that says it is on a GPU. What torch makes of it is plain."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def detach(self) -> OnGPU:
        return super().detach().as_subclass(OnGPU)


def unread_scratch(
    device: Any, stream: int, size: int, counters: int, owner: int = 0
) -> tuple[Tensor, Tensor]:
    """Scratch memory that holds what nobody should read, and zeroed counters."""
    return torch.full((size,), 255, dtype=torch.uint8), torch.zeros(counters, dtype=torch.int32)


def h200(device: Any) -> Any:
    """An H200, whatever the device."""
    return H200


def one_processor(device: Any) -> int:
    return 1


@contextlib.contextmanager
def built_by_kernels(*devices: str) -> Iterator[None]:
    """Kernels build the formats of matrices on ``devices``, and on no others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged, "KERNEL_DEVICES", set(devices))
        yield


def cut_rows(monkeypatch: pytest.MonkeyPatch, longer: int, length: int) -> None:
    """Cut rows of more than ``longer`` entries into segments of ``length``."""
    monkeypatch.setattr(lengths, "SHARED_UNCUT", longer)
    monkeypatch.setattr(lengths, "segment_length", lambda units, row_bytes: length)


def launch_few_blocks(monkeypatch: pytest.MonkeyPatch, blocks: int = 1) -> None:
    """Build formats with so few thread blocks that they take several turns."""
    answer_on_host(monkeypatch, staged, processors=one_processor)
    monkeypatch.setattr(stages, "STAGE_BLOCKS", blocks)


def answer_on_host(
    monkeypatch: pytest.MonkeyPatch,
    *modules: ModuleType,
    stream: int = 0,
    load: Callable[..., Any] | None = None,
    **answers: Callable[..., Any],
) -> None:
    """Let ``modules`` launch without a GPU: none is made current, and the stream is ``stream``.

    ``load`` replaces :meth:`KernelSpec.load`; ``answers`` replace further questions to the GPU in
    those modules that ask them.
    """
    assert answers.keys() <= QUESTIONS
    given = {
        "current_device": lambda: None,
        "current_stream_handle": lambda device: stream,
        "device_index": lambda device: 0,
        "ensure_cuda_context": lambda device: None,
        "on_device": lambda device: contextlib.nullcontext(),
    } | answers
    for module in modules:
        for question in given.keys() & vars(module).keys():
            monkeypatch.setattr(module, question, given[question])
        if "_launches" in vars(module):  # those that are kept were loaded for another test
            monkeypatch.setattr(module, "_launches", type(module._launches)())
    assert all(any(name in vars(module) for module in modules) for name in answers)
    if load is not None:
        monkeypatch.setattr(KernelSpec, "load", load)
