"""``csr``: CUDA cores on rows and bundles of rows (engines/rows). The baseline of other systems.

Deterministic, exact FP32 arithmetic, any shape, every dtype. docs/explanation/notes/csr.md has the
measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsetile.engines.pieces import PieceRunner, build_pieces, in_pieces
from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.engines.rows.build import build_rows
from sparsetile.engines.rows.cost import predict_rows
from sparsetile.engines.rows.runner import RowRunner
from sparsetile.engines.runner import ExactRunner
from sparsetile.kernels.csr import ELEMENTS
from sparsetile.systems.base import System
from sparsetile.systems.csr import DEVICES, EXACT_ON, QUICK_ON

__all__ = ["SYSTEM", "CSRSystem"]


class CSRSystem(System):
    """CUDA cores, deterministic, every shape and dtype."""

    name = "csr"
    summary = "CUDA cores on rows and bundles of rows, sums in a fixed order"
    devices = DEVICES
    dtypes = tuple(ELEMENTS)
    deterministic = True
    architectures = "sm_80 and newer"
    ordered = True
    exact_on = EXACT_ON
    quick_on = QUICK_ON
    kernels = (
        "spmm_csr", "sddmm_csr",
        "gat_scores", "gat_softmax", "spmm_gat", "gat_terms", "gat_vectors",
    )  # fmt: skip

    def predict(self, request: Request) -> float:
        return predict_rows(request)

    def build(self, request: Request) -> BuiltSystem:
        made = build_pieces(request, build_rows) if in_pieces(request) else build_rows(request)
        return self.built_by(request, made)

    def make_runner(self, meta: Mapping[str, Any]) -> ExactRunner:
        return PieceRunner(meta, RowRunner) if "pieces" in meta else RowRunner(meta)


SYSTEM = CSRSystem()
