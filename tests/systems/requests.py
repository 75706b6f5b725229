"""Requests for tests of systems: small matrices, on a GPU if they are to say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparsetile import CSR
from sparsetile.reorder import Permutation
from sparsetile.systems import Request
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
