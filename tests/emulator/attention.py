"""What tests of graph attention on the host share: patterns, and the plan that a GPU would have."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import H200
from sparsetile.plan.flat import Direction, flatten
from sparsetile.reorder import Permutation
from sparsetile.reorder.permutation import positions
from sparsetile.systems import SYSTEMS
from sparsetile.systems.base import Request

__all__ = ["direction", "flat_plan", "pattern"]


def pattern(lengths: list[int], cols: int, seed: int = 0) -> st.CSR:
    """Rows of the given lengths, columns drawn."""
    generator = np.random.default_rng(seed)
    columns = [np.sort(generator.choice(cols, each, replace=False)) for each in lengths]
    indptr = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    indices = torch.from_numpy(np.concatenate([*columns, np.empty(0)])).to(torch.int32)
    return st.CSR(indptr, indices, None, (len(lengths), cols))


def direction(csr: st.CSR) -> Direction:
    """Half of a flat plan."""
    request = Request(csr, 32, torch.float32, Permutation("identity", None), ceilings=H200)
    built = SYSTEMS["csr"].build(request)
    return Direction(csr.indptr, built, built)


def flat_plan(csr: st.CSR) -> tuple[list[Tensor], str]:
    """The flat plan that a GPU would have, with its transpose."""
    order = csr.transpose_order()
    transposed = direction(csr.transposed(order))
    return flatten(direction(csr), transposed, order, positions(order))
