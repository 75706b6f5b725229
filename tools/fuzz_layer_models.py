"""SparseLinear, and small models that ``sparsify_`` prunes and ``densify_`` restores.

Frozen parameters must stay frozen. What else pruning must keep or reject has tests in ``tests/nn``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.nn import SparseConfig, SparseLinear, densify_, sparsify_
from tools.fuzz_judge import Wrong
from tools.fuzz_layer_subjects import GRAPH_SUBJECTS, Named, Subject, rectified
from tools.fuzz_layers import LayerCase


def dense_weight(layer: Any, weight: Tensor) -> Tensor:
    """The weight [out, in] of a SparseLinear whose kept blocks are ``weight``."""
    unit, pointers = weight.shape[-1], layer.block_row_ptr.long()
    rows = torch.repeat_interleave(
        torch.arange(pointers.numel() - 1, device=weight.device), pointers.diff()
    )
    across = -(-layer.in_features // unit)
    grid = weight.new_zeros(pointers.numel() - 1, across, unit, unit)
    grid = grid.index_put((rows, layer.block_col_idx.long()), weight)
    whole = grid.permute(0, 2, 1, 3).reshape(-1, across * unit)
    return whole[: layer.out_features, : layer.in_features]


class Linear(Subject):
    """SparseLinear."""

    def make(self) -> None:
        case = self.case
        self.inner = case.block * (1 + case.width % 3) + 4 * (case.pick % 2)
        out = case.block * (1 + case.out % 4) + 4 * (case.pick // 2 % 2)
        self.module = SparseLinear.from_dense(
            self.normal(out, self.inner), self.normal(out) if case.bias else None, sparsity=0.5,
            block=case.block, activation=case.activation,
            prefer="speed" if case.pick % 3 else "memory",
        )  # fmt: skip
        self.smooth = case.activation == "none"

    def new_x(self) -> Tensor:
        return self.normal(self.case.nodes, self.inner)

    @property
    def terms(self) -> int:
        return 4 * (self.case.nodes + 4 * self.inner + 8)

    def call(self, x: Tensor) -> Tensor:
        assert self.module is not None
        found: Tensor = self.module(x)
        return found

    def result(self, v: Named, absolute: bool = False) -> Tensor:
        out = v["x"] @ dense_weight(self.module, v["weight"]).mT
        out = out + v["bias"] if "bias" in v else out
        return rectified(out, absolute) if self.case.activation == "relu" else out


class Gated(nn.Module):
    """A feed-forward layer with SwiGLU; its children have the names that transformers gives."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class MLP(Subject):
    """Linear, activation, linear; or a SwiGLU as the only child of a model."""

    module: nn.Sequential

    def __init__(self, case: LayerCase, rng: np.random.Generator) -> None:
        super().__init__(case, rng)
        self.pruned = False
        self.toggle()

    def make(self) -> None:
        case = self.case
        self.gated = case.pick % 3 == 0
        self.inner = case.block * (1 + case.width % 3) + 4 * (case.pick % 5 == 0)
        first = nn.Linear(self.inner, 2 * case.block, bias=case.bias)
        last = nn.Linear(2 * case.block, self.inner, bias=case.bias)
        if case.pick % 7 == 0:  # frozen
            first.weight.requires_grad_(False)
            if last.bias is not None:
                last.bias.requires_grad_(False)
        middle = nn.ReLU() if case.activation == "relu" else nn.Identity()
        self.module = nn.Sequential(first, middle, last)
        if self.gated:
            self.module = nn.Sequential(Gated(self.inner, 2 * case.block, case.bias))
        self.smooth = case.activation == "none" and not self.gated

    def new_x(self) -> Tensor:
        return self.normal(self.case.nodes, self.inner)

    @property
    def terms(self) -> int:
        return 4 * (self.case.nodes + 4 * self.inner + 4 * self.case.block)

    def call(self, x: Tensor) -> Tensor:
        found: Tensor = self.module(x)
        return found

    # -- reference ------------------------------------------------------------------------------

    def _linear(self, v: Named, name: str, x: Tensor) -> Tensor:
        layer, weight = self.module.get_submodule(name), v[f"{name}.weight"]
        if isinstance(layer, SparseLinear):
            weight = dense_weight(layer, weight)
        out = x @ weight.mT
        return out + v[f"{name}.bias"] if f"{name}.bias" in v else out

    def result(self, v: Named, absolute: bool = False) -> Tensor:
        x = v["x"]
        if self.gated:
            return self._gated(v, x, absolute)
        out = self._linear(v, "0", x)
        out = rectified(out, absolute) if self.case.activation == "relu" else out
        return self._linear(v, "2", out)

    def _gated(self, v: Named, x: Tensor, absolute: bool) -> Tensor:
        if hasattr(self.module[0], "gate_up_proj"):
            gate, up = self._linear(v, "0.gate_up_proj", x).chunk(2, -1)
        else:
            gate, up = (self._linear(v, f"0.{name}_proj", x) for name in ("gate", "up"))
        # |silu(x)| is at most |x|, and grows by at most 1.1 times as much as x.
        bent = 1.1 * gate if absolute else functional.silu(gate)
        return self._linear(v, "0.down_proj", bent * up)

    # -- sparsify_ and densify_ -----------------------------------------------------------------

    def toggle(self) -> None:
        """Prune the model, or restore it; it must be the same function of fewer weights."""
        if self.pruned:
            self._densify()
        else:
            self._sparsify()

    def _weights(self) -> dict[str, Tensor]:
        """Dense weights of the linear layers by the names that they have in a dense model."""
        found: dict[str, Tensor] = {}
        for name, layer in self.module.named_modules(remove_duplicate=False):
            if isinstance(layer, SparseLinear):
                weight = dense_weight(layer, layer.weight.detach())
                if name.endswith("gate_up_proj"):
                    parts = ("gate_proj", "up_proj")
                    for part, half in zip(parts, weight.chunk(2), strict=True):
                        found[name.replace("gate_up_proj", part)] = half
                else:
                    found[name] = weight
            elif isinstance(layer, nn.Linear):
                found[name] = layer.weight.detach().clone()
        return found

    def _trainable(self) -> dict[str, bool]:
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: parameter.requires_grad for name, parameter in named}

    def _masks(self) -> dict[str, Tensor]:
        """A mask of whole blocks a layer, the same for layers of one shape."""
        found: dict[str, Tensor] = {}
        for name, weight in self._weights().items():
            blocks = [-(-side // self.case.block) for side in weight.shape]
            rows, cols = (torch.arange(count) for count in blocks)
            keep = (rows[:, None] + cols) % 2 == self.case.pick % 2
            keep[0, 0] = True
            found[name] = keep.to(weight.device)
        return found

    def _sparsify(self) -> None:
        case = self.case
        config = SparseConfig(sparsity=0.5, block=case.block)
        if case.pick % 2 == 0:
            config = SparseConfig(block=case.block, method="mask", mask=self._masks())
        before, flags = self._weights(), self._trainable()
        sparsify_(self.module, config)
        self.pruned = True
        self._check_kept(before, self._weights(), config)
        self._check_frozen(flags)

    def _check_kept(
        self, before: dict[str, Tensor], after: dict[str, Tensor], config: SparseConfig
    ) -> None:
        if before.keys() != after.keys():
            raise Wrong(f"sparsify_: layers {sorted(after)} instead of {sorted(before)}")
        masks: Any = config.mask
        for name, weight in before.items():
            found, side = after[name], config.block
            if masks is None:
                if not bool(((found == weight) | (found == 0)).all()):
                    raise Wrong(f"sparsify_: {name} has other weights")
                continue
            mask = masks[name].repeat_interleave(side, 0).repeat_interleave(side, 1)
            mask = mask[: weight.shape[0], : weight.shape[1]]
            if not torch.equal(found, torch.where(mask, weight, 0.0)):
                raise Wrong(f"sparsify_: {name} does not follow its mask")

    def _check_frozen(self, flags: dict[str, bool]) -> None:
        for name, flag in self._trainable().items():
            if name in flags and flags[name] != flag:
                raise Wrong(f"{name}.requires_grad became {flag}")

    def _densify(self) -> None:
        before, flags = self._weights(), self._trainable()
        densify_(self.module)
        self.pruned = False
        after = self._weights()
        if before.keys() != after.keys():
            raise Wrong(f"densify_: layers {sorted(after)} instead of {sorted(before)}")
        for name, weight in before.items():
            if not torch.equal(weight, after[name]):
                raise Wrong(f"densify_: {name} has other weights")
        self._check_frozen(flags)
        if any(isinstance(each, SparseLinear) for each in self.module.modules()):
            raise Wrong("densify_ left a sparse layer")


SUBJECTS: dict[str, type[Subject]] = {**GRAPH_SUBJECTS, "SparseLinear": Linear, "MLP": MLP}
