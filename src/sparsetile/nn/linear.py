"""SparseLinear: a linear layer that keeps whole blocks of its weight.

The kept blocks are the weight itself: one Parameter [blocks, 64, 64], and two short lists of their
positions. So optimisers have state for kept weights only, a layer pruned to 90 % takes a
tenth of its dense bytes, and nothing has to be packed when weights change. One object serves any
number of tokens; ``layers/block_layer.py`` has the kernels and chooses among them.

Argument checks are in ``arguments.py``, the cached launches of inference in ``linear_binding.py``,
FP8 in ``fp8_blocks.py`` and the choice of blocks in ``pruning.py``.
"""

from __future__ import annotations

import warnings
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.core.checks import one_of
from sparsetile.core.errors import value_error
from sparsetile.core.streams import refuse_capture, settle
from sparsetile.formats.block_pattern import BlockPattern, blocks_of, dense_of_blocks
from sparsetile.layers import block_linear as operators
from sparsetile.layers.block_layer import ACTIVATIONS, activate
from sparsetile.nn import pruning
from sparsetile.nn.arguments import check_input, check_weight, checked_keep
from sparsetile.nn.block_state import EXPONENT, LISTS, BlockState
from sparsetile.nn.criteria import scores_of
from sparsetile.nn.dense_copy import BUILDING, keeps_dense
from sparsetile.nn.host_choice import blocks_on_host
from sparsetile.nn.linear_binding import Bound, rebound, version_of
from sparsetile.plan.modes import outside_modes, unwatched_call

__all__ = ["SparseLinear"]

_PREFERENCES = ("speed", "memory")
# Warnings already shown: each reason is shown once.
_warned: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, UserWarning, stacklevel=4)


