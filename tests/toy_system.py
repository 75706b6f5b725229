"""A whole system in one file: what a newcomer writes first. Importing it registers it.

It multiplies by torch operations on the host. Nothing else in the project names it: whatever the
tests see of it came from the registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.engines.runner import Runner
from sparsetile.launch.epilogue import apply_epilogue
from sparsetile.launch.interface import PLAIN, Epilogue, Tensors
from sparsetile.systems.base import System
from sparsetile.systems.registry import register


class ToyRunner(Runner):
    """Adds up rows of B entry by entry."""

    def spmm(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        wide = torch.float64 if B.dtype is torch.float64 else torch.float32
        terms = B.to(wide).index_select(-2, tensors["columns"])
        if values is not None:
            terms = terms * values.to(wide).unsqueeze(-1)
        product = torch.zeros(out.shape, dtype=wide).index_add_(-2, tensors["row_ids"], terms)
        target = out.to(wide)
        apply_epilogue(product, target, tensors["indptr"], epilogue)
        out.copy_(target)


class ToySystem(System):
    """Slow, and predicted to be fast, so that ``auto`` takes it."""

    name = "toy"
    summary = "torch operations, entry by entry"
    devices = ("cpu",)
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    deterministic = True

    def predict(self, request: Request) -> float:
        return 1e-9

    def build(self, request: Request) -> BuiltSystem:
        csr = request.csr
        tensors = {
            "indptr": csr.indptr,
            "row_ids": csr.row_ids(),
            "columns": csr.indices.to(torch.int64),
        }
        choices = {"format": "row and column of each entry", "schedule": "none"}
        return self.built(request, tensors, choices, {"format": 0.0, "schedule": 0.0})

    def make_runner(self, meta: Mapping[str, Any]) -> ToyRunner:
        return ToyRunner(meta)


TOY = register(ToySystem())
