"""``cpu``: numba kernels on the host, for machines without a GPU, with the same API."""

from __future__ import annotations

from sparsetile.balance import RowChunks
from sparsetile.engines.request import BuildTimer, BuiltSystem, Request
from sparsetile.formats import Rows
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
    runner = CPURunner

    def predict(self, request: Request) -> float:
        return predict_cpu(request)

    def build(self, request: Request) -> BuiltSystem:
        timer = BuildTimer(request)
        rows = Rows.pack(request.csr)
        schedule = RowChunks.make(rows.units(), chunks=CHUNKS)
        timer("schedule")
        choices = {
            "format": "rows",
            "schedule": f"{schedule.item_count} chunks of rows of equal cost",
        }
        tensors = {**rows.tensors(), **schedule.tensors()}
        return self.built(request, tensors, choices, timer.seconds)


SYSTEM = CPUSystem()
