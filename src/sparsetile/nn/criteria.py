"""What a weight is worth, by which pruning keeps weights and blocks.

    magnitude   |W[i, j]|
    wanda       |W[i, j]| times the norm of input j over calibration data (Sun et al., 2024). Single
                weights are compared in each row, as there
    random      a random number

A block is worth the sum of the squares of its weights' scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.core.errors import type_error, value_error

__all__ = ["CRITERIA", "norms_for", "scores_of"]

CRITERIA = ("magnitude", "wanda", "random")


def norms_for(function: str, norms: Any, width: int, name: str = "norms") -> Tensor:
    """Return norms of a layer's inputs in float32, or raise."""
    if norms is None:
        raise value_error(
            function, name, 'given with method="wanda"', "none for this layer",
            "Pass norms=calibrate(model, batches)",
        )  # fmt: skip
    if not isinstance(norms, Tensor):
        raise type_error(
            function, name, "a tensor [in_features]", type(norms).__name__,
            "Pass norms=calibrate(model, batches)",
        )  # fmt: skip
    if norms.shape != (width,):
        raise value_error(
            function, name, f"of shape ({width},), one for each input", tuple(norms.shape),
            "Calibrate the model that is pruned",
        )  # fmt: skip
    return norms.float()


@torch.no_grad()
def scores_of(
    function: str, weight: Tensor, method: str, norms: Any = None,
    generator: torch.Generator | None = None, name: str = "norms",
) -> Tensor:  # fmt: skip
    """Return the scores [rows, columns] of a dense weight, in float32."""
    if method == "random":
        place = "cpu" if generator is None else generator.device
        return torch.rand(weight.shape, generator=generator, device=place).to(weight.device)
    scores = weight.float().abs()
    if method == "wanda":
        scores = scores * norms_for(function, norms, weight.shape[1], name).to(weight.device)
    return scores
