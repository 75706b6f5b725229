"""Hooks of torch's modules: what a fused or replaced layer must not bypass."""

from __future__ import annotations

from torch import nn

__all__ = ["HOOKS", "has_hooks", "is_plain_linear"]

# Attributes of a module that hold its hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: object) -> bool:
    """Whether a module has a forward or backward hook."""
    held = getattr(module, "__dict__", {})
    for name in HOOKS:  # noqa: SIM110  a generator costs as much as all four
        if held.get(name):
            return True
    return False


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling a module computes x·Wᵀ + bias and nothing else.

    False for a module that replaces ``nn.Linear``, such as a LoRA layer, and for one with hooks.
    """
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not has_hooks(module)
    )
