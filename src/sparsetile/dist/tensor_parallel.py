"""Tensor parallelism: a sparse linear layer with its kept blocks distributed over ranks.

Column-parallel: a rank has some outputs and needs all of x; results stay on their rank, or are
gathered. Row-parallel: a rank has some inputs, and the ranks' results are summed (all_reduce).
Column- then row-parallel is a feed-forward layer with one sum, as in Megatron-LM.

A rank's part, ``shard``, is a :class:`sparsetile.nn.SparseLinear`, with the kernels, optimiser
states, pruning and FP8 of any sparse layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsetile.core.checks import one_of
from sparsetile.core.errors import type_error, value_error
from sparsetile.dist.agreement import Agreement
from sparsetile.dist.collectives import copied, gathered, nothing, reduced, split
from sparsetile.dist.dtensor import is_dtensor
from sparsetile.dist.features import Side, as_sparse, digest_of, joined, part_of, shares_given
from sparsetile.dist.group import Ranks
from sparsetile.formats.block_pattern import BlockPattern
from sparsetile.layers.block_layer import activate
from sparsetile.nn import SparseLinear

__all__ = ["ColumnParallelSparseLinear", "ParallelSparseLinear", "RowParallelSparseLinear"]

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Kinds of x that are remembered as checked.
_MOST_KINDS = 256
_BOUNDS = "shares_and_rank"
_CHECKS = ("auto", "always", "first")
# Entries of a whole layer's state dict that are split between the parts.
_WHOLE = ("weight", "block_row_ptr", "block_col_idx", "weight_exponent", "bias")


class ParallelSparseLinear(nn.Module):
    """Base class of column- and row-parallel layers. Made by their ``from_linear``.

    Attributes
    ----------
    shard : SparseLinear
        This rank's blocks.
    in_features, out_features : int
        Of the whole layer.
    shares : tuple of int, one more than there are ranks
        First shared feature of each rank, and their number at the end.
    rank, world_size : int
    """

    _side: Side
    shard: SparseLinear

    def __init__(
        self, layer: SparseLinear, ranks: Ranks, shares: tuple[int, ...], check: str
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.block, self.activation, self.prefer = layer.block, layer.activation, layer.prefer
        self.shares = shares
        self.rank, self.world_size = ranks.rank, ranks.size
        self._ranks = ranks
        self._check_when = check
        self._agreement = Agreement(ranks, self._name)
        self._met: set[tuple[Any, ...]] = set()  # kinds of x that are already checked
        self.shard = part_of(layer, self._side, shares, ranks.rank)
        # Parts of other shares may have the same size, so the state dict stores the shares.
        self.register_buffer(_BOUNDS, torch.tensor([*shares, ranks.rank]))
        self.training = layer.training

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def group(self) -> Any:
        """The process group."""
        return self._ranks.group

    @classmethod
    def _made(
        cls,
        layer: Any,
        group: Any,
        shares: Sequence[int] | None,
        check: str,
        options: dict[str, Any],
        more: dict[str, Any],
    ) -> Self:
        """Check on every rank that all have the same layer, then take this rank's part."""
        function = f"{cls.__name__}.from_linear"
        ranks = Ranks(group, function)

        def arguments() -> tuple[SparseLinear, tuple[int, ...]]:
            one_of(function, "check", check, _CHECKS)
            sparse = as_sparse(function, layer, options)
            return sparse, shares_given(function, sparse, cls._side, ranks.size, shares)

        sparse, bounds = ranks.together(
            function, "the arguments", arguments,
            lambda found: {
                "layer": digest_of(found[0]), "shares": list(found[1]), "check": check, **more,
            },
        )  # fmt: skip
        return cls(sparse, ranks, bounds, check, **more)

    # -- products -------------------------------------------------------------------------------

    def _width(self) -> int:
        """Features of x on this rank."""
        raise NotImplementedError

    def _agree(self, x: Any) -> None:
        """Raise on every rank if x is wrong on one or differs between ranks.

        Checked at each call on a CPU. A check waits for the device, so on a GPU only calls with a
        new kind of x are checked.
        """
        kind: tuple[Any, ...] | None = None
        weight = self.shard.weight
        if type(x) is Tensor:
            kind = (
                x.dtype, x.shape, x.device, x.requires_grad, torch.is_grad_enabled(),
                torch.is_autocast_enabled(weight.device.type), weight.dtype, weight.device,
            )  # fmt: skip
            if kind in self._met:
                return
        error: Exception | None = None
        facts: dict[str, Any] | None = None
        try:
            self._check(x)
            facts = {
                "the dtype of x": x.dtype,
                "tokens of x": x.shape[:-1].numel(),
                "whether x requires grad": torch.is_grad_enabled() and x.requires_grad,
            }
        except Exception as caught:  # whatever it is, the others must not wait
            error = caught
        on_host = weight.device.type == "cpu"
        when = self._check_when if self._check_when != "auto" else "always" if on_host else "first"
        first = when == "first"
        if first and kind is not None and facts is not None and self._agreement.known(facts):
            self._keep(kind)
            return
        self._agreement.reach(facts, error, first=first)

    def _keep(self, kind: tuple[Any, ...]) -> None:
        if len(self._met) >= _MOST_KINDS:  # when serving, the number of tokens varies
            self._met.clear()
        self._met.add(kind)

    def _check(self, x: Any) -> None:
        weight = self.shard.weight
        if not isinstance(x, Tensor) or is_dtensor(x):
            raise type_error(
                self._name, "x", "a torch tensor", type(x).__name__,
                "Call x.to_local() of a DTensor, or convert x",
            )  # fmt: skip
        if x.dim() < 1 or x.shape[-1] != self._width():
            raise value_error(
                self._name, "x", f"of shape [..., {self._width()}] on rank {self.rank}",
                tuple(x.shape),
                "Both layers of a pair need the same shares=: see sparsetile.dist.feature_shares",
            )  # fmt: skip
        if x.device != weight.device:
            raise value_error(
                self._name, "x", f"on {weight.device} like the weight", x.device,
                "Move one of them with .to(device)",
            )  # fmt: skip
        cast = torch.is_autocast_enabled(x.device.type)
        eight = self.shard.weight_exponent is not None
        if x.dtype not in _TYPES or (x.dtype != weight.dtype and not cast and not eight):
            raise type_error(
                self._name, "x", f"{weight.dtype} like the weight", x.dtype,
                f"Call x.to({weight.dtype}), or use torch.autocast",
            )  # fmt: skip

    def _local(self, x: Tensor) -> Tensor:
        """This rank's product. Without blocks it is zeros that depend on x and weights."""
        shard = self.shard
        if shard.weight.shape[0]:
            return shard(x)
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
        Y = nothing(x, shard.weight, shard.out_features, dtype)
        if shard.bias is not None:
            Y = Y + shard.bias.to(dtype)
        return activate(Y, shard.activation)

    # -- to and from whole layers ---------------------------------------------------------------

    def _whole_bias(self) -> Tensor | None:
        """The bias of the whole layer, if this rank has all of it."""
        return None

    def _has_bias(self) -> bool:
        return self.shard.bias is not None

    def gather(self) -> SparseLinear:
        """Return the whole layer on every rank, on the part's device. Every rank must call it.

        For checkpoints and tests; waits. ``gather().to_linear()`` is a dense layer.
        """
        function = f"{self._name}.gather"
        wide = self.shard._wide_dtype()
        mine = self._ranks.together(
            function, "the layer",
            lambda: {name: part.detach().cpu() for name, part in self.shard.state_dict().items()},
            lambda found: {"the type of the weights": wide, "the state dict": sorted(found)},
        )  # fmt: skip
        eight = mine["weight"].dtype
        if eight.itemsize == 1:  # torch does not pickle FP8 here
            mine["weight"] = mine["weight"].view(torch.int8)
        states = self._ranks.objects(mine, function)
        if eight.itemsize == 1:
            for state in states:
                state["weight"] = state["weight"].view(eight)
        whole = SparseLinear.of_size(
            self.in_features, self.out_features, 0, block=self.block, bias=self._has_bias(),
            activation=self.activation, prefer=self.prefer, dtype=wide,
        )  # fmt: skip
        made = joined(states, whole, self._side, self.shares)
        bias = self._whole_bias()
        if bias is not None:
            with torch.no_grad():
                made.bias.copy_(bias)
        made.weight.requires_grad_(self.shard.weight.requires_grad)
        return made.to(self.shard.weight.device).train(self.training)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the state dict of a part, or this rank's part of a whole layer's."""
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor) and f"{prefix}shard.weight" not in state_dict:
            given = {
                name: state_dict.pop(prefix + name)
                for name in _WHOLE
                if prefix + name in state_dict
            }
            try:
                state_dict.update(self._state_of(given, prefix))
            except (RuntimeError, ValueError) as caught:
                error_msgs.append(f"{self._name}: {caught}")
                return
            state_dict[prefix + _BOUNDS] = torch.tensor([*self.shares, self.rank])
        found = state_dict.get(prefix + _BOUNDS)
        if isinstance(found, Tensor) and found.device.type != "meta":
            *shares, rank = found.tolist()
            if (tuple(shares), rank) != (self.shares, self.rank):
                error = value_error(
                    "load_state_dict", "the state dict",
                    f"of rank {self.rank} with shares {list(self.shares)}",
                    f"rank {rank} with {shares}",
                    "Load the state dict of gather(), or make the layer with those shares",
                )  # fmt: skip
                error_msgs.append(f"{self._name}: {error}")
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _state_of(self, given: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """This rank's entries of a whole layer's state dict, sparse or dense."""
        bias = given.get("bias") if self._has_bias() else None
        if "block_col_idx" in given:
            whole = SparseLinear.of_size(
                self.in_features, self.out_features, 0, block=self.block, bias=bias is not None,
                activation=self.activation, dtype=self.shard._wide_dtype(),
            )  # fmt: skip
            whole.load_state_dict(given)
            part = part_of(whole, self._side, self.shares, self.rank)
            found = dict(part.state_dict())
        else:
            found = self._state_of_dense(given["weight"], bias)
        if self._side == "inputs" and bias is not None:
            found["bias"] = bias
        return {prefix + (name if self._side == "inputs" and name == "bias" else f"shard.{name}"):
                part for name, part in found.items()}  # fmt: skip

    def _state_of_dense(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """The weights of this rank's blocks: the pattern stays."""
        if weight.shape != (self.out_features, self.in_features):
            raise value_error(
                "load_state_dict", "weight", f"of shape {(self.out_features, self.in_features)}",
                tuple(weight.shape), "Load the state dict of a layer of the same size",
            )  # fmt: skip
        begin, end = self.shares[self.rank], self.shares[self.rank + 1]
        if self._side == "inputs":
            return {"weight": weight[:, begin:end]}
        halves = 2 if self.activation == "swiglu" else 1
        found = {"weight": weight.reshape(halves, -1, self.in_features)[:, begin:end].flatten(0, 1)}
        if bias is not None:
            found["bias"] = bias.reshape(halves, -1)[:, begin:end].reshape(-1)
        return found

    def extra_repr(self) -> str:
        rows, cols = self._grid()
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"blocks={rows}x{cols}, rank {self.rank} of {self.world_size}"
        )

    def _grid(self) -> tuple[int, int]:
        unit = BlockPattern.unit_of(self.block)
        return -(-self.out_features // unit), -(-self.in_features // unit)


class ColumnParallelSparseLinear(ParallelSparseLinear):
    """A sparse linear layer with its outputs split over the ranks. Made by :meth:`from_linear`.

    Every rank passes the same x and gets the features ``shares[rank]`` to ``shares[rank + 1]`` of
    the result, or all of them with ``gather_output``. Gradients of x are summed over the ranks.
    Gradients of weights and bias stay on their rank.
    """

    _side: Side = "outputs"

    def __init__(
        self,
        layer: SparseLinear,
        ranks: Ranks,
        shares: tuple[int, ...],
        check: str,
        gather_output: bool,
    ) -> None:
        super().__init__(layer, ranks, shares, check)
        self.gather_output = gather_output

    @classmethod
    def from_linear(
        cls,
        layer: nn.Linear | SparseLinear,
        group: Any = None,
        *,
        shares: Sequence[int] | None = None,
        gather_output: bool = False,
        check: str = "auto",
        **options: Any,
    ) -> Self:
        """Take this rank's block rows of a layer. Every rank must call it.

        Parameters
        ----------
        layer : torch.nn.Linear or SparseLinear
            The whole layer, the same on every rank. It is not changed.
        group : ProcessGroup, optional
            The default group when None.
        shares : sequence of int [ranks + 1], optional
            First output of each rank. When None, ranks get whole blocks with about equal numbers
            of kept blocks. A pair of layers needs the same shares: see :func:`feature_shares`.
            Outputs of a SwiGLU are counted after it.
        gather_output : bool
            Return all outputs on every rank. The code after it must do the same on every rank.
        check : {"auto", "always", "first"}
            When ranks compare x; see :func:`sparsetile.dist.plan`.
        **options
            Which blocks of a ``torch.nn.Linear`` to keep; see ``SparseLinear.from_dense``.
        """
        more = {"gather_output": bool(gather_output)}
        return cls._made(layer, group, shares, check, options, more)

    def _width(self) -> int:
        return self.in_features

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features of the result, or all of them. Every rank must call it."""
        self._agree(x)
        Y = self._local(copied(x, self._ranks))
        return gathered(Y, self._ranks, self.shares, self._name) if self.gather_output else Y


class RowParallelSparseLinear(ParallelSparseLinear):
    """A sparse linear layer with its inputs split over the ranks. Made by :meth:`from_linear`.

    A rank passes the features ``shares[rank]`` to ``shares[rank + 1]`` of x, the output of a
    column-parallel layer with the same shares. Results are summed over the ranks, so every rank has
    the whole result. Bias and activation are applied after the sum. Every rank holds the bias, with
    the same gradient.
    """

    _side: Side = "inputs"

    def __init__(
        self,
        layer: SparseLinear,
        ranks: Ranks,
        shares: tuple[int, ...],
        check: str,
        input_is_parallel: bool,
    ) -> None:
        super().__init__(layer, ranks, shares, check)
        self.input_is_parallel = input_is_parallel
        if layer.bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(
                layer.bias.detach().clone(), requires_grad=layer.bias.requires_grad
            )

    @classmethod
    def from_linear(
        cls,
        layer: nn.Linear | SparseLinear,
        group: Any = None,
        *,
        shares: Sequence[int] | None = None,
        input_is_parallel: bool = True,
        check: str = "auto",
        **options: Any,
    ) -> Self:
        """Take this rank's block columns of a layer. Every rank must call it.

        Parameters
        ----------
        layer, group, check, options
            See :meth:`ColumnParallelSparseLinear.from_linear`.
        shares : sequence of int [ranks + 1], optional
            First input of each rank; the same as in the layer before.
        input_is_parallel : bool
            Whether x holds only this rank's features. Otherwise x is whole, and the same on every
            rank.
        """
        more = {"input_is_parallel": bool(input_is_parallel)}
        return cls._made(layer, group, shares, check, options, more)

    def _width(self) -> int:
        if not self.input_is_parallel:
            return self.in_features
        return self.shares[self.rank + 1] - self.shares[self.rank]

    def _whole_bias(self) -> Tensor | None:
        return self.bias

    def _has_bias(self) -> bool:
        return self.bias is not None

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole result on every rank. Every rank must call it."""
        self._agree(x)
        if not self.input_is_parallel:
            x = split(x, self._ranks, self.shares)
        Y = reduced(self._local(x), self._ranks, self._name)
        if self.bias is not None:
            Y = Y + self.bias.to(Y.dtype)
        return activate(Y, self.activation)
