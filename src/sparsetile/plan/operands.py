"""What ``Plan.run`` and ``Plan.update_values`` accept: one clear error for everything else."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.csr import (
    CSR,
    FP8,
    FP8_RESULTS,
    PRODUCT_DTYPES,
    VALUE_DTYPES,
    result_dtype,
)
from sparsetile.systems import SYSTEMS

__all__ = [
    "Planned", "check_bias", "check_epilogue", "check_fp8", "check_operand", "check_out",
    "check_values", "in_plan_dtype", "wrong_type",
]  # fmt: skip


class Planned(Protocol):
    """The part of a plan that its checks look at."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


def check_operand(plan: Planned, B: Any, function: str = "run") -> None:
    """A dense tensor [..., K, N] on the plan's device."""
    if not isinstance(B, Tensor):
        raise type_error(
            function, "B", "a torch tensor", type(B).__name__, "Convert it with torch.as_tensor"
        )
    if B.dim() < 2 or B.shape[-2] != plan.shape[1]:
        raise value_error(
            function, "B", f"of shape [..., {plan.shape[1]}, N]", tuple(B.shape),
            f"A is {plan.shape[0]}x{plan.shape[1]}: B needs one row per column of A",
        )  # fmt: skip
    if B.device != plan.device:
        raise value_error(
            function, "B", f"on {plan.device} like the plan", B.device,
            f"Move it with B.to({str(plan.device)!r}), or plan with A on B's device",
        )  # fmt: skip
    if B.layout is not torch.strided:
        raise type_error(function, "B", "a dense tensor", B.layout, "Call B.to_dense()")


def check_values(
    function: str, csr: CSR, dtype: torch.dtype, values: Any,
    allowed: tuple[torch.dtype, ...] = VALUE_DTYPES,
) -> None:  # fmt: skip
    """One float value per entry of the matrix that was planned, on its device."""
    entries = csr.nnz if csr.entry_map is None else csr.entry_map.numel()
    if not isinstance(values, Tensor):
        raise type_error(
            function, "values", "a torch tensor", type(values).__name__,
            "Convert it with torch.as_tensor",
        )  # fmt: skip
    if values.shape != (entries,):
        raise value_error(
            function, "values", f"of shape ({entries},)", tuple(values.shape),
            "Give one value per entry of the matrix that was planned",
        )  # fmt: skip
    if values.device != csr.device:
        raise value_error(
            function, "values", f"on {csr.device}", values.device,
            f"Call values.to({str(csr.device)!r})",
        )  # fmt: skip
    if values.dtype not in allowed:
        raise type_error(
            function, "values", "a float tensor", values.dtype,
            f"Call values.to({dtype})",
        )  # fmt: skip


def check_bias(function: str, bias: Any, length: int, device: torch.device, per: str) -> None:
    """One real number for each of ``length`` columns or rows, on the product's device."""
    if not isinstance(bias, Tensor):
        raise type_error(
            function, "bias", "a torch tensor", type(bias).__name__,
            "Convert it with torch.as_tensor",
        )  # fmt: skip
    if bias.shape != (length,) or bias.device != device:
        raise value_error(
            function, "bias", f"of shape ({length},) on {device}",
            f"{tuple(bias.shape)} on {bias.device}", f"Give one number per {per}",
        )  # fmt: skip
    if bias.is_complex() or bias.layout is not torch.strided:
        raise type_error(
            function, "bias", "a dense tensor of real numbers", f"{bias.dtype}, {bias.layout}",
            "Convert it first",
        )  # fmt: skip


