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


# Types in which kernels read a bias of C's rows, by the number that stands for each.
_BIAS_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def readable_bias(bias: Tensor) -> bool:
    """Whether kernels can read a bias of C's rows as it is."""
    return bias.dtype in _BIAS_TYPES and bias.is_contiguous() and not bias.is_neg()


def readable(bias: Tensor | None) -> Tensor | None:
    """Return a bias of C's rows that kernels can read: itself if possible."""
    if bias is None or readable_bias(bias):
        return bias
    return bias.to(torch.float32).resolve_neg().contiguous()


def row_bias_params(epilogue: Epilogue) -> dict[str, int]:
    """Return the fields of a kernel's parameters for a bias of C's rows."""
    bias = epilogue.row_bias
    if bias is None:
        return {"row_bias": 0, "row_bias_type": 0}
    return {"row_bias": bias.data_ptr(), "row_bias_type": _BIAS_TYPES[bias.dtype]}


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
