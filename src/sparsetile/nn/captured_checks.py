"""What :func:`sparsetile.nn.captured` refuses: inputs unlike the example, and new settings of an
optimiser, which a CUDA graph would not follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from sparsetile.core.errors import type_error, value_error

__all__ = ["Settings", "check_input", "check_optimizers"]


def check_input(index: int, given: Any, own: Any, device: torch.device | None) -> None:
    """Raise unless an input is a tensor like the example, ``own``."""
    name = f"inputs[{index}]"
    if not isinstance(given, Tensor):
        raise type_error(
            "captured", name, "a tensor", type(given).__name__,
            "Read what never changes in the step, without passing it",
        )  # fmt: skip
    if device not in (None, given.device):
        raise value_error(
            "captured", name, f"on {device}", given.device, f"Move it with .to({str(device)!r})"
        )
    if given.requires_grad:
        raise value_error(
            "captured", name, "without requires_grad", "a tensor that requires a gradient",
            "Read trained tensors in the step, without passing them",
        )  # fmt: skip
    if given.shape != own.shape or given.dtype != own.dtype:
        raise value_error(
            "captured", name, f"{_form(own)}, as in the example", _form(given),
            "Pad the input, or capture the step for each shape",
        )  # fmt: skip


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_optimizers(optimizers: list[Optimizer], scaler: Any, device: torch.device) -> None:
    """Raise if a setting is on the host, or if a scaler would wait for the GPU."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            for setting, value in group.items():
                if isinstance(value, Tensor) and value.device != device:
                    raise value_error(
                        "captured", setting, f"a number or a tensor on {device}",
                        f"a tensor on {value.device}", f"Move it with .to({str(device)!r})",
                    )  # fmt: skip
        scales = scaler is not None and scaler.is_enabled()
        if scales and not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise value_error(
                "captured", "optimizer", "one with fused=True if a GradScaler is used",
                f"{name} without it", f"Pass fused=True to {name}: others wait for the GPU",
            )  # fmt: skip


class Settings:
    """Numbers that a capture takes from optimisers, and addresses of parameters."""

    def __init__(self, optimizers: list[Optimizer], parameters: list[Tensor]) -> None:
        self._states = [(each, each.state) for each in optimizers]
        self._groups = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for each in optimizers
            for group in each.param_groups
        ]
        self._places = [(each, each.data_ptr()) for each in parameters]

    def check(self) -> None:
        """Raise if they are others now: a replay would not follow."""
        for group, settings in self._groups:
            for name, value in settings.items():
                if group[name] is not value and group[name] != value:
                    raise value_error(
                        "captured", name, f"{value}, as at the capture", group[name],
                        "Capture the step again, or make it a tensor on the GPU, which Adam, AdamW "
                        "and SGD(fused=True) read at each step",
                    )  # fmt: skip
        if any(optimizer.state is not state for optimizer, state in self._states):
            raise value_error(
                "captured", "optimizer", "as it was at the capture", "a loaded state",
                "Load the state first, then capture the step",
            )  # fmt: skip
        if any(parameter.data_ptr() != place for parameter, place in self._places):
            raise value_error(
                "captured", "parameters", "where they were at the capture", "moved ones",
                "Write new values in place, or capture the step again",
            )  # fmt: skip
