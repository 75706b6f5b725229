"""SparseSwiGLU: the feed-forward layer of Llama, Mistral and Qwen with gate and up as one product.

    down(silu(gate(x)) * up(x))

Gate and up read the same x, so their weights lie one below the other in one layer of kept blocks:
x is read once, and one product makes both. Rows of the gate come first. The halves are whole block
rows, so that a kernel which multiplies both halves of a strip applies SiLU and the product before
it stores anything. Both kernels do so in inference (16 bits): of 18944 hidden features and 8192
tokens 0.3 GB are written, where a product, SiLU and a multiplication in torch move 2.2 GB.
Elsewhere (gradients, torch.compile, other types, dense) both follow in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.core.errors import value_error
from sparsetile.formats.block_pattern import BlockPattern
from sparsetile.nn.hooks import has_hooks
from sparsetile.nn.linear import SparseLinear

__all__ = ["SparseSwiGLU", "is_swiglu"]

_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")
# Feed-forward layers of transformers that are known to be a SwiGLU where nothing can be run.
_KNOWN = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")


class SparseSwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up in one block-sparse layer.

    ``sparsify_`` replaces a feed-forward layer that computes this. ``densify_`` restores the
    original.

    Parameters
    ----------
    gate, up : SparseLinear
        Of the same sizes and blocks, both with a bias or both without. ``out_features`` must be a
        multiple of the blocks' size.
    down : torch.nn.Module
        Dense or sparse.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import SparseLinear, SparseSwiGLU
    >>> gate, up = (SparseLinear.from_linear(torch.nn.Linear(64, 128), sparsity=0.5) for _ in "ab")
    >>> layer = SparseSwiGLU(gate, up, torch.nn.Linear(128, 64))
    >>> x = torch.randn(3, 64)
    >>> expected = layer.down_proj(torch.nn.functional.silu(gate(x)) * up(x))
    >>> torch.allclose(layer(x), expected, atol=1e-6)
    True
    """

    def __init__(self, gate: SparseLinear, up: SparseLinear, down: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj = _stacked(gate, up)
        self.down_proj = down
        # In a tuple: it is no part of the model while this module stands in its place.
        self._origin: tuple[nn.Module, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x)) for x [..., in_features]."""
        return self.down_proj(self.gate_up_proj(x))

    @torch.no_grad()
    def split(self) -> tuple[SparseLinear, SparseLinear]:
        """Return gate and up as separate layers.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear, SparseSwiGLU
        >>> gate, up = (SparseLinear.from_linear(torch.nn.Linear(64, 64)) for _ in "ab")
        >>> layer = SparseSwiGLU(gate, up, torch.nn.Linear(64, 64))
        >>> torch.equal(layer.split()[1].to_dense(), up.to_dense())
        True
        """
        both = self.gate_up_proj.dequantize_()
        half, middle = both.out_features // 2, both.block_row_ptr.numel() // 2
        first = int(both.block_row_ptr[middle])
        pairs = []
        for blocks, rows, outputs in (
            (slice(0, first), slice(0, middle + 1), slice(0, half)),
            (slice(first, None), slice(middle, None), slice(half, None)),
        ):
            made = SparseLinear.of_size(
                both.in_features, half, both.weight[blocks].shape[0], block=both.block,
                bias=both.bias is not None, prefer=both.prefer, device=both.weight.device,
                dtype=both.weight.dtype,
            )  # fmt: skip
            made.weight.copy_(both.weight[blocks])
            made.block_col_idx.copy_(both.block_col_idx[blocks])
            ptr = both.block_row_ptr[rows]
            made.block_row_ptr.copy_(ptr - ptr[0])
            if both.bias is not None:
                made.bias.copy_(both.bias[outputs])
            made.weight.requires_grad_(both.weight.requires_grad)
            made._forget()
            pairs.append(made.train(self.training))
        return pairs[0], pairs[1]


@torch.no_grad()
def _stacked(gate: SparseLinear, up: SparseLinear) -> SparseLinear:
    """Both weights in one layer, the gate's rows first."""
    for layer in (gate, up):
        layer.dequantize_()
    unit = BlockPattern.unit_of(gate.block)
    alike = [
        (layer.in_features, layer.out_features, layer.block, layer.bias is None, layer.weight.dtype)
        for layer in (gate, up)
    ]
    if alike[0] != alike[1] or gate.out_features % unit:
        raise value_error(
            "SparseSwiGLU", "gate and up",
            f"of the same sizes, block, bias and dtype, with out_features a multiple of {unit}",
            f"{gate} and {up}", "Keep them as separate layers",
        )  # fmt: skip
    made = SparseLinear.of_size(
        gate.in_features, 2 * gate.out_features, gate.weight.shape[0] + up.weight.shape[0],
        block=gate.block, bias=gate.bias is not None, activation="swiglu", prefer=gate.prefer,
        device=gate.weight.device, dtype=gate.weight.dtype,
    )  # fmt: skip
    made.weight.requires_grad_(gate.weight.requires_grad or up.weight.requires_grad)
    if made.weight.device.type != "meta":
        made.weight.copy_(torch.cat([gate.weight, up.weight]))
        made.block_col_idx.copy_(torch.cat([gate.block_col_idx, up.block_col_idx]))
        shifted = up.block_row_ptr[1:] + gate.block_row_ptr[-1]
        made.block_row_ptr.copy_(torch.cat([gate.block_row_ptr, shifted]))
        if gate.bias is not None and up.bias is not None:
            made.bias.copy_(torch.cat([gate.bias, up.bias]))
    made._forget()
    return made.train(gate.training)


@torch.no_grad()
def is_swiglu(module: nn.Module) -> bool:
    """Whether a module is down(silu(gate(x)) * up(x)) with parts of these names, and nothing more.

    Where its weights are real, one random input is compared: a class may compute something else.
    """
    parts: dict[str, Any] = dict(module.named_children())
    if set(parts) != set(_PARTS) or "forward" in vars(module) or _hooked(module, parts):
        return False
    gate, up, down, act = (parts[name] for name in _PARTS)
    if not all(isinstance(part, nn.Linear) for part in (gate, up, down)):
        return False
    if "SiLU" not in type(act).__name__:
        return False
    if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
        return False
    if gate.weight.device.type == "meta":
        return type(module).__name__ in _KNOWN
    seeded = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, gate.in_features, generator=seeded, device=seeded.device)
    x = x.to(gate.weight.device, gate.weight.dtype)
    mine = down(functional.silu(gate(x)) * up(x)).float()
    return bool((module(x).float() - mine).norm() <= 1e-2 * mine.norm())


def _hooked(module: nn.Module, parts: dict[str, Any]) -> bool:
    """Whether someone watches the parts that would be joined."""
    watched = (module, *(parts.get(name) for name in _PARTS[:2]))
    return any(has_hooks(part) for part in watched)