class SparseLinear(BlockState):
    """A block-sparse linear layer Y = X·Wᵀ + bias.

    Make it with :meth:`from_linear` or :meth:`from_dense`. The constructor draws random weights for
    given blocks. The layer supports any number of tokens. On a Hopper GPU (16 bits, blocks of 64)
    one kernel reads X and writes Y. Up to 16 tokens, another kernel runs, on sm_80 and later. If
    the dense product is predicted to be faster, torch multiplies a dense copy of the weight. If no
    kernel supports the call, the layer computes a masked dense product and warns once, with the
    reason. On a CPU, torch multiplies the kept blocks, or a dense copy where that is faster.

    Every cell of a kept block is a weight, even if it is zero. So an Inf or NaN in X reaches every
    output that has a kept block at that input. If torch multiplies the dense weight, it reaches all
    outputs, as in ``torch.nn.Linear``.

    Parameters
    ----------
    in_features, out_features : int
    keep : Tensor of bool [block rows, block columns]
        Which blocks are kept. If ``block`` does not divide the layer's size, the last blocks are
        padded with zeros.
    block : int
        Rows and columns of a block: 16, 32 or a multiple of 64.
    bias : bool
    activation : {"none", "relu", "silu", "swiglu"}
        Applied to the result. ``"swiglu"`` multiplies silu of the first half by the second half.
        The result then has half of ``out_features``, which must be a multiple of two blocks.
    prefer : {"speed", "memory"}
        ``"speed"`` also keeps a dense copy of the weight in eval mode once some number of tokens is
        faster with it. ``"memory"`` never keeps one.
    device, dtype : optional
        As in ``torch.nn.Linear``.

    Attributes
    ----------
    weight : Parameter [kept blocks, unit, unit]
        Row-major blocks, block row by block row; ``unit`` is 64 if that divides ``block``.
    bias : Parameter [out_features] or None
    block_row_ptr, block_col_idx : Tensor of int32
        Buffers: first block of each block row, block column of each block.
    weight_exponent : Tensor of int8 [kept blocks] or None
        Buffer, after ``quantize_``: the values of a block are those of ``weight`` times 2 to this
        power.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import SparseLinear
    >>> layer = torch.nn.Linear(256, 128)
    >>> sparse = SparseLinear.from_linear(layer, sparsity=0.75)
    >>> sparse
    SparseLinear(in_features=256, out_features=128, bias=True, block=64, kept=2/8)
    >>> x = torch.randn(5, 256)
    >>> dense = torch.nn.functional.linear(x, sparse.to_dense(), sparse.bias)
    >>> torch.allclose(sparse(x), dense, atol=1e-5)
    True
    >>> sorted(sparse.state_dict())
    ['bias', 'block_col_idx', 'block_row_ptr', 'weight']
    """

    block_row_ptr: Tensor
    block_col_idx: Tensor
    weight_exponent: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, keep: Tensor, *, block: int = 64,
        bias: bool = True, activation: str = "none", prefer: str = "speed",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        block, shape = pruning.block_size("SparseLinear", block), (out_features, in_features)
        pattern = BlockPattern.from_mask(checked_keep(keep, shape, block), shape, block)
        lists = (pattern.row_ptr.to(device), pattern.col_idx.to(device))
        self._fill(shape, lists, block, bias, activation, prefer, device, dtype)
        self.reset_parameters()

    def _fill(
        self, shape: tuple[int, int], lists: tuple[Tensor, Tensor], block: int, bias: bool,
        activation: str, prefer: str, device: torch.device | str | None, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        """Register parameters and buffers for a pattern; weights are not initialised."""
        self.out_features, self.in_features = shape
        self.block, unit = block, BlockPattern.unit_of(block)
        self.activation = one_of("SparseLinear", "activation", activation, ACTIVATIONS)
        self.prefer = one_of("SparseLinear", "prefer", prefer, _PREFERENCES)
        if self.activation == "swiglu" and self.out_features % (2 * unit):
            raise value_error(
                "SparseLinear", "out_features", f'a multiple of {2 * unit} with "swiglu"',
                self.out_features, "Keep gate and up as separate layers",
            )  # fmt: skip
        blocks = (lists[1].numel(), unit, unit)
        self.weight = nn.Parameter(torch.empty(blocks, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        for name, part in zip(LISTS, lists, strict=True):
            self.register_buffer(name, part)
        self.register_buffer(EXPONENT, None)
        self._forget()

    @classmethod
    def of_size(
        cls, in_features: int, out_features: int, blocks: int, *, block: int = 64,
        bias: bool = True, activation: str = "none", prefer: str = "speed",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> Self:  # fmt: skip
        """Make a layer with a given number of blocks; load its pattern and weights afterwards.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear
        >>> saved = SparseLinear.from_linear(torch.nn.Linear(256, 128), sparsity=0.75)
        >>> layer = SparseLinear.of_size(256, 128, blocks=2)
        >>> layer.load_state_dict(saved.state_dict())
        <All keys matched successfully>
        >>> torch.equal(layer.to_dense(), saved.to_dense())
        True
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        block = pruning.block_size("SparseLinear", block)
        counts = (-(-out_features // BlockPattern.unit_of(block)) + 1, blocks)
        first, second = (torch.zeros(n, dtype=torch.int32, device=device) for n in counts)
        shape = (out_features, in_features)
        made._fill(shape, (first, second), block, bias, activation, prefer, device, dtype)
        return made

    @torch.no_grad()
    def _take(self, weight: Tensor, row_ptr: Tensor, col_idx: Tensor, bias: Tensor | None) -> None:
        """Copy kept blocks, their positions and a bias."""
        self.weight.copy_(weight)
        self.block_row_ptr.copy_(row_ptr)
        self.block_col_idx.copy_(col_idx)
        if bias is not None:
            self.bias.copy_(bias)
        self._forget()

    # -- to and from dense layers ---------------------------------------------------------------

    @classmethod
    def from_dense(
        cls, weight: Tensor, bias: Tensor | None = None, *, sparsity: float | None = None,
        method: str = "magnitude", mask: Tensor | None = None, block: int = 64,
        activation: str = "none", prefer: str = "speed", generator: torch.Generator | None = None,
        norms: Tensor | None = None,
    ) -> Self:  # fmt: skip
        """Keep blocks of a dense weight [out_features, in_features].

        Parameters
        ----------
        weight : Tensor or Parameter
        bias : Tensor [out_features], optional
        sparsity : float, optional
            Share of the blocks to drop, at least 0 and below 1. When None, the layer keeps the
            blocks of ``mask``, or else all nonzero blocks.
        method : {"magnitude", "wanda", "random", "mask"}
            Which blocks are kept; see :class:`SparseConfig`.
        mask : Tensor of bool, optional
            One value per weight, or one per block. Each block must be kept or dropped as a whole.
        generator : torch.Generator, optional
            For ``method="random"``; on the CPU.
        norms : Tensor [in_features], optional
            Norms of the layer's inputs, for ``"wanda"``; see :func:`calibrate`.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear
        >>> weight = torch.zeros(128, 128)
        >>> weight[:64, 64:] = 1.0
        >>> sparse = SparseLinear.from_dense(weight)
        >>> sparse
        SparseLinear(in_features=128, out_features=128, bias=False, block=64, kept=1/4)
        >>> torch.equal(sparse.to_dense(), weight)
        True
        """
        name = "SparseLinear.from_dense"
        check_weight(name, weight)
        block = pruning.block_size(name, block)
        if any(side % block for side in weight.shape):
            _say_once(
                f"SparseLinear: blocks of {block} do not divide a weight of "
                f"{weight.shape[0]}x{weight.shape[1]}; the last ones are padded with zeros"
            )
        if sparsity is None or mask is not None:
            method = "mask"
        scores = None
        if method == "wanda":
            scores, method = scores_of(name, weight.detach(), method, norms), "magnitude"
        keep = pruning.kept_blocks(
            name, weight.detach(), block, sparsity=sparsity, method=method, mask=mask,
            generator=generator, scores=scores,
        )  # fmt: skip
        shape = (int(weight.shape[0]), int(weight.shape[1]))
        pattern = BlockPattern.from_mask(keep, shape, block)
        made = cls.of_size(
            shape[1], shape[0], pattern.count, block=block, bias=bias is not None,
            activation=activation, prefer=prefer, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        taken = blocks_of(weight.detach(), pattern.row_ptr, pattern.col_idx, pattern.unit)
        made._take(taken, pattern.row_ptr, pattern.col_idx, bias)
        return made._freeze_like(weight, bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """Keep blocks of a ``torch.nn.Linear``; options as in :meth:`from_dense`.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear
        >>> SparseLinear.from_linear(torch.nn.Linear(128, 256), sparsity=0.5, method="random")
        SparseLinear(in_features=128, out_features=256, bias=True, block=64, kept=4/8)
        """
        return cls._of_linear(linear, options)

    def to_dense(self) -> Tensor:
        """Return the weight [out_features, in_features], zeros where no block is kept.

        Differentiable.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear
        >>> sparse = SparseLinear.from_linear(torch.nn.Linear(128, 64), sparsity=0.5)
        >>> sparse.to_dense().shape
        torch.Size([64, 128])
        """
        shape = (self.out_features, self.in_features)
        return dense_of_blocks(self._blocks(), self.block_row_ptr, self.block_col_idx, shape)

    def to_linear(self) -> nn.Linear:
        """Return a ``torch.nn.Linear`` of the same weights. The activation is not part of it.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear
        >>> sparse = SparseLinear.from_linear(torch.nn.Linear(128, 64), sparsity=0.5)
        >>> x = torch.randn(3, 128)
        >>> torch.allclose(sparse.to_linear()(x), sparse(x), atol=1e-6)
        True
        """
        return self._as_linear(self._wide_dtype())

    def reset_parameters(self) -> None:
        """Draw new weights like ``torch.nn.Linear``, with each output's number of kept inputs.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear
        >>> layer = SparseLinear(128, 128, torch.eye(2, dtype=torch.bool))
        >>> layer.reset_parameters()
        >>> bool(layer.weight.abs().max() <= 64**-0.5)
        True
        """
        share = self.weight.numel() / max(self.out_features * self.in_features, 1)
        bound = max(self.in_features * share, 1.0) ** -0.5
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.weight.device.type != "meta":
                pattern = self.pattern
                ones = self.weight.new_ones((self.out_features, self.in_features))
                self.weight.mul_(blocks_of(ones, pattern.row_ptr, pattern.col_idx, pattern.unit))
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    @torch.no_grad()
    def prune_(self, sparsity: float, optimizer: torch.optim.Optimizer | None = None) -> Self:
        """Drop the kept blocks with the smallest norm until ``sparsity`` is reached.

        Use it for gradual pruning. The weight stays the same Parameter, now with fewer blocks and
        without a gradient. If the layer is already that sparse, nothing happens.

        Optimisers of ``torch.optim`` keep the state of the kept blocks: they drop the rest before
        their next step. Make ``torch.optim.LBFGS``, whose state is of all parameters together, and
        ``DistributedDataParallel``, which has fixed sizes, again.

        Parameters
        ----------
        sparsity : float
            Share of all blocks (of the stored size) that are dropped afterwards.
        optimizer : torch.optim.Optimizer, optional
            Drops the state of the other blocks at once, which frees its memory. Pass optimisers
            that do not run the step hooks of ``torch.optim``.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear
        >>> layer = SparseLinear.from_linear(torch.nn.Linear(128, 128), sparsity=0.0)
        >>> layer.prune_(0.5)
        SparseLinear(in_features=128, out_features=128, bias=True, block=64, kept=2/4)
        """
        share = pruning.sparsity_share("SparseLinear.prune_", sparsity)
        if self.weight_exponent is not None:
            raise value_error(
                "SparseLinear.prune_", "weight", "of 16 bits or more", self.weight.dtype,
                "Call dequantize_() first",
            )  # fmt: skip
        rows, cols = self.pattern.grid
        count = pruning.kept_count(rows * cols, share)
        pruning.check_optimizer("SparseLinear.prune_", self.weight, optimizer)
        if count >= self.weight.shape[0]:
            return self
        kept = pruning.largest_blocks(self.weight, count)
        mask = torch.zeros((rows, cols), dtype=torch.bool, device=kept.device)
        mask[self.pattern.row_ids()[kept], self.block_col_idx[kept].long()] = True
        unit = BlockPattern.unit_of(self.block)
        pattern = BlockPattern.from_mask(mask, self.pattern.shape, unit)
        pruning.drop_blocks_(self.weight, kept)
        self.block_row_ptr, self.block_col_idx = pattern.row_ptr, pattern.col_idx
        if optimizer is not None:
            pruning.shrink_state(optimizer, self.weight)
        self._forget()
        return self

    # -- contents -------------------------------------------------------------------------------

    def method(self, tokens: int) -> str:
        """Return what multiplies this many tokens without gradients: blocks, few or dense.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import SparseLinear
        >>> SparseLinear.from_linear(torch.nn.Linear(64, 64), sparsity=0.0).eval().method(1)
        'dense'
        """
        weight, dtype = self.weight, self._wide_dtype()
        if weight.device.type != "cpu":
            self._ready()
            layer, bias = operators.block_layer(self._recipe), self.bias is not None
            return layer.method(tokens, dtype, weight.device, bias, keeps_dense(self))
        cells = self.in_features * self.out_features
        kept = blocks_on_host(cells, weight.numel(), tokens, dtype.itemsize)
        return "blocks" if kept or not keeps_dense(self) else "dense"

    def extra_repr(self) -> str:
        rows, cols = self.pattern.grid
        activation = "" if self.activation == "none" else f", activation={self.activation}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, block={self.block}, "
            f"kept={self.weight.shape[0]}/{rows * cols}{activation}"
            f"{'' if self.weight_exponent is None else ', weight=FP8'}"
        )

    # -- state ----------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Drop what was derived from parameters and buffers; it is made again when needed."""
        self._flat: list[Tensor] | None = None
        self._recipe = ""
        self._flat_key: tuple[Any, ...] = ()
        self._flat_memory: list[Tensor] = []
        self._bound: Bound | None = None
        self._forget_dense()

    def train(self, mode: bool = True) -> Self:
        """As ``torch.nn.Module.train``; copies of the weights are kept only in eval mode."""
        super().train(mode)
        if self._bound is not None:
            self._bound.layer.allow_dense(keeps_dense(self))
        return self

    @outside_modes
    def _ready(self) -> bool:
        """Make the pattern's tensors for the operators; once, also while tracing."""
        row_ptr, col_idx = self.block_row_ptr, self.block_col_idx
        # ``.data =`` changes neither the objects nor their versions. ``tensor_key`` takes 1 us more
        # at each call, and does not support tensors of inference mode.
        key = (
            id(row_ptr), id(col_idx), row_ptr.data_ptr(), col_idx.data_ptr(),
            row_ptr.stride(), col_idx.stride(),
            version_of(row_ptr), version_of(col_idx), col_idx.device,
        )  # fmt: skip
        if key != self._flat_key:
            with BUILDING:
                if key != self._flat_key:
                    self._make_flat(key)
        return True

    def _make_flat(self, key: tuple[Any, ...]) -> None:
        device = self.block_col_idx.device
        refuse_capture("SparseLinear", device, "Call the layer once before the capture")
        with torch.no_grad():
            flat = operators.flat_pattern(self.pattern)
            # References to the key's addresses, so that they are not reused.
            memory = [self.block_row_ptr.detach(), self.block_col_idx.detach()]
        settle(device)
        self._flat, self._recipe = flat, operators.layer_recipe(self.pattern)
        self._flat_key, self._flat_memory, self._bound = key, memory, None
        self._explain_fallback()

    # What torch.compiler.assume_constant_result does, without the 1.5 s import of torch._dynamo.
    _ready._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _explain_fallback(self) -> None:
        device, dtype = self.weight.device, self._wide_dtype()
        if device.type == "cpu":
            return
        layer = operators.block_layer(self._recipe)
        reasons = layer.reasons(dtype, device)
        if reasons:
            few = not layer.few.reasons(dtype, device)
            _say_once(
                f"SparseLinear: {'more than 16 tokens' if few else 'tokens'} are multiplied as a "
                f"masked dense weight on {device}, because the kernel for kept blocks "
                + " and ".join(reasons)
            )

    # -- products -------------------------------------------------------------------------------

    def _by_torch(self, x: Tensor, bound: Bound, bias: Tensor | None) -> Tensor | None:
        """The product if neither kernel runs: by torch; None if ``_general`` must compute it."""
        wrong = x.shape[-1:] != (self.in_features,)
        if wrong or bound.exponent is not None or torch.jit.is_tracing():
            return None
        return activate(functional.linear(x, self._dense_copy(), bias), self.activation)

    def forward(self, x: Tensor) -> Tensor:
        """Return activation(x·Wᵀ + bias).

        Parameters
        ----------
        x : Tensor [..., in_features]
            Must have the weight's dtype and device.

        Returns
        -------
        Tensor [..., out_features]
            Half as many after a SwiGLU.
        """
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if (
            not torch.compiler.is_compiling()
            and type(x) is Tensor
            and weight is not None
            and not (
                torch.is_grad_enabled()
                and (
                    x.requires_grad
                    or weight.requires_grad
                    or (bias is not None and bias.requires_grad)
                )
            )
            and not torch.is_autocast_enabled("cuda")
            and unwatched_call()
            and not x.is_neg()
        ):
            # Inference on a GPU with little host time.
            bound = self._bound
            if (
                bound is None
                or x.dtype is not bound.dtype
                or x.device != bound.device
                or not bound.holds(self, weight, bias)
            ):
                bound = rebound(self, x, weight, bias)
            if bound is not None:
                Y = bound.layer(x)
                if Y is None:
                    Y = self._by_torch(x, bound, bias)
                if Y is not None:
                    return Y
            elif self._dense_on_host(x):
                return activate(functional.linear(x, self._dense_copy(), bias), self.activation)
        return self._general(x)

    def _dense_on_host(self, x: Tensor) -> bool:
        """Whether a CPU multiplies x faster by a dense copy of the weight."""
        weight = self.weight
        return (
            x.device.type == weight.device.type == "cpu"
            and x.dtype is weight.dtype
            and x.shape[-1:] == (self.in_features,)
            and keeps_dense(self)
            and not torch.jit.is_tracing()
            and self.method(x.shape[:-1].numel()) == "dense"
        )

    def _general(self, x: Tensor) -> Tensor:
        """Through torch's operators: gradients, tracing, autocast, a CPU."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        known = isinstance(x, Tensor) and x.device.type in ("cpu", "cuda")
        if known and torch.is_autocast_enabled(x.device.type):
            lower = torch.get_autocast_dtype(x.device.type)
            if x.dtype is not torch.float64:
                x = x.to(lower)
                weight = weight.to(lower) if self.weight_exponent is None else weight
        if self.weight_exponent is not None and isinstance(x, Tensor):
            weight = self._blocks(x.dtype if x.dtype.is_floating_point else None)
        check_input(x, weight, self.in_features)
        self._ready()
        flat = self._flat
        assert flat is not None
        X = x.reshape(x.shape[:-1].numel(), self.in_features)
        if x.device.type not in ("cpu", "cuda"):
            shape = (self.out_features, self.in_features)
            full = dense_of_blocks(weight, self.block_row_ptr, self.block_col_idx, shape)
            bias = None if bias is None else bias.to(X.dtype)
            return activate(functional.linear(x, full, bias), self.activation)
        Y = operators.layer_product(X, weight, bias, None, flat, self._recipe)
        return activate(Y.reshape(*x.shape[:-1], self.out_features), self.activation)
