"""KeepsDense: a dense copy of a pruned weight, for calls that are faster with it.

The copy is kept only in eval mode, until the weight may have changed, and rewritten in place: CUDA
graphs have its address, and rewrite it at each replay.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsetile.core.epoch import epoch
from sparsetile.core.streams import capturing, record_stream, settle
from sparsetile.intake.identity import counter_tells, tensor_key
from sparsetile.plan.modes import outside_modes

__all__ = ["BUILDING", "KeepsDense", "keeps_dense"]

# One lock for all layers: what another thread reads is not replaced.
BUILDING = threading.RLock()


def keeps_dense(module: KeepsDense) -> bool:
    """Whether a dense copy may be kept: the weight is not trained, and its writes are counted."""
    return (
        module.prefer == "speed"
        and not module.training
        and getattr(module, "weight_exponent", None) is None
        and counter_tells(module.weight)
    )


class KeepsDense(nn.Module):
    """A pruned layer that may keep a dense copy of its weight; subclasses have ``to_dense``."""

    weight: nn.Parameter
    bias: Any  # a Parameter or None
    prefer: str
    # Whether a CUDA graph writes the copy again at each replay, and so follows the weight.
    _rewritten_by_graphs = True

    def to_dense(self) -> Tensor:
        """Return the dense weight."""
        raise NotImplementedError

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
        key: Hashable = (tensor_key(weight), epoch())
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
