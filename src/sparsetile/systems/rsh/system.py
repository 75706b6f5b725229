"""``rsh``: RSH-SpMM, tiles where rows share columns and CUDA cores where they do not.

Parts: RS-Tile (formats/rstile.py), whose windows of eight rows begin at any row; the row-level
partition (formats/partition.py), by cost or by the paper's thresholds; the tile kernel of ``acc``
and the row kernel of ``csr``, which write disjoint rows of C and share nothing else. Where one kind
of row is all there is, one kernel runs. Deterministic: both kernels are.

``ablation``: ``threshold`` is the paper's rule (Algorithm 1), ``tiles`` and ``rows`` give all rows
to one part, ``mixed`` takes the cheapest mixture even where one part alone is predicted faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsetile.balance import l2_reload_factor
from sparsetile.formats.partition import Partition, split_by_cost, split_by_threshold
from sparsetile.formats.rstile import RSTile
from sparsetile.kernels.bittcf import ELEMENTS
from sparsetile.kernels.csr import WIDE_SLAB_BYTES
from sparsetile.systems.acc.system import AccSystem
from sparsetile.systems.base import BuildTimer, BuiltSystem, Request, System
from sparsetile.systems.csr.system import CSRSystem
from sparsetile.systems.rsh.cost import cheapest_split, counted, predict_rsh, row_costs
from sparsetile.systems.shared.hybrid import HybridRunner, join_parts
from sparsetile.systems.shared.requirements import ampere_reasons, tile_reasons

__all__ = ["RSHSystem"]

TILES, ROWS, MIXED, THRESHOLD = "tiles", "rows", "mixed", "threshold"


def thresholds(request: Request) -> tuple[int, int]:
    """The paper's tau_nnz and tau_inc for a matrix: its useful range of tau_nnz is 0 to 6.

    Half of the mean row, at most six entries; rows that add fewer than three columns.
    """
    rows = max(request.csr.shape[0], 1)
    return min(6, round(request.csr.nnz / rows / 2)), 3


class RSHSystem(System):
    """Tensor Cores on the rows that share columns, CUDA cores on the others."""

    name = "rsh"
    summary = "RSH-SpMM: bitmap tiles and CUDA-core rows in one product, TF32 or 16-bit"
    devices = ("cuda",)
    dtypes = tuple(ELEMENTS)
    deterministic = True
    architectures = "sm_80 and newer"
    ordered = True
    rounds_to_tf32 = True
    counts_pairs = True
    kernels = ("spmm_bittcf", "spmm_csr")
    ablations = (TILES, ROWS, MIXED, THRESHOLD)
    contract_ablations = (MIXED, THRESHOLD)  # small matrices would lead it to one part

    def __init__(self) -> None:
        self._tiles, self._rows = AccSystem(), CSRSystem()

    def further_reasons(self, request: Request) -> list[str]:
        return [*tile_reasons(request), *ampere_reasons(request)]

    def predict(self, request: Request) -> float:
        return predict_rsh(request)

    def build(self, request: Request) -> BuiltSystem:
        kind, split = request.ablation, None
        if kind is None:
            found = cheapest_split(request)
            kind, split = found.kind, found.partition
        elif kind == MIXED:
            split = split_by_cost(counted(request), row_costs(request))
        elif kind == THRESHOLD:
            split = split_by_threshold(counted(request), *thresholds(request))
        plain = request.changed(ablation=None)
        if kind == TILES:
            return self._joined(request, {"tiles": self._tiles.build(plain)}, 1.0)
        if kind == ROWS or split is None:
            return self._joined(request, {"rows": self._rows.build(plain)}, 0.0)
        return self._mixed(request, plain, split)

    def _mixed(self, request: Request, plain: Request, split: Partition) -> BuiltSystem:
        csr, order, timer = request.csr, request.permutation.perm, BuildTimer(request)
        packed = RSTile.pack_split(csr, order, split)
        timer("format")
        parts = {}
        if split.windows.numel():
            rows = packed.tile_rows
            owned, _ = csr.select_rows(rows)
            slab = min(request.row_bytes, WIDE_SLAB_BYTES)
            reloads = l2_reload_factor(owned, None, slab)
            parts["tiles"] = self._tiles.build_tiles(plain, packed.tiles, rows, reloads, timer)
        if split.residual.numel():
            parts["rows"] = self._rows.build_rows(plain, packed.residual_rows)
        return self._joined(request, parts, packed.tile_share, packed.bytes)

    def _joined(
        self,
        request: Request,
        parts: dict[str, BuiltSystem],
        share: float,
        size: int | None = None,
    ) -> BuiltSystem:
        tensors, meta = join_parts(parts)
        about = f"RS-Tile, {100 * share:.1f} % of the entries in tiles"
        choices = {
            "format": about + ("" if size is None else f", {size} bytes"),
            "schedule": f"{' and '.join(parts)} write disjoint rows"
            if len(parts) > 1
            else f"{next(iter(parts), 'nothing')} alone",
        }
        for name, built in parts.items():
            choices |= {f"{name} {key}": text for key, text in built.choices.items()}
        seconds = {
            stage: sum(built.seconds[stage] for built in parts.values())
            for stage in ("format", "schedule")
        }
        return self.built(request, tensors, choices, seconds, **meta)

    def make_runner(self, meta: Mapping[str, Any]) -> HybridRunner:
        return HybridRunner(meta)
