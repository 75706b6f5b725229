"""``bcsr``: AsyncSparse's structured half, dense 64x64 blocks on WGMMA (sm_90a).

Parts: BCSR (formats/bcsr.py), block rows longest first, the warp-specialised persistent kernel with
TMA loads (kernels/cuda/block_sparse/spmm_bcsr.cu). For matrices whose entries form blocks, as in
pruned weights: every cell of a stored block is multiplied. If some have no entry, non-finite
elements of C are recomputed from A's entries (:meth:`ExactRunner.repair`). Deterministic: blocks of
a row are added in order. docs/explanation/notes/asyncsparse.md explains the decisions.

``ablation`` names the last enabled step of the paper's ladder (kernels/bcsr.py), ``opt0`` to
``opt7``; opt4 is opt3, and products use opt6. ``columns128`` and ``columns256`` are the product
with tiles of that width, for any B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsetile.balance import LongestFirst
from sparsetile.engines.request import BuildTimer, BuiltSystem, Request, order_tensor, prefixed
from sparsetile.formats import BCSR
from sparsetile.formats.bcsr import count_blocks
from sparsetile.intake.csr import CSR
from sparsetile.kernels.bcsr import BLOCK, COLUMNS, ELEMENTS, FP8, LADDER, PRODUCT
from sparsetile.systems.base import System
from sparsetile.systems.bcsr import DEVICES
from sparsetile.systems.bcsr.cost import predict_bcsr
from sparsetile.systems.bcsr.runner import BCSRRunner
from sparsetile.systems.registry import exact_runner, exact_system
from sparsetile.systems.requirements import entry_reasons, hopper_reasons, tf32_reasons

__all__ = ["SYSTEM", "BCSRSystem"]

# The blocks may take at most this share of the free memory.
MEMORY_SHARE = 0.25


def _block_bytes(csr: CSR, order: torch.Tensor | None, item: int, limit: int) -> int:
    """Bytes of A's blocks; counted only if their upper bound is over ``limit``."""
    rows, cols = csr.shape
    most = min(csr.nnz, -(-rows // BLOCK) * -(-cols // BLOCK)) * BLOCK**2 * item
    return most if most <= limit else count_blocks(csr, BLOCK, order) * BLOCK**2 * item


def _type_reasons(request: Request) -> list[str]:
    """The ladder supports only 16 bits, and FP8 has no repair of C."""
    found = []
    if request.dtype.itemsize != 2 and request.ablation not in (None, "opt6", *COLUMNS):
        name = str(request.dtype).removeprefix("torch.")
        found.append(f"has no {request.ablation} in {name}")
    if request.dtype is not FP8:
        return found
    if BCSR.pack(request.csr, request.permutation.perm, block=BLOCK).bitmaps is not None:
        found.append(f"takes float8_e4m3fn only where blocks of {BLOCK}x{BLOCK} are full")
    return found


class BCSRSystem(System):
    """Tensor Cores on dense blocks."""

    name = "bcsr"
    summary = "AsyncSparse: dense 64x64 blocks on WGMMA, TF32, 16 or 8 bits, sums in order"
    devices = DEVICES
    dtypes = tuple(ELEMENTS)
    deterministic = True
    architectures = "sm_90a"
    rounds_to_tf32 = True
    kernels = (
        "spmm_bcsr", "linear_few", "linear_blocks", "tf32_operand", "spmm_csr", "repair_strided",
    )  # fmt: skip
    ablations = (*LADDER, *COLUMNS)

    def further_reasons(self, request: Request) -> list[str]:
        found = [*entry_reasons(request), *tf32_reasons(request), *hopper_reasons(request)]
        if found or request.device.type != "cuda" or request.dtype not in self.dtypes:
            return found
        found += _type_reasons(request)
        limit = int(MEMORY_SHARE * torch.cuda.mem_get_info(request.device)[0])
        order, item = request.permutation.perm, request.dtype.itemsize
        needed = _block_bytes(request.csr, order, item, limit)
        if needed > limit:
            found.append(
                f"would store blocks of {needed / 2**30:.1f} GiB, over {limit / 2**30:.1f} GiB"
            )
        return found

    def predict(self, request: Request) -> float:
        return predict_bcsr(request)

    def build(self, request: Request) -> BuiltSystem:
        csr, timer = request.csr, BuildTimer(request)
        blocks = BCSR.pack(csr, request.permutation.perm, block=BLOCK)
        timer("format")
        work = LongestFirst.make(blocks.units().near()).to(request.csr.indptr.device)
        tensors = {
            "work": work.items, "block_row_ptr": blocks.block_row_ptr,
            "block_col_idx": blocks.block_col_idx, "order": order_tensor(blocks.order, csr),
            "places": blocks.places, "indptr": csr.indptr,
        }  # fmt: skip
        choices = {
            "format": f"BCSR, {blocks.block_count} blocks of {BLOCK}x{BLOCK}, "
            f"{100 * blocks.fill:.1f} % of their cells hold entries, "
            f"{blocks.value_bytes(request.dtype)} bytes",
            "schedule": f"{blocks.block_row_count} block rows, longest first, "
            f"at most {work.longest} blocks",
        }
        exact = None
        if blocks.bitmaps is not None:
            exact = exact_system("cuda").build(request.changed(ablation=None))
            tensors |= prefixed("exact", exact.tensors)
            choices["repair"] = (
                "elements that are not finite, by csr; of strided operands one by one"
            )
        timer("schedule")
        columns = COLUMNS.get(request.ablation or "")
        return self.built(
            request, tensors, choices, timer.seconds, blocks=blocks.block_count,
            exact=None if exact is None else exact.recipe,
            step=LADDER.get(request.ablation or "", PRODUCT), columns=columns,
        )  # fmt: skip

    def make_runner(self, meta: Mapping[str, Any]) -> BCSRRunner:
        exact = meta["exact"]
        return BCSRRunner(meta, None if exact is None else exact_runner(str(exact), self.name))


SYSTEM = BCSRSystem()
