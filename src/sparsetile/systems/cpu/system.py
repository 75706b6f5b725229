"""``cpu``: numba kernels on the host, for machines without a GPU, with the same API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsetile.balance import RowChunks
from sparsetile.engines.pieces import PieceRunner, build_pieces, in_pieces
from sparsetile.engines.request import BuildTimer, BuiltSystem, EngineBuild, Request
from sparsetile.engines.runner import ExactRunner
from sparsetile.formats.units import row_units
from sparsetile.intake.csr import VALUE_DTYPES
from sparsetile.systems.base import System
from sparsetile.systems.cpu import DEVICES, EXACT_ON
from sparsetile.systems.cpu.cost import predict_cpu
from sparsetile.systems.cpu.runner import CPURunner

__all__ = ["SYSTEM", "CPUSystem"]

# Chunks of rows: many more than cores, to balance slow chunks.
CHUNKS = 64


class CPUSystem(System):
    """numba on the host's cores, deterministic for any number of threads."""

    name = "cpu"
    summary = "numba on the host's cores"
    devices = DEVICES
    dtypes = VALUE_DTYPES
    deterministic = True
    exact_on = EXACT_ON

    def predict(self, request: Request) -> float:
        return predict_cpu(request)

    def build(self, request: Request) -> BuiltSystem:
        made = build_pieces(request, _chunks) if in_pieces(request) else _chunks(request)
        return self.built_by(request, made)

    def make_runner(self, meta: Mapping[str, Any]) -> ExactRunner:
        return PieceRunner(meta, CPURunner) if "pieces" in meta else CPURunner(meta)


def _chunks(request: Request) -> EngineBuild:
    csr, timer = request.csr, BuildTimer(request)
    schedule = RowChunks.make(row_units(csr), chunks=CHUNKS)
    timer("schedule")
    choices = {
        "format": "rows",
        "schedule": f"{schedule.item_count} chunks of rows of equal cost",
    }
    tensors = {"indptr": csr.indptr, "columns": csr.indices, **schedule.tensors()}
    return EngineBuild(tensors, choices, timer.seconds, {})


SYSTEM = CPUSystem()
