"""Requests for tests of systems, on a GPU if they are to say so; plan files of what is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsetile import CSR, Plan, PlanFileError, load_plan
from sparsetile.engines.request import Request
from sparsetile.plan.family import Family
from sparsetile.plan.files import read_plan_file
from sparsetile.plan.variant import Variant
from sparsetile.reorder import Permutation
from sparsetile.systems.base import System
from tests.contracts.cases import csr_of, random_matrix


@dataclass(frozen=True, eq=False)
class OnGPU(Request):
    """A request that says its matrix is on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def request_for(
    usual: torch.dtype,
    /,
    kind: type[Request] = Request,
    csr: CSR | None = None,
    **changes: Any,
) -> Request:
    """Sixteen columns in the given order, of a matrix of no special form if none is given."""
    wanted = {"n": 16, "dtype": usual, "permutation": Permutation("identity", None)}
    return kind(csr or csr_of(random_matrix(150, 130, 0.2)), **{**wanted, **changes})


def check_plan_file(system: System, dtype: torch.dtype, folder: Path) -> None:
    """Keeps the matrix and the system; if that does not run, as on the CPU, loading says why."""
    csr = csr_of(random_matrix(150, 130, 0.2), dtype=dtype)
    stage, path = system.build(request_for(dtype, csr=csr)), folder / "a.safetensors"
    order, report = Permutation("identity", None), {"seconds": {}}
    variant = Variant(csr, 16, dtype, stage, order, deterministic=False, report=report)
    Plan(Family(variant)).save(path)
    tensors, header = read_plan_file(path)
    assert header["system"] == system.name and (header["n"], header["shape"]) == (16, [150, 130])
    kept = {"indptr": csr.indptr, "indices": csr.indices, "values": csr.values}
    assert tensors.keys() == kept.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in kept.items())
    with pytest.raises(PlanFileError, match="a plan that cannot run here: runs on cuda"):
        load_plan(path)
