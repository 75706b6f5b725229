"""CUDA graphs without a GPU: for code that captures and replays."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from sparsetile.core.epoch import epoch

__all__ = ["FakeGraph", "RepeatingGraph"]

captured: Any = importlib.import_module("sparsetile.nn.captured")  # a function has its name, too


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


class RepeatingGraph:
    """A CUDA graph on the host: its capture changes no values, and a replay runs the step again.

    As on a GPU, a replay reads the static inputs and the gradients that were there at the capture,
    and writes results and gradients where the capture left them.
    """

    def __init__(self) -> None:
        self.step: Any = None
        self.replays = 0

    @contextlib.contextmanager
    def capturing(self, *_: Any, **__: Any) -> Iterator[None]:
        state = self.state
        values = [tensor for tensor, _ in state._copies.values()]
        values += [v for each in state._optimizers for s in each.state.values() for v in s.values()]
        copies = [
            (each, each.detach().clone()) for each in values if isinstance(each, torch.Tensor)
        ]
        self.entered = [(each, each.grad) for each in state.parameters]
        with torch.random.fork_rng(devices=[]):
            yield
        with torch.no_grad():
            for each, copy in copies:
                each.copy_(copy)

    def replay(self) -> None:
        self.replays += 1
        for parameter, grad in self.entered:
            parameter.grad = grad
        outputs = tree_leaves(self.step._run(None))
        for own, new in zip(self.step._results, outputs, strict=True):
            own.copy_(new)
        for parameter, left in self.step._grads:
            if left is not None and parameter.grad is not left:
                left.copy_(parameter.grad)

    @classmethod
    def put_into(cls, monkeypatch: pytest.MonkeyPatch) -> RepeatingGraph:
        """Let ``captured`` take the host for a GPU."""
        made, stream = cls(), SimpleNamespace(wait_stream=lambda other: None)
        prepare = captured.CapturedStep._prepare

        def noted(step: Any, device: torch.device, state: Any) -> None:
            made.step, made.state = step, state
            prepare(step, device, state)

        def fork_rng(devices: Any, fork: Any = torch.random.fork_rng) -> Any:
            return fork(devices=[])

        replaced: dict[Any, dict[str, Any]] = {
            captured.CapturedStep: {"_prepare": noted},
            captured: {
                "_capture_device": lambda leaves, optimizers: torch.device("cpu"),
                "record_stream": lambda tensors, device: None,
            },
            captured.TrainingState: {"make_capturable": lambda state: None},
            torch.random: {"fork_rng": fork_rng},
            torch.cuda: {
                "Stream": lambda device: stream,
                "current_stream": lambda device: stream,
                "stream": lambda given: contextlib.nullcontext(),
                "CUDAGraph": lambda: made,
                "graph_pool_handle": lambda: None,
                "graph": made.capturing,
                "get_sync_debug_mode": lambda: 0,
                "set_sync_debug_mode": lambda mode: None,
            },
        }
        for place, names in replaced.items():
            for name, value in names.items():
                monkeypatch.setattr(place, name, value)
        return made
