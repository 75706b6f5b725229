"""KeepsDense: what layers of pruned weights share: to and from dense ones, and a dense copy.

The copy is for calls that are faster with it. It is kept only in eval mode, until the weight may
have changed, and rewritten in place: CUDA graphs have its address, and rewrite it at each replay.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsetile.core.epoch import epoch
from sparsetile.core.errors import type_error
from sparsetile.core.streams import capturing, record_stream, settle
from sparsetile.intake.identity import counter_tells, tensor_key
from sparsetile.plan.modes import outside_modes

__all__ = ["BUILDING", "KeepsDense", "keeps_copies", "keeps_dense"]

# One lock for all layers: what another thread reads is not replaced.
BUILDING = threading.RLock()


def keeps_dense(module: KeepsDense) -> bool:
    """Whether a dense copy may be kept."""
    return module.prefer == "speed" and keeps_copies(module)


def keeps_copies(module: KeepsDense) -> bool:
    """Whether what is made of a weight may be kept: it is not trained, and writes are counted."""
    return (
        not module.training
        and getattr(module, "weight_exponent", None) is None
        and counter_tells(module.weight)
        and not any([each.is_inference() for each in module._places()])  # these have no counter
    )


class KeepsDense(nn.Module):
    """A pruned layer that may keep a dense copy of its weight.

    Subclasses have ``from_dense`` and ``to_dense``, and name their buffers in ``_pattern``.
    """

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: Any  # a Parameter or None
    prefer: str
    # Buffers with the places of the kept weights.
    _pattern: tuple[str, ...]
    # Attributes that are made of parameters and buffers: no part of copies and pickles.
    _derived: tuple[str, ...]
    # Whether a CUDA graph writes the copy again at each replay, and so follows the weight.
    _rewritten_by_graphs = True

    def to_dense(self) -> Tensor:
        """Return the dense weight."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop what was derived from parameters and buffers; it is made again when needed."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._derived}

    # -- to and from dense layers ---------------------------------------------------------------

    @classmethod
    def _of_linear(cls, linear: nn.Linear, options: Mapping[str, Any]) -> Self:
        if not isinstance(linear, nn.Linear):
            raise type_error(
                f"{cls.__name__}.from_linear", "linear", "a torch.nn.Linear",
                type(linear).__name__, f"Call {cls.__name__}.from_dense(weight, bias)",
            )  # fmt: skip
        made: Self = cls.from_dense(linear.weight, linear.bias, **options)  # type: ignore[attr-defined]
        return made.train(linear.training)

    def _freeze_like(self, weight: Tensor, bias: Tensor | None) -> Self:
        """Freeze what is frozen there; tensors that are no Parameters are trained."""
        self.weight.requires_grad_(weight.requires_grad or not isinstance(weight, nn.Parameter))
        if isinstance(bias, nn.Parameter):
            self.bias.requires_grad_(bias.requires_grad)
        return self

    def _train_like(self, other: nn.Linear | KeepsDense) -> Self:
        """Freeze what is frozen there, and take over the mode."""
        return self._freeze_like(other.weight, other.bias).train(other.training)

    def _as_linear(self, dtype: torch.dtype) -> nn.Linear:
        made = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device="meta", dtype=dtype
        )
        dense = self.to_dense().detach().contiguous()
        made.weight = nn.Parameter(dense, requires_grad=self.weight.requires_grad)
        if self.bias is not None:
            copied = self.bias.detach().clone()
            made.bias = nn.Parameter(copied, requires_grad=self.bias.requires_grad)
        return made.train(self.training)

    # -- the copy -------------------------------------------------------------------------------

    def _places(self) -> list[Tensor]:
        """The buffers with the places of the kept weights."""
        buffers: Any = self._buffers
        return [buffers[name] for name in self._pattern]

    def _contents_key(self) -> Hashable:
        """Changes whenever the dense weight may have."""
        return (tensor_key(self.weight), *[tensor_key(each) for each in self._places()], epoch())

    def _forget_dense(self) -> None:
        """Drop the copy; it is made again when needed."""
        self._dense: Tensor | None = None
        self._dense_key: Hashable = None
        # Captured CUDA graphs have these addresses.
        self._captured: list[object] = self.__dict__.get("_captured", [])

    def train(self, mode: bool = True) -> Self:
        """As ``torch.nn.Module.train``; copies of the weights are kept only in eval mode."""
        super().train(mode)
        self._dense_key = None
        if not any(each is self._dense for each in self._captured):
            self._dense = None
        return self

    @outside_modes
    def _dense_copy(self) -> Tensor:
        """The dense weight, without a gradient if it is kept."""
        if not keeps_dense(self):
            return self.to_dense()
        with BUILDING:
            kept = self._current_dense()
        if kept.is_cuda:  # it may be freed before this stream has read it
            record_stream((kept,), kept.device)
        return kept

    def _current_dense(self) -> Tensor:
        weight, kept = self.weight, self._dense
        key = self._contents_key()
        current = kept is not None and key == self._dense_key
        if current and not (self._rewritten_by_graphs and capturing(weight.device)):
            if capturing(weight.device):
                self._captured.append(kept)
            return kept  # type: ignore[return-value]
        with torch.no_grad():
            made = self.to_dense().contiguous()
            if kept is not None and kept.dtype is made.dtype and kept.device == made.device:
                kept.copy_(made)
            else:
                kept = made
        if capturing(weight.device):
            self._captured.append(kept)
            key = None  # only replays fill it
        else:
            settle(weight.device)
        self._dense, self._dense_key = kept, key
        return kept

    def _dense_bytes(self) -> int:
        """Bytes of the copy, 0 if there is none."""
        copy: Any = self._dense
        return 0 if copy is None else copy.nbytes
