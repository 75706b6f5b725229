"""BlockState: what a SparseLinear holds, its blocks and their positions, and how they are stored.

Conversion to FP8 and back, contents, and state dicts: of any pattern, or of a dense layer.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsetile.formats.block_pattern import BlockPattern, blocks_of
from sparsetile.intake.csr import FP8
from sparsetile.nn.dense_copy import KeepsDense
from sparsetile.nn.fp8_blocks import quantized, scaled

__all__ = ["EXPONENT", "LISTS", "BlockState"]

LISTS = ("block_row_ptr", "block_col_idx")
EXPONENT = "weight_exponent"


class BlockState(KeepsDense):
    """Kept blocks of a weight and their positions."""

    block: int
    block_row_ptr: Tensor
    block_col_idx: Tensor
    weight_exponent: Tensor | None
    _pattern = LISTS
    _wide: torch.dtype
    _flat: list[Tensor] | None
    _derived = (
        "_flat", "_recipe", "_flat_key", "_flat_memory", "_dense", "_dense_key", "_bound",
        "_captured",
    )  # fmt: skip

    # -- FP8 ------------------------------------------------------------------------------------

    @torch.no_grad()
    def quantize_(self) -> Self:
        """Round the kept weights to FP8 (E4M3), with one power-of-two scale per block.

        This halves the bytes of 16-bit weights. Afterwards they have no gradient. Products convert
        them exactly to the dtype of x, which is not rounded. The kernel for up to 16 tokens
        converts in registers (blocks of 64 or a multiple, inference). Otherwise each call converts
        all blocks first. ``.to(dtype)`` with another dtype converts them permanently.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear
        >>> layer = SparseLinear.from_linear(torch.nn.Linear(128, 128), sparsity=0.5).quantize_()
        >>> layer
        SparseLinear(in_features=128, out_features=128, bias=True, block=64, kept=2/4, weight=FP8)
        >>> layer(torch.randn(3, 128)).dtype
        torch.float32
        """
        if self.weight_exponent is not None:
            return self
        eight, exponent = quantized("SparseLinear.quantize_", self.weight.detach())
        self._wide = self.weight.dtype
        self._become_eight(eight, exponent)
        return self

    @torch.no_grad()
    def dequantize_(self) -> Self:
        """Undo ``quantize_``: restore the earlier dtype. The weights stay rounded.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear
        >>> layer = SparseLinear.from_linear(torch.nn.Linear(64, 64), sparsity=0.0).quantize_()
        >>> rounded = layer.to_dense()
        >>> torch.equal(layer.dequantize_().weight[0], rounded)
        True
        """
        if self.weight_exponent is not None:
            self.weight = nn.Parameter(self._blocks(), requires_grad=False)
            self.weight_exponent = None
            self._forget()
        return self

    def _become_eight(self, weight: Tensor, exponent: Tensor) -> None:
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_exponent = exponent
        self._forget()

    def _wide_dtype(self) -> torch.dtype:
        """Type of the weights as they are multiplied."""
        return self.weight.dtype if self.weight_exponent is None else self._wide

    def _blocks(self, dtype: torch.dtype | None = None) -> Tensor:
        """The kept weights; FP8 ones converted to ``dtype``, or to their earlier type."""
        if self.weight_exponent is None:
            return self.weight
        return scaled(self.weight, self.weight_exponent, self._wide if dtype is None else dtype)

    # -- contents -------------------------------------------------------------------------------

    @property
    def pattern(self) -> BlockPattern:
        """The kept blocks."""
        unit, shape = BlockPattern.unit_of(self.block), (self.out_features, self.in_features)
        return BlockPattern(self.block_row_ptr, self.block_col_idx, shape, unit)

    @property
    def sparsity(self) -> float:
        """Share of the blocks that are dropped.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear
        >>> SparseLinear(128, 128, torch.eye(2, dtype=torch.bool)).sparsity
        0.5
        """
        rows, cols = self.pattern.grid
        return 1.0 - self.weight.shape[0] / max(rows * cols, 1)

    def memory(self) -> dict[str, int]:
        """Return the bytes of each part; ``dense copy`` is 0 until a call needs it.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear
        >>> layer = SparseLinear.from_linear(torch.nn.Linear(640, 640), sparsity=0.9)
        >>> parts = layer.memory()
        >>> parts["weight"] / (640 * 640 * 4)
        0.1
        """
        derived = [] if self._flat is None else self._flat[2:]
        return {
            "weight": self.weight.nbytes
            + (0 if self.weight_exponent is None else self.weight_exponent.nbytes),
            "bias": 0 if self.bias is None else self.bias.nbytes,
            "pattern": self.block_row_ptr.nbytes + self.block_col_idx.nbytes,
            "derived pattern": sum(part.nbytes for part in derived),
            "dense copy": self._dense_bytes(),
        }

    # -- state ----------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        exponent = self.weight_exponent
        if exponent is not None and self.weight.dtype is not FP8:  # .half(), .to(torch.bfloat16)
            with torch.no_grad():
                self.weight.copy_(scaled(self.weight, exponent, self.weight.dtype))
            self.weight_exponent = None
        self._forget()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load a state dict of any pattern of this size, or the kept blocks of a dense one."""
        weight = state_dict.get(f"{prefix}weight")
        lists = [state_dict.get(prefix + name) for name in LISTS]
        dense = isinstance(weight, Tensor) and weight.shape == (self.out_features, self.in_features)
        exponent = state_dict.get(prefix + EXPONENT)
        if exponent is None:
            self.dequantize_()
        elif self.weight_exponent is None:
            self._wide = self.weight.dtype
            eight = torch.empty(self.weight.shape, dtype=FP8, device=self.weight.device)
            self._become_eight(eight, exponent.new_zeros(len(eight), device=eight.device))
        if dense and lists == [None, None]:
            parts = (self.block_row_ptr, self.block_col_idx)
            with torch.no_grad():
                row_ptr, col_idx = (part.to(weight.device) for part in parts)
                taken = blocks_of(weight, row_ptr, col_idx, BlockPattern.unit_of(self.block))
            changed = {f"{prefix}weight": taken}
            changed |= {prefix + name: part for name, part in zip(LISTS, parts, strict=True)}
            state_dict = {**state_dict, **changed}
        elif all(isinstance(part, Tensor) for part in lists):
            own = self.pattern
            pattern = BlockPattern(lists[0], lists[1], own.shape, own.unit)
            try:
                if pattern.col_idx.device.type != "meta":
                    pattern.check("SparseLinear.load_state_dict")
            except ValueError as error:
                error_msgs.append(str(error))
                return
            self._resize(pattern.count)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._forget()

    def _resize(self, blocks: int) -> None:
        """Allocate for another number of kept blocks."""
        if blocks == self.weight.shape[0]:
            return
        shape = (blocks, *self.weight.shape[1:])
        self.weight = nn.Parameter(
            self.weight.new_empty(shape), requires_grad=self.weight.requires_grad
        )
        self.block_col_idx = self.block_col_idx.new_zeros(blocks)
        if self.weight_exponent is not None:
            self.weight_exponent = self.weight_exponent.new_zeros(blocks)
