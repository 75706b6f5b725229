"""``brp``: BRP-SpMM, groups of tiles with the same number of entries, and other entries.

Parts: BRP (formats/brp.py) with f entries in each tile column and groups of g tiles; an adaptive
choice of f, of g and of the windows that keep their groups (cost.py); the hybrid kernel of ``rsh``
with slots in place of fragments (kernels/cuda/windows/spmm_brp.cu). A window adds its groups and
its entries outside groups in a fixed order and owns its rows of C: deterministic. If no window
keeps its groups, as on all matrices that were measured, the product is that of ``csr``
(docs/explanation/notes/brp.md).

``ablation``: ``1x4`` and the like are f x g in every window that has a group and not too many
entries outside; the paper has ``1x4``. ``mixed`` takes the adaptive choice even if CUDA cores alone
are predicted faster. ``atomic`` is ``1x4`` with the paper's write-back: a warp takes one group and
adds it to C by atomics, so that bits vary and ``deterministic=True`` rejects it. ``direct`` loads B
straight into registers, as the paper does, in float32 with f = 1 and g = 4. Plans choose neither:
both are slower than ``csr`` on every measured matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.balance import SegmentSchedule, WindowSchedule
from sparsetile.engines.request import BuildTimer, BuiltSystem, Request
from sparsetile.engines.rows.cost import predict_rows
from sparsetile.engines.rows.lengths import schedule_sizes, segment_length
from sparsetile.engines.tiles.hybrid_cost import long_windows, predict_hybrid, run_steps
from sparsetile.formats.units import Units
from sparsetile.kernels.brp import DIRECT_TILES
from sparsetile.kernels.rstile import ELEMENTS
from sparsetile.systems.brp.cost import (
    CHOICES,
    DIRECT_CUT,
    DIRECT_RUN,
    DIRECT_SHARED,
    best_groups,
    bound,
    every_group,
    predict_brp,
)
from sparsetile.systems.brp.runner import BRPRunner
from sparsetile.systems.brp.windows import windows_of
from sparsetile.systems.hybrid import HybridSystem

__all__ = ["SYSTEM", "BRPSystem"]

MIXED, ATOMIC, DIRECT = "mixed", "atomic", "direct"
PAPER = CHOICES[0]


def _name(fixed: int, group: int) -> str:
    return f"{fixed}x{group}"


def _schedule(request: Request, units: Units, group: int, direct: bool) -> WindowSchedule:
    """Return the items of windows: one per group if they are added by atomics."""
    if request.ablation == ATOMIC:
        made = WindowSchedule.make(units, step=2, limit=group, run=group)
    elif direct:
        made = WindowSchedule.make(
            units, step=DIRECT_TILES, limit=DIRECT_CUT, shared=DIRECT_SHARED, run=DIRECT_RUN
        )
    else:
        shared, limit = long_windows(request)
        made = WindowSchedule.make(
            units, step=2, limit=limit, shared=shared, run=run_steps(request)
        )
    return made.to(request.csr.indptr.device)


class BRPSystem(HybridSystem[tuple[int, int, Tensor]]):
    """Tensor Cores on groups of columns with equally many entries, CUDA cores on the rest."""

    name = "brp"
    summary = "BRP-SpMM: equal groups on Tensor Cores, other entries on CUDA cores, for narrow B"
    dtypes = tuple(ELEMENTS)
    kernels = ("spmm_brp", "spmm_csr")
    ablations = (MIXED, *(_name(*choice) for choice in CHOICES), DIRECT, ATOMIC)
    # Small matrices would only use rows.
    contract_ablations = (MIXED, "1x4", "2x2", "8x2", DIRECT, ATOMIC)
    varying = (ATOMIC,)
    runner = BRPRunner

    def predict(self, request: Request) -> float:
        # Entries are not sorted for a system whose bound is above rsh's prediction.
        if bound(request) >= predict_hybrid(request):
            return predict_rows(request)
        return predict_brp(request)[1]

    def split(self, request: Request) -> tuple[int, int, Tensor] | None:
        """Return f, g and the windows that keep their groups."""
        kind = request.ablation
        if kind is None or kind == MIXED:
            split = predict_brp(request)[0] if kind is None else best_groups(request)
            return None if split is None else (split.fixed, split.group, split.kept)
        fixed, group = (
            PAPER if kind in (ATOMIC, DIRECT) else (int(part) for part in kind.split("x"))
        )
        return fixed, group, every_group(request, fixed, group)

    def build_split(self, request: Request, split: tuple[int, int, Tensor]) -> BuiltSystem | None:
        (fixed, group, kept), csr, timer = split, request.csr, BuildTimer(request)
        packed = windows_of(request).pack(fixed, group, kept)
        if packed is None:
            return None
        tiles, units = packed.arrays, packed.others
        timer("format")
        atomic = request.ablation == ATOMIC
        direct = request.ablation == DIRECT and request.dtype is torch.float32
        windows = _schedule(request, packed.units, group, direct)
        rows = SegmentSchedule.make(units, max_length=segment_length(units, request.row_bytes))
        rows = rows.to(request.csr.indptr.device)
        tensors = {
            **tiles.tensors(),
            "order": tiles.rows,
            "indptr": csr.indptr,
            "columns": csr.indices,
            **{
                f"window_{name}": tensor
                for name, tensor in windows.tensors().items()
                if name != "offsets"
            },
            **rows.tensors(),
        }
        grouped = tiles.slot_entries.numel()
        choices = {
            "format": f"BRP, f = {fixed}, g = {group}: {tiles.window_count} windows, "
            f"{tiles.tile_count // group} groups",
            "split": f"{100 * grouped / csr.nnz:.1f} % of the entries in groups, "
            f"{100 * tiles.rest_entries.numel() / csr.nnz:.1f} % beside them, "
            f"{tiles.other_rows.numel()} of {csr.shape[0]} rows on CUDA cores",
            "schedule": f"{windows.item_count} items of windows, {windows.shared_count} of them "
            f"shared by the warps of a block, {0 if atomic else windows.slot_count} partial sums; "
            f"{rows.item_count} items of rows, {rows.slot_count} partial sums",
        }
        if atomic:
            choices["write-back"] = "a warp a group, added to C by atomics"
        if direct:
            choices["loads"] = "groups straight into registers"
        timer("schedule")
        return self.built(
            request, tensors, choices, timer.seconds, fixed=fixed, positions=tiles.rows.numel(),
            tiles=tiles.tile_count, items=windows.item_count, shared=windows.shared_count,
            slots=0 if atomic else windows.slot_count, nodes=0 if atomic else windows.node_count,
            atomic=atomic, direct=direct, residual=schedule_sizes(rows),
        )  # fmt: skip


SYSTEM = BRPSystem()
