"""What a training step changes, so that :func:`sparsetile.nn.captured` can run it for practice.

Parameters, buffers and the states of optimisers and of a GradScaler are copied before the first
such run, and copied back in place after the last: a CUDA graph keeps their addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from sparsetile.core.errors import value_error

__all__ = ["TrainingState"]

# First values of optimiser state that does not begin with 0; None stands for the learning rate.
_FIRST = {"mu": 1.0, "mu_product": 1.0, "eta": None, "step_size": None}


class TrainingState:
    """A copy of the state of a training step. Gradients are None from then on, until
    :meth:`rewind` or :meth:`restore` returns the earlier ones.

    Buffers, and parameters that no optimiser has, are copied when their module is first called
    (:meth:`watched`).
    """

    def __init__(self, optimizers: Sequence[Optimizer], scaler: Any = None) -> None:
        self._optimizers, self._scaler = optimizers, scaler
        self._scaling = None if scaler is None else scaler.state_dict()
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id
        self._grads: dict[int, tuple[Tensor, Tensor | None]] = {}  # by id of the parameter
        self._settings = [
            (group, dict(group)) for each in optimizers for group in each.param_groups
        ]
        self._states: list[dict[Any, dict[str, Any]]] = [
            {key: dict(state) for key, state in each.state.items()} for each in optimizers
        ]
        for _, settings in self._settings:
            self._keep(settings["params"])
            self._keep(settings.values())
        for states in self._states:
            for state in states.values():
                self._keep(state.values())

    def _keep(self, values: Iterable[Any]) -> None:
        for each in values:
            if not isinstance(each, Tensor) or each.is_inference():
                continue
            if id(each) not in self._copies:
                self._copies[id(each)] = each, each.detach().clone()
                if each.requires_grad and each.is_leaf:
                    self._grads[id(each)] = each, each.grad
                    each.grad = None

    @property
    def parameters(self) -> list[Tensor]:
        """All tensors that collect gradients."""
        return [parameter for parameter, _ in self._grads.values()]

    def writes(self) -> int:
        """Return torch's count of writes to everything that is copied."""
        return sum(tensor._version for tensor, _ in self._copies.values())

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Copy the state of every module that is called; refuse a step of another optimiser."""

        def called(module: nn.Module, _: Any) -> None:
            self._keep(each for each in module.parameters() if each.requires_grad)
            self._keep(module.buffers())

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            if not any(optimizer is each for each in self._optimizers):
                raise value_error(
                    "captured", "optimizer", "every optimiser that the step runs",
                    f"a step of another {type(optimizer).__name__}",
                    "Pass optimizer=, several as a list",
                )  # fmt: skip

        hooks = register_module_forward_pre_hook(called), register_optimizer_step_pre_hook(stepped)
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    def make_capturable(self) -> None:
        """Let optimisers that can count their steps on the GPU do so."""
        for optimizer in self._optimizers:
            if not all("capturable" in group for group in optimizer.param_groups):
                continue
            optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                group["capturable"] = True
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        state[name] = value.to(parameter.device)

    def check(self) -> None:
        """Raise if an optimiser's state cannot be part of a CUDA graph, or cannot be reset."""
        for optimizer, before in zip(self._optimizers, self._states, strict=True):
            name, settings = type(optimizer).__name__, optimizer.param_groups[0]
            known = type(optimizer).__module__.startswith("torch.optim.")
            known = known and not (settings.get("momentum") and settings.get("dampening"))
            for parameter, state in optimizer.state.items():
                for part, value in state.items():
                    on_host = type(value) in (int, float)
                    if isinstance(value, Tensor):
                        on_host = value.device != parameter.device
                        if not known and part not in before.get(parameter, {}):
                            raise value_error(
                                "captured", "optimizer", "one whose first state is known",
                                f"{name} before its first step", "Take one step before the capture",
                            )  # fmt: skip
                    if on_host:
                        raise value_error(
                            "captured", "optimizer", "one that keeps its state on the GPU",
                            f"{name}, whose {part!r} is on the host",
                            "Use one with the argument capturable, such as Adam, or SGD",
                        )  # fmt: skip

    def rewind(self) -> None:
        """Copy all values back. State that optimisers have made since gets its first values."""
        self._copy_back()
        rates = {
            parameter: group["lr"] for group, _ in self._settings for parameter in group["params"]
        }
        with torch.no_grad():
            for optimizer, before in zip(self._optimizers, self._states, strict=True):
                for parameter, state in optimizer.state.items():
                    old = before.get(parameter, {})
                    for name, value in state.items():
                        if isinstance(value, Tensor) and isinstance(old.get(name), Tensor):
                            value.copy_(old[name])  # which may be on another device
                        elif isinstance(value, Tensor):
                            first = _FIRST.get(name, 0.0)
                            value.fill_(rates[parameter] if first is None else first)

    def restore(self) -> None:
        """Make everything what it was, as after a capture that failed."""
        self._copy_back()
        for group, settings in self._settings:
            group.update(settings)
        for optimizer, before in zip(self._optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(before)

    def _copy_back(self) -> None:
        with torch.no_grad():
            for tensor, copy in self._copies.values():
                tensor.copy_(copy)
        for parameter, grad in self._grads.values():
            parameter.grad = grad
        if self._scaling:
            with contextlib.suppress(AssertionError):  # it was not used yet
                self._scaler.update(self._scaling["scale"])  # forgets a step that was broken off
            self._scaler.load_state_dict(self._scaling)
