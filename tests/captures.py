"""CUDA graphs that hold nothing: code that captures and replays runs without a GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from sparsetile.core.epoch import epoch

__all__ = ["FakeGraph"]


class FakeGraph:
    """Notes the epoch at each replay."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def replay(self) -> None:
        self.epochs.append(epoch())

    @classmethod
    def put_into(cls, monkeypatch: pytest.MonkeyPatch) -> FakeGraph:
        """Let torch.cuda make this graph, and run what is captured as usual."""
        made = cls()
        stream = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda given: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
        monkeypatch.setattr(torch.cuda, "graph", lambda given: contextlib.nullcontext())
        return made
