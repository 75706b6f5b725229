"""split_experts_: experts of a mixture, stored in weights of three dimensions, as linear layers.

transformers stores the experts of a layer as ``gate_up_proj`` [experts, 2 inner, hidden] and
``down_proj`` [experts, hidden, inner]. Pruned experts keep different numbers of weights, so each
becomes a feed-forward layer of its own, which ``sparsify_`` prunes like any other.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparsetile.core.errors import type_error, value_error
from sparsetile.nn.hooks import has_hooks, has_state_hooks, has_tensor_hooks
from sparsetile.nn.replacement import Replacements, names_of

__all__ = ["SPLIT", "SplitExperts", "split_experts_", "why_not_split"]

_Model = TypeVar("_Model", bound=nn.Module)
SPLIT = "expert_layers"
_WEIGHTS = {"gate_up_proj", "down_proj"}
# What transformers notes of a class of experts, and the values that the layers here compute.
_TRAITS = {
    "is_transposed": False, "is_concatenated": True, "has_bias": False, "has_gate": True,
    "has_post_expert_norm": False,
}  # fmt: skip


class Expert(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, gate_up: Tensor, down: Tensor, act_fn: nn.Module) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.gate_proj, self.up_proj, self.down_proj = map(_linear, (gate, up, down))
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    return made


class SplitExperts(nn.Module):
    """Experts as layers of their own; called as those of transformers."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        both, down = experts.gate_up_proj, experts.down_proj
        assert isinstance(both, Tensor) and isinstance(down, Tensor)
        act: Any = experts.act_fn
        made = [Expert(*weights, act) for weights in zip(both, down, strict=True)]
        for name, weight in (("gate_proj", both), ("up_proj", both), ("down_proj", down)):
            for expert in made:
                getattr(expert, name).weight.requires_grad_(weight.requires_grad)
        self.expert_layers = nn.ModuleList(made)
        self.train(experts.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return each token's sum over its experts, by their weights [tokens, k]."""
        out = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            if number >= len(self.expert_layers):  # a place without an expert
                continue
            tokens, place = torch.where(top_k_index == number)
            found = self.expert_layers[number](hidden_states[tokens])
            found = found * top_k_weights[tokens, place, None]
            out.index_add_(0, tokens, found.to(out.dtype))
        return out


def why_not_split(module: nn.Module) -> str | None:
    """Return why a module is not experts that can be split; None if it is."""
    traits = {name: getattr(module, name, None) for name in _TRAITS}
    if set(module._parameters) != _WEIGHTS or traits["is_transposed"] is None:
        return "its class is not one of transformers' experts"
    if traits != _TRAITS:
        other = [f"{name}={value}" for name, value in traits.items() if value != _TRAITS[name]]
        return f"its class has {', '.join(other)}"
    if any(part is None or part.dim() != 3 for part in module._parameters.values()):
        return "its weights do not have three dimensions"
    watched = has_hooks(module) or has_state_hooks(module) or "forward" in vars(module)
    if watched or any(has_tensor_hooks(part) for part in module._parameters.values()):
        return "it has hooks or a replaced forward"
    return None


def split_experts_(model: _Model) -> _Model:
    """Make the experts of a mixture linear layers, in place: :func:`sparsify_` can prune them then.

    For models of transformers (5 and later) whose experts are weights of three dimensions
    ``gate_up_proj`` and ``down_proj``, such as Mixtral and Qwen3-MoE. The layers are views of the
    same memory. Experts are then called one after another, as in transformers' own ``eager``
    experts. :func:`densify_` restores linear layers, not the joint weights.

    Examples
    --------
    >>> import importlib.util
    >>> from sparsetile.nn import SparseConfig, sparsify_, split_experts_
    >>> if importlib.util.find_spec("transformers"):
    ...     from transformers import MixtralConfig, MixtralForCausalLM
    ...     config = MixtralConfig(
    ...         vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    ...         num_attention_heads=2, num_key_value_heads=2, num_local_experts=2,
    ...     )
    ...     model = split_experts_(MixtralForCausalLM(config))
    ...     model = sparsify_(model, SparseConfig(0.5, pattern="unstructured"))
    ...     count = sum("experts" in name for name in model.sparsify_report.pruned)
    ... else:
    ...     count = 6
    >>> count
    6
    """
    if not isinstance(model, nn.Module):
        raise type_error(
            "split_experts_", "model", "a torch.nn.Module", type(model).__name__, "Pass the model"
        )
    change, reasons = Replacements(), []
    for module, names in names_of(model).items():
        if any(part is not None and part.dim() == 3 for part in module._parameters.values()):
            reason = why_not_split(module) if names[0] else "it is the model itself"
            if reason is None:
                change[module] = SplitExperts(module)
            else:
                reasons.append(f"{names[0]}: {reason}")
    if not change:
        raise value_error(
            "split_experts_", "model", "one with experts of transformers in three dimensions",
            "; ".join(reasons[:4]) or "none", "Prune its linear layers with sparsify_",
        )  # fmt: skip
    change.apply(model)
    return model
