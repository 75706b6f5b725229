"""The epilogue as parameters of our kernels, and in torch operations for libraries without one."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.launch.interface import Epilogue

__all__ = ["apply_epilogue", "epilogue_params"]


def epilogue_params(epilogue: Epilogue) -> dict[str, int | float]:
    """Return the fields of a kernel's parameters that say what happens to a sum."""
    bias = epilogue.bias
    return {
        "bias": 0 if bias is None else bias.data_ptr(), "alpha": epilogue.alpha,
        "beta": epilogue.beta, "epilogue": not epilogue.plain, "mean": epilogue.mean,
        "relu": epilogue.relu,
    }  # fmt: skip


def apply_epilogue(product: Tensor, out: Tensor, indptr: Tensor, epilogue: Epilogue) -> None:
    """Write ``relu(alpha · product [/ row length] + beta · out + bias)`` into ``out``.

    The product should be in the type of its sums: only the result is rounded. Row pointers are for
    the mean; empty rows stay 0.
    """
    if epilogue.mean:
        lengths = torch.clamp(indptr[1:] - indptr[:-1], min=1).to(product.dtype)
        product = product / lengths.unsqueeze(-1)
    if epilogue.alpha != 1.0:
        product = product * epilogue.alpha
    if epilogue.beta != 0.0:
        product = product + epilogue.beta * out.to(product.dtype)
    if epilogue.bias is not None:
        product = product + epilogue.bias
    if epilogue.relu:
        product = torch.relu(product)
    if product is not out:
        out.copy_(product)
