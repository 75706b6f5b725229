"""CUDA graphs that hold nothing: code that captures and replays runs without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace

from sparsetile.core.epoch import epoch

__all__ = ["FakeGraph"]


class FakeGraph:
    """Notes the epoch at each replay."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def replay(self) -> None:
        self.epochs.append(epoch())

    @classmethod
    def put_into(cls, torch_cuda: Callable[..., None]) -> FakeGraph:
        """Let torch.cuda make this graph, and run what is captured as usual."""
        made = cls()
        stream = SimpleNamespace(wait_stream=lambda other: None)
        torch_cuda(
            Stream=stream, current_stream=stream, stream=contextlib.nullcontext(),
            CUDAGraph=made, graph=contextlib.nullcontext(),
        )  # fmt: skip
        return made