def check_epilogue(
    B: Tensor, out: Tensor | None, reduce: str, bias: Any, relu: Any, out_dtype: torch.dtype | None,
    function: str = "run",
) -> None:  # fmt: skip
    """Bias, ReLU and output type only if the kernels fuse them."""
    if bias is None and relu is False and out_dtype is None:
        return
    if not isinstance(relu, bool):
        raise type_error(function, "relu", "True or False", repr(relu), "Pass relu=True")
    if out is not None or reduce in ("max", "min"):
        raise value_error(
            "run", "bias, relu and out_dtype", "omitted with out=, max or min",
            f"reduce={reduce}" if out is None else "out=", "Apply them to the result instead",
        )  # fmt: skip
    if bias is not None:
        check_bias("run", bias, B.shape[-1], B.device, "column of B")
    if B.dtype is FP8:
        if out_dtype not in (None, *FP8_RESULTS):
            names = ", ".join(str(dtype) for dtype in FP8_RESULTS)
            raise type_error(function, "out_dtype", f"one of {names}", out_dtype, "Cast the result")
        return
    if out_dtype not in (None, B.dtype, torch.float32) or (
        B.dtype is torch.float64 and out_dtype is torch.float32
    ):
        wide = B.dtype is torch.float64
        raise type_error(
            function, "out_dtype", str(B.dtype) if wide else f"{B.dtype} or torch.float32",
            out_dtype, "Cast the result instead",
        )  # fmt: skip


def check_out(rows: int, B: Tensor, out: Any, reduce: str, needs_grad: bool) -> None:
    """A tensor of C's shape, type and device, for a product that is not differentiated."""
    shape = (*B.shape[:-2], rows, B.shape[-1])
    if not isinstance(out, Tensor):
        raise type_error("run", "out", "a torch tensor", type(out).__name__, "Pass a tensor")
    expected = out.dtype if B.dtype is FP8 and out.dtype in FP8_RESULTS else result_dtype(B.dtype)
    if out.shape != shape or out.dtype != expected or out.device != B.device:
        raise value_error(
            "run", "out", f"{expected} of shape {shape} on {B.device}",
            f"{out.dtype} of shape {tuple(out.shape)} on {out.device}",
            "Allocate it with torch.empty, or omit out=",
        )  # fmt: skip
    traced = torch.compiler.is_compiling()
    view = "" if traced else "negative" if out.is_neg() else "conjugate" if out.is_conj() else ""
    shared = out.numel() and any(
        step == 0 and size > 1 for step, size in zip(out.stride(), out.shape, strict=True)
    )
    if view or shared:
        raise value_error(
            "run", "out", "a tensor whose elements have memory of their own",
            f"a {view} view" if view else f"strides {out.stride()}",
            "Allocate it with torch.empty, or omit out=",
        )  # fmt: skip
    if reduce in ("max", "min"):
        raise value_error("run", "reduce", "sum or mean when out is given", reduce, "Omit out=")
    if needs_grad:
        raise value_error(
            "run", "out", "omitted when gradients are needed", "a tensor",
            "Omit out=, or run under torch.no_grad()",
        )  # fmt: skip


def check_fp8(reduce: str, needs_grad: bool, function: str = "run") -> None:
    """Products in FP8 are sums or means, and are not differentiated."""
    if reduce in ("max", "min") or needs_grad:
        raise value_error(
            function, "a float8 product", "a sum or mean without gradients",
            "gradients" if needs_grad else f"reduce={reduce}", "Make a plan in torch.bfloat16",
        )  # fmt: skip


def in_plan_dtype(plan: Planned, tensor: Tensor, function: str, name: str) -> Tensor:
    """Return an operand in the type of the product: autocast's if it is on, else the plan's.

    Under autocast a system that does not take the lower precision keeps the plan's type.
    """
    if torch.is_autocast_enabled(plan.device.type) and tensor.dtype is not torch.float64:
        lower = torch.get_autocast_dtype(plan.device.type)
        system = SYSTEMS.get(getattr(plan, "system", ""))  # a distributed plan has several
        taken = system is None or lower in system.dtypes
        return tensor.to(lower if taken else plan.dtype)
    if tensor.dtype is not plan.dtype:
        raise wrong_type(plan.dtype, tensor, function, name)
    return tensor


def wrong_type(dtype: torch.dtype, tensor: Tensor, function: str, name: str) -> TypeError:
    """Build the error of an operand that is not of the plan's type."""
    remedy = f"Cast it with {name}.to({dtype})"
    if dtype.is_complex:
        return type_error(function, name, f"{dtype} with this plan", tensor.dtype, remedy)
    if tensor.is_complex():
        remedy = f"Multiply {name}.real and {name}.imag one after the other"
    elif tensor.dtype in PRODUCT_DTYPES:
        remedy += f", or make a plan with dtype={tensor.dtype}"
    return type_error(function, name, f"{dtype} like the plan", tensor.dtype, remedy)
