"""Headers of ``rows/`` by themselves, on small whole numbers, exactly as NumPy has it."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from tests.kernels.device.primitives import cuda, needs_gpu, run
from tests.kernels.device.rows import sources


def build_tree(pieces: int, fan_in: int) -> tuple[list[int], list[list[int]], int]:
    """Parents of slots, nodes {first child, children, own slot, 0}, slots."""
    level, parents, nodes = list(range(pieces)), [-1] * pieces, []
    while True:
        above = []
        for first in range(0, len(level), fan_in):
            children = level[first : first + fan_in]
            for child in children:
                parents[child] = len(nodes)
            is_root = len(level) <= fan_in
            nodes.append([children[0], len(children), -1 if is_root else len(parents), 0])
            if is_root:
                return parents, nodes, len(parents)
            above.append(len(parents))
            parents.append(-1)
        level = above


def joined(values: np.ndarray, fan_in: int) -> np.ndarray:
    """The root's result: children in slot order, level by level."""
    while len(values) > 1:
        values = np.stack([
            functools.reduce(lambda held, other: held * np.uint32(31) + other, group)
            for group in (values[i : i + fan_in] for i in range(0, len(values), fan_in))
        ])  # fmt: skip
    return values[0]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("pieces, fan_in", [(2, 2), (5, 2), (9, 3), (64, 8), (33, 32)])
@pytest.mark.parametrize("lanes, words", sources.TREES)
def test_the_tree_joins_children_in_slot_order(lanes, words, pieces, fan_in):
    layers = 3
    parents, nodes, slots = build_tree(pieces, fan_in)
    leaves = np.random.default_rng(0).integers(
        0, 1000, (layers, pieces, lanes, words), dtype=np.uint32
    )
    expected = np.stack([joined(layer, fan_in) for layer in leaves])
    arrivals = torch.zeros(layers * len(nodes), dtype=torch.int32, device="cuda")
    partials = torch.empty(layers * slots * lanes * words, dtype=torch.int32, device="cuda")
    for _ in range(2):  # the second finds the counters as the first left them
        out = torch.zeros(layers, lanes, words, dtype=torch.int32, device="cuda")
        run(
            sources.tree(lanes, words), (pieces, layers), lanes,
            leaves=cuda(leaves.view(np.int32)), out=out,
            parent_of_slot=cuda(np.array(parents, np.int32)),
            nodes=cuda(np.array(nodes, np.int32)), arrivals=arrivals, partials=partials,
            slot_count=slots, node_count=len(nodes),
        )  # fmt: skip
        assert np.array_equal(out.cpu().numpy().view(np.uint32), expected)
        assert not arrivals.any()
