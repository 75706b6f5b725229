"""Whether torch's dispatcher has to see an operator, or a plan may call the system directly."""

from __future__ import annotations

import torch

__all__ = ["plain_call"]

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
    )
