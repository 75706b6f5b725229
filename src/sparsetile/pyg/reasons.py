"""Why PyG computes a call: texts of :func:`sparsetile.pyg.report` that several functions give."""

from __future__ import annotations

import torch

__all__ = [
    "ARGUMENTS", "AUTOCAST", "DECOMPOSED", "DEVICES", "EXPLAINED", "HOOKED", "MATRIX", "MESSAGES",
    "NOT_EDGES", "OTHER_REDUCE", "POSITIONAL", "REPLACED", "SHORT_LIVED", "SIZES", "WEIGHT_SHAPE",
    "first_sentence", "traced",
]  # fmt: skip

ARGUMENTS = "an argument of update or message_and_aggregate was not passed to propagate"
AUTOCAST = "autocast is on"
DECOMPOSED = "decomposed_layers is more than 1"
DEVICES = "edges and features are on different devices"
EXPLAINED = "explain is on"
HOOKED = "the layer has hooks"
MATRIX = "the graph is a sparse matrix, which PyG passes to utils.spmm"
MESSAGES = "messages are not neighbours times edge_weight"
NOT_EDGES = "edge_index is not [2, E] of int64 or int32"
OTHER_REDUCE = "the reduction is not sum, mean, max or min"
POSITIONAL = "arguments were given by position"
REPLACED = "the layer object has methods of its own"
SHORT_LIVED = "edges are new in each step: PyG is faster on a GPU"
SIZES = "sizes of the graph and of the features differ"
WEIGHT_SHAPE = "weights are not one number for each edge"


def first_sentence(error: Exception) -> str:
    """Return what an error says is wrong, without what to do about it."""
    return str(error).partition(". ")[0]


def traced() -> str:
    """Return why a call must be PyG's inside a compiler of torch; "" outside."""
    if torch.compiler.is_compiling():
        return "inside torch.compile, counted once for each trace"
    return "inside torch.jit.trace" if torch.jit.is_tracing() else ""
