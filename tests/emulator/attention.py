"""What tests of graph attention on the host share: patterns, and the plan that a GPU would have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import H200
from sparsetile.engines.request import Request
from sparsetile.launch import columns
from sparsetile.layers import edge_attention, gat, gat_launches, gat_layer
from sparsetile.plan.traced.flat import Direction, flatten
from sparsetile.reorder import Permutation
from sparsetile.reorder.permutation import positions
from sparsetile.systems import SYSTEMS
from tests.emulator.products import load_on_host
from tests.host import unread_scratch

__all__ = ["attention_on_host", "direction", "flat_plan", "pattern"]


def attention_on_host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Kernels of graph attention are loaded for the host, whichever module launches them."""
    modules = (gat, gat_layer, gat_launches, edge_attention, columns)
    load_on_host(monkeypatch, folder, *modules, scratch=unread_scratch)


def pattern(lengths: list[int], cols: int, seed: int = 0) -> st.CSR:
    """Rows of the given lengths, columns drawn."""
    generator = np.random.default_rng(seed)
    drawn = [np.sort(generator.choice(cols, each, replace=False)) for each in lengths]
    indptr = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    indices = torch.from_numpy(np.concatenate([*drawn, np.empty(0)])).to(torch.int32)
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
