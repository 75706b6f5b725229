"""Edges of short-lived graphs are sorted on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.test_transpose_block import COLUMNS, EDGES, KINDS, assert_sorted, columns_of


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("kind", KINDS)
def test_edges_are_sorted_as_torch_sorts_them(kind: str):
    for edges in (1, 31, 32, 33, 1025, EDGES - 1, EDGES):
        for count in (1, 256, 257, COLUMNS):
            assert_sorted(columns_of(kind, edges, count).cuda(), count)
