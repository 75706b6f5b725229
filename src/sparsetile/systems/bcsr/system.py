"""``bcsr``: AsyncSparse's structured half, dense 64x64 blocks on WGMMA (sm_90a).

Parts: BCSR (formats/bcsr.py), block rows longest first, the warp-specialised persistent kernel
whose operands the copy engine brings (kernels/cuda/spmm_bcsr.cu). For matrices whose entries lie in
blocks, as in pruned weights: every cell of a stored block is multiplied. Where some hold no entry,
elements of C that are not finite are computed again from A's entries (``CSRRunner.repair``).
Deterministic: blocks of a row are added in order. docs/asyncsparse.md says what is decided and why.

``ablation`` names the last step of the paper's ladder that is on (kernels/bcsr.py), ``opt0`` to
``opt7``; opt4 is opt3, and opt6 is what products take. ``columns128`` and ``columns256`` are the
product with tiles of that width, whatever B has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsetile.formats import BCSR, count_blocks, pack_bcsr
from sparsetile.intake.csr import CSR
from sparsetile.kernels.bcsr import BLOCK, COLUMNS, ELEMENTS, FP8, LADDER, PRODUCT
from sparsetile.systems.base import Laps, Request, Stage, System, make_recipe
from sparsetile.systems.bcsr.runner import BCSRRunner
from sparsetile.systems.csr.runner import CSRRunner
from sparsetile.systems.csr.system import CSRSystem
from sparsetile.systems.shared.requirements import tf32_reasons

__all__ = ["BCSRSystem"]

CAPABILITY = (9, 0)
# The blocks may not take more than this share of the memory that is free.
MEMORY_SHARE = 0.25


def _block_bytes(csr: CSR, order: torch.Tensor | None, item: int, limit: int) -> int:
    """Bytes of A's blocks; counted only where the most there could be is over ``limit``."""
    rows, cols = csr.shape
    most = min(csr.nnz, -(-rows // BLOCK) * -(-cols // BLOCK)) * BLOCK**2 * item
    return most if most <= limit else count_blocks(csr, BLOCK, order) * BLOCK**2 * item


def _type_reasons(request: Request) -> list[str]:
    """The ladder is built in 16 bits, and in FP8 nothing repairs C."""
    found = []
    if request.dtype.itemsize != 2 and request.ablation not in (None, "opt6", *COLUMNS):
        name = str(request.dtype).removeprefix("torch.")
        found.append(f"has no {request.ablation} in {name}")
    if request.dtype is not FP8:
        return found
    if pack_bcsr(request.csr, BLOCK, request.permutation.perm).bitmaps is not None:
        found.append(f"takes float8_e4m3fn only where blocks of {BLOCK}x{BLOCK} are full")
    return found


def _work(blocks: BCSR) -> torch.Tensor:
    """[block rows, 4], longest first: block row, its first block, how many it has, and 0."""
    lengths = blocks.blocks_per_row().to(torch.int32)
    rows = torch.argsort(lengths, descending=True, stable=True)
    columns = (rows.to(torch.int32), blocks.block_row_ptr[rows], lengths[rows])
    return torch.stack([*columns, torch.zeros_like(columns[0])], dim=1)


class BCSRSystem(System):
    """Tensor cores on dense blocks."""

    name = "bcsr"
    summary = "AsyncSparse: dense 64x64 blocks on WGMMA, TF32, 16 or 8 bits, sums in order"
    devices = ("cuda",)
    dtypes = tuple(ELEMENTS)
    deterministic = True
    architectures = "sm_90a"
    ablations = (*LADDER, *COLUMNS)

    def __init__(self, exact: CSRSystem) -> None:
        self._exact = exact

    def further_reasons(self, request: Request) -> list[str]:
        found = [*self._exact.further_reasons(request), *tf32_reasons(request)]
        if request.device.type != "cuda":
            return found
        capability = torch.cuda.get_device_capability(request.device)
        if capability != CAPABILITY:
            found.append(
                f"needs a Hopper GPU (sm_90a), this GPU is sm_{capability[0]}{capability[1]}"
            )
        if found or request.dtype not in self.dtypes:
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

    def build(self, request: Request) -> Stage:
        csr, order, laps = request.csr, request.permutation.perm, Laps(request)
        blocks = pack_bcsr(csr, BLOCK, order)
        laps("format")
        work = _work(blocks)
        parts: tuple[torch.Tensor, ...] = (
            work, blocks.block_col_idx,
            torch.empty(0, dtype=torch.int32, device=csr.device)
            if blocks.order is None else blocks.order,
            blocks.places, csr.indptr,
        )  # fmt: skip
        exact = None if blocks.bitmaps is None else self._exact.build(request)
        recipe = make_recipe(
            self.name,
            csr,
            blocks=blocks.block_count,
            exact=None if exact is None else exact.recipe,
            step=LADDER.get(request.ablation or "", PRODUCT),
            **({"columns": COLUMNS[request.ablation]} if request.ablation in COLUMNS else {}),
        )
        longest = int(work[0, 2]) if len(work) else 0
        choices = {
            "format": f"BCSR, {blocks.block_count} blocks of {BLOCK}x{BLOCK}, "
            f"{100 * blocks.fill:.1f} % of their cells hold entries, "
            f"{blocks.value_bytes(request.dtype)} bytes",
            "schedule": f"{blocks.block_row_count} block rows, longest first, "
            f"at most {longest} blocks",
        }
        if exact is not None:
            choices["repair"] = "elements that are not finite, by csr"
        if request.ablation is not None:
            choices["ablation"] = request.ablation
        laps("schedule")
        if exact is not None:
            parts = (*parts, *exact.parts)
        return Stage(self.name, parts, recipe, choices, laps.seconds)

    def make_runner(self, meta: Mapping[str, Any]) -> BCSRRunner:
        from sparsetile.systems.registry import runner

        exact = None if meta["exact"] is None else runner(str(meta["exact"]))
        if exact is not None and not isinstance(exact, CSRRunner):
            raise TypeError(f"bcsr: exact must be a csr runner, got {type(exact).__name__}.")
        return BCSRRunner(meta, exact)
