"""What systems, bound products and prepared launches pass each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

__all__ = ["PLAIN", "Bound", "Epilogue", "Prepared", "Tensors"]

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What happens to a sum before it is stored: alpha, mean, beta, bias, ReLU, in that order.

    ``bias`` is along C's columns. ``row_bias`` [M] is along its rows, as
    ``launch.epilogue.readable`` returns it; only runners with ``fuses_linear`` are given one.
    """

    alpha: float = 1.0
    beta: float = 0.0
    mean: bool = False
    bias: Tensor | None = None
    relu: bool = False
    row_bias: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a sum is stored as it is."""
        return (
            self.alpha == 1.0
            and self.beta == 0.0
            and self.bias is None
            and self.row_bias is None
            and not self.mean
            and not self.relu
        )


PLAIN = Epilogue()


class Prepared(Protocol):
    """A launch that lacks addresses: ``jit``'s, or a runner's own around it."""

    def launch(self, stream: int, *values: Any) -> None:
        """Multiply B, at the first address, into C, at the second.

        Launches that were prepared with an epilogue also take the bias's address and alpha.
        """


class Bound(Protocol):
    """A product whose A does not change, of matrices B [K, N] whose columns have unit stride."""

    def __call__(self, B: Tensor, out: Tensor | None = None) -> Tensor:
        """Return A·B, in ``out`` if given: contiguous, of C's shape and B's type, aligned to 16
        bytes, apart from B."""

    def fused(self, B: Tensor, bias: Tensor | None, alpha: float, mean: bool, relu: bool) -> Tensor:
        """Return relu(alpha · A·B + bias), or of the mean of each row's entries."""
