"""Device kernels and the CPU's numba kernels. One KernelSpec a device kernel, all in KERNELS."""

from __future__ import annotations

from sparsetile.kernels.bcsr import SPMM_BCSR
from sparsetile.kernels.bittcf import SPMM_BITTCF
from sparsetile.kernels.csr import SDDMM_CSR, SPMM_CSR
from sparsetile.kernels.spec import KernelSpec
from sparsetile.kernels.tf32_operand import TF32_OPERAND
from sparsetile.kernels.wcsr import JOIN_WCSR, SPMM_WCSR

__all__ = ["KERNELS", "KernelSpec"]

KERNELS: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in (
        SPMM_CSR,
        SDDMM_CSR,
        SPMM_BITTCF,
        SPMM_BCSR,
        TF32_OPERAND,
        SPMM_WCSR,
        JOIN_WCSR,
    )
}
