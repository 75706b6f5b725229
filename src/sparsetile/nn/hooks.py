"""Hooks of torch's modules and tensors: what a fused or replaced layer must not bypass or lose."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils import parametrizations

__all__ = [
    "HOOKS", "has_hooks", "has_state_hooks", "has_tensor_hooks", "is_plain_linear",
    "take_over_hooks",
]  # fmt: skip

# Attributes of a module with its hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes that say how each hook is called.
_HOW_CALLED = (
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
)  # fmt: skip
_STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


def has_hooks(module: object) -> bool:
    """Whether a module has a forward or backward hook."""
    attributes = getattr(module, "__dict__", {})
    for name in HOOKS:  # noqa: SIM110  a generator costs as much as all four
        if attributes.get(name):
            return True
    return False


def has_state_hooks(module: nn.Module) -> bool:
    """Whether a module has a hook that reads or changes its state dict.

    The hook that a removed ``weight_norm`` leaves behind does not count: it reads old files.
    """
    found = [hook for name in _STATE_HOOKS for hook in vars(module).get(name, {}).values()]
    return any(
        getattr(getattr(hook, "hook", hook), "__module__", "") != parametrizations.__name__
        for hook in found
    )


def has_tensor_hooks(tensor: Tensor | None) -> bool:
    """Whether a tensor has a hook on its gradient."""
    return tensor is not None and bool(
        tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    )


def take_over_hooks(new: nn.Module, old: nn.Module) -> None:
    """Give a module the hooks of the one it replaces.

    It takes the dictionaries themselves: a handle that ``register_forward_hook`` returned refers
    to one of them, and still removes its hook.
    """
    for name in (*HOOKS, *_HOW_CALLED):
        setattr(new, name, getattr(old, name))


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling a module computes x·Wᵀ + bias and nothing else.

    False for a module that replaces ``nn.Linear``, such as a LoRA layer, and for one with hooks.
    """
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not has_hooks(module)
    )
