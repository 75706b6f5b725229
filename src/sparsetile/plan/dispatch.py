"""torch's modes: whether its dispatcher has to see an operator, and tensors that outlive a mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

__all__ = ["lasting", "plain_call"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

# torch has no public way to ask whether a dispatch mode or a functorch transform is active. Where
# these private functions are missing, every call goes through the dispatcher, which is right too.
_dispatch_depth = getattr(torch._C, "_len_torch_dispatch_stack", None)
_function_depth = getattr(torch._C, "_len_torch_function_stack", None)
_functorch = getattr(torch._C, "_functorch", None)
_transform_level = getattr(_functorch, "maybe_current_level", None)
_CAN_BYPASS = None not in (_dispatch_depth, _function_depth, _transform_level)


def plain_call() -> bool:
    """True when no mode, transform or tracer needs to see the operator."""
    return (
        _CAN_BYPASS
        and not torch.compiler.is_compiling()
        and not _dispatch_depth()  # type: ignore[misc]
        and not _function_depth()  # type: ignore[misc]
        and _transform_level() is None  # type: ignore[misc]
        and forward_ad._current_level < 0  # tangents are no part of what the system computes
    )


def lasting(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function's tensors usable in training, also where inference mode is on.

    Inference tensors cannot be saved for backward, and what a plan keeps outlives the mode.
    """

    @functools.wraps(function)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return outside
