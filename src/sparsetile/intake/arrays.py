"""Turns one array of the caller (tensor, numpy, anything with DLPack) into a checked tensor.

Indices keep int32 or int64, values keep their float type and their place in the autograd graph.
``canonical`` handles the layout of matrices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.csr import COMPLEX, VALUE_DTYPES

__all__ = [
    "as_tensor", "float_values", "index_tensor", "refuse_complex", "scipy_index_tensor",
    "values_tensor",
]  # fmt: skip

_INDEX_DTYPES = (torch.int32, torch.int64)
_INTEGER_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)


_REAL = "float16, bfloat16, float32, float64, or whole numbers"


def refuse_complex(function: str, argument: str, values: Tensor | None) -> None:
    """Raise if values are complex."""
    if values is not None and values.is_complex():
        raise type_error(
            function, argument, _REAL, dtype_name(values.dtype),
            "Split it into real and imaginary parts",
        )  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``, for error texts."""
    return str(dtype).removeprefix("torch.")


def as_tensor(function: str, argument: str, array: Any) -> Tensor:
    """Return ``array`` as a strided tensor, without copying if torch can share the memory."""
    if isinstance(array, Tensor):
        tensor = array
    elif isinstance(array, np.ndarray):
        tensor = _from_numpy(function, argument, array)
    elif hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        tensor = torch.from_dlpack(array)
    else:
        raise type_error(
            function, argument, "a torch tensor or a numpy array", type(array).__name__,
            "Wrap it in torch.as_tensor",
        )  # fmt: skip
    if tensor.layout != torch.strided:
        raise type_error(
            function, argument, "a dense tensor", f"one of layout {tensor.layout}",
            "Pass the parts of a sparse tensor, or the sparse tensor alone as A",
        )  # fmt: skip
    if tensor.device.type == "meta":
        raise value_error(
            function, argument, "a tensor that holds data", "one on the meta device",
            "Move the matrix to the CPU or a GPU first",
        )  # fmt: skip
    return tensor.resolve_conj().resolve_neg()


def _from_numpy(function: str, argument: str, array: np.ndarray) -> Tensor:
    plain = np.asarray(array)
    if not plain.dtype.isnative:
        plain = plain.astype(plain.dtype.newbyteorder("="))
    # torch shares neither reversed nor read-only memory (it warns on the latter), so those copy.
    if not plain.flags.writeable or any(stride < 0 for stride in plain.strides):
        plain = plain.copy()
    try:
        return torch.from_numpy(plain)
    except TypeError:
        raise type_error(
            function, argument, "an array of a type that torch has", f"dtype {array.dtype}",
            "Convert it with astype, for instance to float32 or int64",
        ) from None  # fmt: skip


def index_tensor(function: str, argument: str, array: Any, ndim: int = 1) -> Tensor:
    """Return an int32 or int64 tensor of ``ndim`` dimensions, or raise."""
    tensor = as_tensor(function, argument, array)
    if tensor.dtype not in _INDEX_DTYPES:
        raise type_error(
            function, argument, "int32 or int64", dtype_name(tensor.dtype),
            "Convert it with .to(torch.int64)",
        )  # fmt: skip
    return _of_ndim(function, argument, tensor, ndim)


def scipy_index_tensor(function: str, argument: str, array: Any) -> Tensor:
    """Like :func:`index_tensor` for arrays whose type a library chose: any integer type."""
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and array.dtype.itemsize < 8:
        array = array.astype(np.int32 if array.dtype != np.uint32 else np.int64, copy=False)
    elif isinstance(array, np.ndarray) and array.dtype.kind == "u":
        array = array.astype(np.int64)  # beyond 2^63 turns negative, which the range check sees
    return index_tensor(function, argument, array)


def values_tensor(function: str, argument: str, array: Any, ndim: int = 1) -> Tensor:
    """Return the values as a tensor of ``ndim`` dimensions, still in the autograd graph.

    :func:`float_values` checks their type, since it reads the content of whole numbers.
    """
    return _of_ndim(function, argument, as_tensor(function, argument, array), ndim)


def _of_ndim(function: str, argument: str, tensor: Tensor, ndim: int) -> Tensor:
    if tensor.ndim != ndim:
        raise value_error(
            function, argument, f"{ndim}-dimensional", f"shape {tuple(tensor.shape)}",
            "Flatten it with .reshape(-1)" if ndim == 1 else "Check the order of the arguments",
        )  # fmt: skip
    return tensor


def float_values(function: str, argument: str, values: Tensor) -> Tensor:
    """Return 1-D ``values`` as a float tensor; whole numbers become the default float type.

    Whole numbers and bools are converted only if every one of them is exactly representable: a
    weight that would be rounded is an error. Complex ones pass: see :func:`refuse_complex`.
    """
    if values.dtype in VALUE_DTYPES or values.dtype in COMPLEX:
        return values
    target = torch.get_default_dtype()
    if values.dtype not in _INTEGER_DTYPES:
        raise type_error(
            function, argument, _REAL, dtype_name(values.dtype),
            "Convert it with .to(torch.float32)",
        )  # fmt: skip
    whole = values.to(torch.int64)
    converted = whole.to(target)
    # Compared in float64, which has +-2^63: casting back a number rounded up to 2^63 is undefined.
    wide = converted.to(torch.float64)
    inside = (wide >= -(2.0**63)) & (wide < 2.0**63)
    exact = torch.where(inside, wide, 0.0).to(torch.int64) == whole  # numbers outside are not 0
    if values.dtype == torch.uint64:
        exact &= whole >= 0  # numbers beyond int64 came out negative
    if not bool(exact.all()):
        at = int(torch.nonzero(~exact)[0, 0])
        raise type_error(
            function, argument, f"whole numbers that {dtype_name(target)} holds exactly",
            f"{dtype_name(values.dtype)} that it would round (entry {at})",
            "Convert it to the float type you want, for instance with .to(torch.float64)",
        )  # fmt: skip
    return converted
