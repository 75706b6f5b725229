"""``acc``: Acc-SpMM, condensed 8x8 tiles with bitmaps on tensor cores.

Parts: BitTCF (formats/bittcf.py), windows balanced by IBD and Equation 4 (balance/windows.py), the
pipelined kernel with swapped operands (kernels/cuda/windows/spmm_bittcf.cu), and, when asked for,
the data-affinity row order (``reorder="affinity"``). Deterministic: cut windows are added in a
fixed order. docs/explanation/notes/acc.md explains the decisions.

``ablation`` names the last enabled part of the paper's ladder: ``bittcf`` (only the format),
``reorder`` (the same kernel; the order is the plan's ``reorder``), ``cache``, ``dtc-pipeline``
(DTC-SpMM's, the baseline of ours), ``pipeline``; everything, balance included, when None.
``no-balance``, ``no-stack`` and ``no-pipeline`` disable one part of the whole instead;
``ibd-gate`` balances only if the paper does; ``stacked`` always takes windows of sixteen rows.
"""

from __future__ import annotations

from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.engines.tiles.short import EVERYTHING, Parts, build_short_windows
from sparsetile.engines.tiles.short_cost import predict_short_windows
from sparsetile.engines.tiles.short_runner import ShortWindowRunner
from sparsetile.kernels.bittcf import ELEMENTS
from sparsetile.systems.tiles import TileSystem

__all__ = ["SYSTEM", "AccSystem"]

# The ablation that always stacks tiles; small matrices would not be stacked otherwise.
STACKED = "stacked"
_FORMAT = Parts(cached=False, pipelined=False, balanced=False, stacked=False)
# The steps of the ladder, each with all before it. The paper has windows of eight rows.
LADDER = {
    "bittcf": _FORMAT,
    "reorder": _FORMAT,
    "cache": Parts(pipelined=False, balanced=False, stacked=False),
    "dtc-pipeline": Parts(pipelined=False, balanced=False, stacked=False, ahead=True),
    "pipeline": Parts(balanced=False, stacked=False),
}
# Everything but one part. Kernels without the pipeline exist only for windows of eight rows, so
# ``no-pipeline`` is compared with ``no-stack``. None has the pipeline without the cache policy: the
# gain of that policy is only a step of the ladder.
ALONE = {
    "no-balance": Parts(balanced=False),
    "no-stack": Parts(stacked=False),
    "no-pipeline": Parts(pipelined=False, stacked=False),
    "ibd-gate": Parts(gated=True),
    STACKED: Parts(stacked=True),
}
ABLATIONS = {**LADDER, **ALONE}


class AccSystem(TileSystem):
    """Tensor Cores on BitTCF tiles."""

    name = "acc"
    summary = "Acc-SpMM: 8x8 bitmap tiles on Tensor Cores, TF32 or 16-bit, sums in a fixed order"
    dtypes = tuple(ELEMENTS)
    kernels = ("spmm_bittcf",)
    ablations = tuple(ABLATIONS)
    contract_ablations = (None, STACKED)
    runner = ShortWindowRunner

    def predict(self, request: Request) -> float:
        return predict_short_windows(request)

    def build(self, request: Request) -> BuiltSystem:
        made = build_short_windows(request, ABLATIONS.get(request.ablation or "", EVERYTHING))
        return self.built_by(request, made)


SYSTEM = AccSystem()
