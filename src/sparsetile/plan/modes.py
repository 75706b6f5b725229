"""torch's modes and tracers: who has to see an operator, and what must stay out of them."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

__all__ = [
    "PLAIN_TYPES", "any_autocast", "maybe_wrapped", "outside_modes", "plain_call", "transforming",
    "untraced", "unwatched_call", "wrapped",
]  # fmt: skip

_P = ParamSpec("_P")
_R = TypeVar("_R")

# torch has no public way to ask whether a dispatch mode or a functorch transform is active. If
# these private functions are missing, every call goes through the dispatcher, which is right too.
_dispatch_depth = getattr(torch._C, "_len_torch_dispatch_stack", None)
_function_depth = getattr(torch._C, "_len_torch_function_stack", None)
_functorch = getattr(torch._C, "_functorch", None)
_transform_level = getattr(_functorch, "maybe_current_level", None)
_is_wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", None)
_is_compiling = torch.compiler.is_compiling
_CAN_BYPASS = None not in (_dispatch_depth, _function_depth, _transform_level)


# Subclasses may override what operators do.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

# any_autocast(): whether autocast is on for some type of device.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def plain_call() -> bool:
    """True when no mode, transform or tracer needs to see the operator."""
    return not _is_compiling() and unwatched_call()


def unwatched_call() -> bool:
    """As :func:`plain_call`, if the caller knows that torch.compile does not trace it."""
    return (
        _CAN_BYPASS
        and not _dispatch_depth()  # type: ignore[misc]
        and not _function_depth()  # type: ignore[misc]
        and _transform_level() is None  # type: ignore[misc]
        and forward_ad._current_level < 0  # tangents are no part of what the system computes
    )


def transforming() -> bool:
    """True inside of vmap, grad, jacrev and the other transforms of torch.func."""
    if _transform_level is None or torch.compiler.is_dynamo_compiling():
        return False
    return _transform_level() is not None


def wrapped(tensor: object) -> bool:
    """True for a tensor that lives no longer than the transform of torch.func it belongs to."""
    return (
        isinstance(tensor, torch.Tensor)
        and transforming()
        and _functorch.is_functorch_wrapped_tensor(tensor)  # type: ignore[union-attr]
    )


def maybe_wrapped(tensor: object) -> bool:
    """True for a tensor of a transform of torch.func that may be over; unknown counts as such."""
    if _is_wrapped is None:
        return True
    return tensor is not None and _is_wrapped(tensor)


def outside_modes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function's tensors plain ones, whatever mode or transform is active.

    What a plan keeps outlives the mode. Inference tensors cannot be saved for backward, the
    wrappers of torch.func die with their transform, and a tracer's tensors hold no data.
    """

    @functools.wraps(function)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        inference, transformed = torch.is_inference_mode_enabled(), transforming()
        dispatched = _dispatch_depth is not None and _dispatch_depth()
        if not (inference or transformed or dispatched):
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            if inference:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            if transformed:
                from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

                stack.enter_context(temporarily_clear_interpreter_stack())
            if dispatched:
                from torch.utils._python_dispatch import _disable_current_modes

                stack.enter_context(_disable_current_modes())
            return function(*args, **kwargs)

    return outside


def untraced(advice: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Keep torch.compile out of a function and of all that it calls.

    As ``torch.compiler.disable``, without the 1.5 s import of torch._dynamo if nobody compiles.
    ``advice`` is what torch says if a graph must not break.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        disabled: list[Callable[_P, _R]] = []

        @functools.wraps(function)
        def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            if not disabled:
                disabled.append(torch.compiler.disable(function))
            return disabled[0](*args, **kwargs)

        outside._torchdynamo_disable = True  # type: ignore[attr-defined]
        outside._torchdynamo_disable_msg = advice  # type: ignore[attr-defined]
        return outside

    return decorate
