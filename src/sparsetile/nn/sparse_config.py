"""SparseConfig: how ``sparsify_`` prunes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsetile.core.checks import one_of
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.csr import FP8
from sparsetile.nn.masks import PATTERNS
from sparsetile.nn.pruning import METHODS, block_size, sparsity_share

__all__ = ["SparseConfig", "same_tensor"]

Share = float | Mapping[str, float] | Callable[[str, nn.Module], float | None]


def same_tensor(one: object, other: object) -> bool:
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    return one is other or (both and torch.equal(one, other))  # type: ignore[arg-type]


@dataclass(frozen=True)
class SparseConfig:
    """How :func:`sparsify_` prunes.

    Attributes
    ----------
    sparsity : float, mapping or callable
        Share of each layer's blocks or weights to drop, at least 0 and below 1. For a share of
        each layer: layer name -> share, or a function of name and layer that may return None.
        Layers without a share stay dense. Not used with masks nor with ``"2:4"``.
    pattern : {"block", "unstructured", "2:4"}
        Whole blocks, which are fastest (:class:`SparseLinear`); any single weights, or two of each
        four that follow each other in a row (:class:`MaskedLinear`).
    block : int
        Rows and columns of a block: 64 (fastest), a multiple of it, 32 or 16.
    method : {"magnitude", "wanda", "random", "mask"}
        Keep the blocks or weights with the largest norm, with the largest norm after multiplying
        each weight by the norm of its input (Wanda), random ones, or those of ``mask``. Wanda
        compares single weights in each row; otherwise all of a layer are compared.
    norms : mapping
        For ``method="wanda"``: what :func:`calibrate` returned.
    scope : {"layer", "model"}
        ``"model"`` compares the blocks or weights of all layers: less important layers lose more.
        The sum over all layers is ``sparsity``.
    mask : mapping, callable or None
        With ``method="mask"``: layer name -> mask, or a function of name and layer. A mask has one
        value per weight, or per block if it keeps whole blocks. A layer without a mask keeps its
        nonzero blocks or weights, which suits models that are already pruned.
    seed : int
        Seed of ``method="random"``.
    prefer : {"speed", "memory"}
        As in :class:`SparseLinear`.
    join_gate_up : bool or tuple of classes
        Whether gate and up of a SwiGLU become one product (:class:`SparseSwiGLU`); of blocks only.
        True: in the feed-forward layers of transformers that are known to be one, such as
        ``LlamaMLP``. Add your own classes, which must compute
        ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``.
    weight_dtype : torch.dtype or None
        ``torch.float8_e4m3fn`` rounds kept weights to FP8 (``SparseLinear.quantize_``); None
        keeps their type.

    Examples
    --------
    >>> from sparsetile.nn import SparseConfig
    >>> SparseConfig(sparsity=0.8).block
    64
    """

    sparsity: Share = 0.9
    block: int = 64
    method: str = "magnitude"
    mask: Mapping[str, Tensor] | Callable[[str, nn.Module], Tensor | None] | None = None
    seed: int = 0
    prefer: str = "speed"
    join_gate_up: bool | tuple[type[nn.Module], ...] = True
    weight_dtype: torch.dtype | None = None
    pattern: str = "block"
    norms: Mapping[str, Tensor] | None = None
    scope: str = "layer"

    def __post_init__(self) -> None:
        if self.weight_dtype not in (None, FP8):
            raise value_error(
                "SparseConfig", "weight_dtype", "None or torch.float8_e4m3fn", self.weight_dtype,
                "Convert the model with .to(dtype) instead",
            )  # fmt: skip
        one_of("SparseConfig", "pattern", self.pattern, PATTERNS)
        one_of("SparseConfig", "scope", self.scope, ("layer", "model"))
        one_of("SparseConfig", "method", self.method, METHODS)
        one_of("SparseConfig", "prefer", self.prefer, ("speed", "memory"))
        block_size("SparseConfig", self.block)
        self._check_shares()
        joined = self.join_gate_up
        if not isinstance(joined, bool) and not (
            isinstance(joined, tuple) and all(isinstance(kind, type) for kind in joined)
        ):
            raise type_error(
                "SparseConfig", "join_gate_up", "True, False or a tuple of classes", repr(joined),
                "Pass for example join_gate_up=(MyMLP,)",
            )  # fmt: skip
        if self.mask is not None and self.method != "mask":
            raise value_error(
                "SparseConfig", "mask", 'None unless method="mask"', f"method={self.method!r}",
                'Pass method="mask"',
            )  # fmt: skip

    def _check_shares(self) -> None:
        name = "SparseConfig"
        given = self.sparsity
        if isinstance(given, Mapping):
            for share in given.values():
                sparsity_share(name, share)
        elif not callable(given):
            sparsity_share(name, given)
        if self.scope == "model" and (
            self.pattern == "2:4"
            or self.method not in ("magnitude", "wanda")
            or not isinstance(given, (int, float))
        ):
            raise value_error(
                name, "scope", '"layer"', '"model"',
                'Comparing all layers needs one sparsity, method="magnitude" or "wanda", and a '
                "pattern other than 2:4",
            )  # fmt: skip
        if self.weight_dtype is not None and self.pattern != "block":
            raise value_error(
                name, "weight_dtype", f"None with pattern={self.pattern!r}", self.weight_dtype,
                'Pass pattern="block"',
            )  # fmt: skip

    def share_of(self, names: list[str], layer: nn.Module) -> float | None:
        """Return the share to drop of a layer, under any of its names; None if it stays dense.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseConfig
        >>> SparseConfig(sparsity={"up": 0.5}).share_of(["up"], torch.nn.Linear(1, 1))
        0.5
        """
        given = self.sparsity
        if isinstance(given, Mapping):
            found = [given[name] for name in names if name in given]
            return found[0] if found else None
        if callable(given):
            share = given(names[0], layer)
            return None if share is None else sparsity_share("SparseConfig", share)
        return float(given)

    def norms_of(self, names: list[str]) -> Tensor | None:
        """Return the norms of a layer's inputs, under any of its names.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseConfig
        >>> SparseConfig(method="wanda", norms={"up": torch.ones(2)}).norms_of(["up"])
        tensor([1., 1.])
        """
        found = [self.norms[name] for name in names if self.norms and name in self.norms]
        return found[0] if found else None

    def _mask_of(self, names: list[str], layer: nn.Module) -> Tensor | None:
        """The mask of a layer, under any of its names."""
        if not isinstance(self.mask, Mapping):
            return None if self.mask is None else self.mask(names[0], layer)
        found = [self.mask[name] for name in names if name in self.mask]
        if any(not same_tensor(found[0], other) for other in found[1:]):
            raise value_error(
                "sparsify_", "mask", "one for each layer",
                f"different ones for the names {', '.join(names)} of one layer", "Omit all but one",
            )  # fmt: skip
        return found[0] if found else None
