"""Features of one set of nodes, or of sources and targets separately."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsetile.core.errors import type_error, value_error

__all__ = ["pair_of"]


def pair_of(
    layer: str, x: Any, size: tuple[int, int] | None, flow: str
) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
    """Return the features of sources and of targets, and how many there are of each.

    Parameters
    ----------
    x : Tensor, or (Tensor, Tensor or None)
    size : (sources, targets), optional
        Checked against x. Required if the features of the targets are None.
    """
    if isinstance(x, Tensor):
        if size is None:
            nodes = _nodes(x) or 0
            return x, x, (nodes, nodes)
        sources, targets = x, x
    elif isinstance(x, (tuple, list)) and len(x) == 2 and isinstance(x[0], Tensor):
        if flow != "source_to_target":
            raise value_error(
                layer, "flow", "'source_to_target' with a pair of features", repr(flow),
                "Swap the rows of edge_index with .flip(0)",
            )  # fmt: skip
        sources, targets = x
    else:
        raise type_error(
            layer, "x", "a tensor, or a pair (sources, targets)", type(x).__name__,
            "Pass x, or (x_sources, x_targets)",
        )  # fmt: skip
    if targets is None and size is None:
        raise value_error(
            layer, "size", "given if the targets have no features", "None",
            "Pass size=(sources, targets)",
        )  # fmt: skip
    counts = _nodes(sources), None if targets is None else _nodes(targets)
    if size is None:
        return sources, targets, (counts[0] or 0, counts[1] or 0)
    if len(size) != 2 or any(
        have is not None and have != want for have, want in zip(counts, size, strict=True)
    ):
        raise value_error(
            layer, "size", f"{counts}, the nodes of x", size, "Omit size=, or correct it"
        )
    return sources, targets, (size[0] or 0, size[1] or 0)


def _nodes(x: Tensor) -> int | None:
    """Rows of features; None if x has none."""
    return x.shape[-2] if x.dim() > 1 else None
