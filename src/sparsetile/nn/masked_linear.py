"""MaskedLinear: a linear layer that keeps any single weights, or two of each four (2:4).

As in :class:`SparseLinear`, the kept weights are the weight itself: one Parameter [kept], in
row-major order, and the bits of their places. So the mask holds in training whatever the optimiser
does, gradients and optimiser state are of kept weights only, and a 16-bit layer that keeps a share
s of its weights takes s + 1/16 of its dense bytes.

``masks.py`` has the bits, ``masked_product.py`` what multiplies.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.core.checks import one_of
from sparsetile.core.errors import value_error
from sparsetile.nn import masked_product, pruning
from sparsetile.nn.arguments import check_input, check_weight
from sparsetile.nn.criteria import CRITERIA, norms_for, scores_of
from sparsetile.nn.dense_copy import KeepsDense
from sparsetile.nn.masks import (
    GROUP,
    PATTERNS,
    check_groups,
    is_two_of_four,
    kept_cells,
    largest,
    pack_bits,
    spread,
    unpack_bits,
)
from sparsetile.plan.modes import any_autocast, outside_modes, plain_call, transforming

__all__ = ["MaskedLinear"]

_PATTERNS = PATTERNS[1:]  # blocks have a layer of their own
_BITS = "mask_bits"


class MaskedLinear(KeepsDense):
    """A linear layer Y = X·Wᵀ + bias whose W keeps single weights.

    Make it with :meth:`from_linear`, :meth:`from_dense` or ``sparsify_`` with
    ``SparseConfig(pattern="unstructured")`` or ``"2:4"``. Only the kept weights are parameters, so
    training cannot fill the others again.

    In eval mode ``prefer="speed"`` keeps what multiplies fastest beside the weights: for up to
    eight tokens on a GPU the kept values in the order of their kernel (``entries``), else a dense
    copy, torch's semi-structured form of a 2:4 weight, or a plan. :meth:`method` says which.
    ``"memory"`` keeps no other form: up to four tokens on a GPU are multiplied by the weights as
    they are stored, in 16 bits; other calls write the dense weight out.

    CUDA graphs (``torch.cuda.graph``, ``torch.compile(mode="reduce-overhead")``) read what was kept
    when they were captured. After the weight changes, call the layer once outside of the graph, in
    eval mode and with as many tokens: it is then rewritten in place, and replays see it.

    Parameters
    ----------
    in_features, out_features : int
    kept : int
        Number of kept weights. Load mask and weights afterwards.
    pattern : {"unstructured", "2:4"}
    bias : bool
    prefer : {"speed", "memory"}
    device, dtype : optional
        As in ``torch.nn.Linear``.

    Attributes
    ----------
    weight : Parameter [kept]
        The kept weights, row by row.
    bias : Parameter [out_features] or None
    mask_bits : Tensor of uint8 [out_features, ceil(in_features / 8)]
        Buffer: bit c of byte b of a row is column 8 b + c.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import MaskedLinear
    >>> layer = MaskedLinear.from_linear(torch.nn.Linear(64, 32), sparsity=0.5)
    >>> layer
    MaskedLinear(in_features=64, out_features=32, bias=True, pattern=unstructured, kept=1024/2048)
    >>> x = torch.randn(5, 64)
    >>> dense = torch.nn.functional.linear(x, layer.to_dense(), layer.bias)
    >>> torch.allclose(layer(x), dense, atol=1e-6)
    True
    """

    mask_bits: Tensor
    _pattern = (_BITS,)
    _rewritten_by_graphs = False
    _derived = ("_dense", "_dense_key", "_captured", "_made", "_packed", "_rows", "_number")

    def __init__(
        self, in_features: int, out_features: int, kept: int, *, pattern: str = "unstructured",
        bias: bool = True, prefer: str = "speed", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.pattern = one_of("MaskedLinear", "pattern", pattern, _PATTERNS)
        self.prefer = one_of("MaskedLinear", "prefer", prefer, ("speed", "memory"))
        if pattern == "2:4":
            check_groups("MaskedLinear", in_features)
        self.weight = nn.Parameter(torch.zeros(kept, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        bits = torch.zeros(
            (out_features, -(-in_features // 8)), dtype=torch.uint8, device=device
        )  # fmt: skip
        self.register_buffer(_BITS, bits)
        self._number = masked_product.numbered(self)
        self._forget()

    # -- to and from dense layers ---------------------------------------------------------------

    @classmethod
    @torch.no_grad()
    def from_dense(
        cls, weight: Tensor, bias: Tensor | None = None, *, sparsity: float | None = None,
        pattern: str = "unstructured", method: str = "magnitude", mask: Tensor | None = None,
        norms: Tensor | None = None, prefer: str = "speed",
        generator: torch.Generator | None = None,
    ) -> Self:  # fmt: skip
        """Keep single weights of a dense weight [out_features, in_features].

        Parameters
        ----------
        weight : Tensor or Parameter
        bias : Tensor [out_features], optional
        sparsity : float, optional
            Share of the weights to drop; not used with ``"2:4"`` and ``method``, which drops half.
            When None, the layer keeps those of ``mask``, or else all nonzero weights.
        pattern : {"unstructured", "2:4"}
        method : {"magnitude", "wanda", "random"}
            Which weights are kept; see :class:`SparseConfig`.
        mask : Tensor of bool [out_features, in_features], optional
        norms : Tensor [in_features], optional
            Norms of the layer's inputs, for ``"wanda"``; see :func:`calibrate`.
        generator : torch.Generator, optional
            For ``method="random"``; on the CPU.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import MaskedLinear
        >>> weight = torch.tensor([[4.0, -3.0, 1.0, 2.0]])
        >>> MaskedLinear.from_dense(weight, sparsity=0.5, pattern="2:4").to_dense()
        tensor([[ 4., -3.,  0.,  0.]], grad_fn=<_SpreadBackward>)
        """
        name = "MaskedLinear.from_dense"
        check_weight(name, weight)
        one_of(name, "pattern", pattern, _PATTERNS)
        scores = None
        if sparsity is not None and mask is None:
            sparsity = pruning.sparsity_share(name, sparsity)
            one_of(name, "method", method, CRITERIA)
            scores = scores_of(name, weight.detach(), method, norms, generator)
        keep = kept_cells(
            name, weight, pattern, sparsity=sparsity, scores=scores, by_row=method == "wanda",
            mask=mask,
        )  # fmt: skip
        made = cls._of_mask(weight.detach(), keep, bias, pattern, prefer)
        return made._freeze_like(weight, bias)

    @classmethod
    def _of_mask(
        cls, weight: Tensor, keep: Tensor, bias: Tensor | None, pattern: str, prefer: str
    ) -> Self:
        rows, cols = weight.shape
        values = weight[keep]
        made = cls(
            cols, rows, values.shape[0], pattern=pattern, bias=bias is not None, prefer=prefer,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        with torch.no_grad():
            made.weight.copy_(values)
            made.mask_bits.copy_(pack_bits(keep))
            if bias is not None:
                made.bias.copy_(bias)
        return made

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """Keep single weights of a ``torch.nn.Linear``; options as in :meth:`from_dense`.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import MaskedLinear
        >>> MaskedLinear.from_linear(torch.nn.Linear(8, 4), sparsity=0.5, pattern="2:4")
        MaskedLinear(in_features=8, out_features=4, bias=True, pattern=2:4, kept=16/32)
        """
        return cls._of_linear(linear, options)

    def to_dense(self) -> Tensor:
        """Return the weight [out_features, in_features], zeros where none is kept.

        Differentiable.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import MaskedLinear
        >>> weight = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
        >>> MaskedLinear.from_dense(weight).to_dense().detach()
        tensor([[0., 2.],
                [1., 0.]])
        """
        return spread(self.weight, self.mask_bits, self.in_features)

    def to_linear(self) -> nn.Linear:
        """Return a ``torch.nn.Linear`` of the same weights.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import MaskedLinear
        >>> layer = MaskedLinear.from_linear(torch.nn.Linear(8, 4), sparsity=0.5)
        >>> layer.to_linear()
        Linear(in_features=8, out_features=4, bias=True)
        """
        return self._as_linear(self.weight.dtype)

    # -- pruning --------------------------------------------------------------------------------

    @torch.no_grad()
    def prune_(
        self, sparsity: float, optimizer: torch.optim.Optimizer | None = None, *,
        norms: Tensor | None = None,
    ) -> Self:  # fmt: skip
        """Drop the smallest kept weights until ``sparsity`` is reached.

        For gradual pruning, as :meth:`SparseLinear.prune_`: the weight stays the same Parameter,
        and optimisers of ``torch.optim`` keep the state of the kept weights. A 2:4 layer cannot
        be pruned further.

        Parameters
        ----------
        sparsity : float
            Share of all weights that are dropped afterwards.
        optimizer : torch.optim.Optimizer, optional
            Drops the state of the other weights at once. Pass optimisers that do not run the step
            hooks of ``torch.optim``.
        norms : Tensor [in_features], optional
            Norms of the layer's inputs: weights are compared after multiplying by them (Wanda).

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import MaskedLinear
        >>> layer = MaskedLinear.from_linear(torch.nn.Linear(8, 4))
        >>> layer.prune_(0.75)
        MaskedLinear(in_features=8, out_features=4, bias=True, pattern=unstructured, kept=8/32)
        """
        name = "MaskedLinear.prune_"
        share = pruning.sparsity_share(name, sparsity)
        if self.pattern == "2:4":
            raise value_error(
                name, "pattern", '"unstructured"', '"2:4", which keeps two of each four',
                'Prune with SparseConfig(pattern="unstructured")',
            )  # fmt: skip
        pruning.check_optimizer(name, self.weight, optimizer)
        count = pruning.kept_count(self.in_features * self.out_features, share)
        if count >= self.weight.shape[0]:
            return self
        mask = self.mask()
        scores = self.weight.detach().float().abs()
        if norms is not None:
            columns = mask.nonzero()[:, 1]
            scores = scores * norms_for(name, norms, self.in_features).to(scores.device)[columns]
        kept = largest(scores[None], count)[0]
        self._keep(kept, optimizer)
        return self

    @torch.no_grad()
    def _keep(self, kept: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Keep some of the kept weights; ``kept`` has one value for each."""
        mask = self.mask()
        mask[mask.clone()] = kept
        pruning.drop_blocks_(self.weight, kept.nonzero().flatten())
        self.mask_bits = pack_bits(mask)
        if optimizer is not None:
            pruning.shrink_state(optimizer, self.weight)
        self._forget()

    # -- contents -------------------------------------------------------------------------------

    def mask(self) -> Tensor:
        """Return which weights are kept, bool [out_features, in_features].

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import MaskedLinear
        >>> MaskedLinear.from_dense(torch.tensor([[0.0, 2.0]])).mask()
        tensor([[False,  True]])
        """
        return unpack_bits(self.mask_bits, self.in_features)

    @property
    def sparsity(self) -> float:
        """Share of the weights that are dropped.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import MaskedLinear
        >>> MaskedLinear.from_dense(torch.tensor([[0.0, 2.0]])).sparsity
        0.5
        """
        return 1.0 - self.weight.shape[0] / max(self.in_features * self.out_features, 1)

    def memory(self) -> dict[str, int]:
        """Return the bytes of each part; copies are 0 until a call needs them.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import MaskedLinear
        >>> layer = MaskedLinear.from_linear(torch.nn.Linear(64, 64).bfloat16(), sparsity=0.5)
        >>> parts = layer.memory()
        >>> (parts["weight"] + parts["mask"]) / (64 * 64 * 2)
        0.5625
        """
        return {
            "weight": self.weight.nbytes,
            "bias": 0 if self.bias is None else self.bias.nbytes,
            "mask": self.mask_bits.nbytes,
            "dense copy": self._dense_bytes(),
            "other copies": sum(made.nbytes for made in self._made.values()),
        }

    def method(self, tokens: int) -> str:
        """Return what multiplies this many tokens in eval mode.

        ``dense``, ``entries``, ``kept`` (the weights as they are stored), ``2:4`` or ``plan``.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import MaskedLinear
        >>> MaskedLinear.from_linear(torch.nn.Linear(8, 4), sparsity=0.5).method(16)
        'dense'
        """
        return masked_product.method_of(self, tokens)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, pattern={self.pattern}, "
            f"kept={self.weight.shape[0]}/{self.in_features * self.out_features}"
        )

    # -- state ----------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Drop what was made of the weights; it is made again when needed."""
        self._forget_made()
        self._forget_dense()

    def _forget_made(self) -> None:
        self._made: dict[str, masked_product.Made] = {}
        # What a CUDA graph reads is rewritten in place.
        packed: Any = self.__dict__.get("_packed")
        captured = self.__dict__.get("_captured", [])
        kept = packed is not None and any(
            getattr(each, "product", None) is packed for each in captured
        )
        self._packed: Any = packed if kept else None
        self._rows: Any = self.__dict__.get("_rows")

    def train(self, mode: bool = True) -> Self:
        """As ``torch.nn.Module.train``; copies of the weights are kept only in eval mode."""
        super().train(mode)
        self._forget_made()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._forget()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = masked_product.numbered(self)
        self._forget()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load a state dict of any mask of this size, or the kept weights of a dense one."""
        weight, bits = (state_dict.get(prefix + name) for name in ("weight", _BITS))
        shape = (self.out_features, self.in_features)
        if isinstance(weight, Tensor) and weight.shape == shape and bits is None:
            kept = weight[self.mask().to(weight.device)]
            changed = {f"{prefix}weight": kept, prefix + _BITS: self.mask_bits}
            state_dict = {**state_dict, **changed}
        elif isinstance(weight, Tensor) and isinstance(bits, Tensor):
            problem = self._problem(weight, bits)
            if problem:
                error_msgs.append(problem)
                return
            if weight.shape != self.weight.shape:
                empty = self.weight.new_empty(weight.shape)
                self.weight = nn.Parameter(empty, requires_grad=self.weight.requires_grad)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._forget()

    def _problem(self, weight: Tensor, bits: Tensor) -> str:
        """What is wrong with a loaded mask; empty if it fits."""
        if bits.shape != self.mask_bits.shape or bits.dtype is not torch.uint8:
            found = f"{bits.dtype} {tuple(bits.shape)}"
        elif weight.dim() != 1:
            found = f"a weight of shape {tuple(weight.shape)}"
        elif bits.device.type == "meta":
            return ""
        else:
            mask = unpack_bits(bits, self.in_features)
            bound, count = int(mask.sum()), weight.shape[0]
            if bound == count and (self.pattern != "2:4" or is_two_of_four(mask)):
                return ""
            found = f"{count} weights for a mask of {bound}"
            if bound == count:
                found = f"more than {GROUP[1]} of {GROUP[0]} weights kept"
        return str(
            value_error(
                "MaskedLinear.load_state_dict", _BITS,
                f"bits of a {self.pattern} mask of {self.out_features}x{self.in_features} and one "
                "weight for each", found, "Load the state dict of a layer of this size",
            )
        )  # fmt: skip

    # -- products -------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Return x·Wᵀ + bias.

        Parameters
        ----------
        x : Tensor [..., in_features]
            Must have the weight's dtype and device.

        Returns
        -------
        Tensor [..., out_features]
        """
        weight, bias = self.weight, self.bias
        if not any_autocast():  # which casts both
            check_input(x, weight, self.in_features, "MaskedLinear")
        tracked = torch.is_grad_enabled() and (
            weight.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)
        )
        compiling = torch.compiler.is_compiling()
        apart = tracked or any_autocast()  # more than one product without gradients
        if (
            self.training
            or transforming()
            or torch.jit.is_tracing()
            or (tracked and weight.requires_grad)
            or (compiling and (apart or torch.compiler.is_exporting()))
        ):
            return functional.linear(x, self.to_dense(), bias)
        if compiling:
            rows = self.out_features
            return torch.ops.sparsetile.masked_linear(x, weight, bias, self._number, rows)
        if apart:
            return functional.linear(x, self._dense_copy(), bias)
        return self._inference(x)

    @outside_modes
    def _prepared(self, tokens: int) -> masked_product.Made | None:
        return masked_product.made_for(self, tokens)

    def _inference(self, x: Tensor) -> Tensor:
        """The product without gradients, by what is predicted to be fastest."""
        if type(x) is Tensor and plain_call():
            tokens = x.shape[:-1].numel()
            made = self._prepared(tokens)
            if made is not None:
                return made(x, self.bias)
            if self._dense is None and masked_product.writes_out(self, tokens):
                return functional.linear(x, self.to_dense(), self.bias)
        return functional.linear(x, self._dense_copy(), self.bias)
