"""Prepared launches of graph attention's kernels.

On small graphs host time dominates. Launches are prepared once for each kind of operand
(``LoadedKernel.prepare``) and cached by the runner; a call writes addresses and the slope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsetile.engines.rows.runner import RowRunner
from sparsetile.jit.source import ConfigValue
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.columns import column_grid
from sparsetile.kernels.csr import THREADS, vector_width
from sparsetile.kernels.gat import (
    GAT_SCORES,
    GAT_SOFTMAX,
    GAT_TERMS,
    GAT_VECTORS,
    SOFTMAX_LANES,
    SPMM_GAT,
    TERMS_LANES,
    TERMS_THREADS,
    gat_config,
    gat_parts,
    gat_tile,
    head_lanes,
    scores_config,
    slot_bytes,
    softmax_config,
    terms_config,
    vectors_config,
)
from sparsetile.kernels.spec import KernelSpec
from sparsetile.launch.columns import ColumnLaunch, prepare_changing
from sparsetile.launch.interface import Tensors

__all__ = [
    "address",
    "gather_launch",
    "group_grid",
    "scores_launch",
    "softmax_launch",
    "terms_launch",
    "vector_at",
    "vectors_launch",
]

# Partial results of a lane of gat_softmax: highest, total, bent.
_SOFTMAX_BYTES = 12


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


class _RowLaunch:
    """A kernel over a runner's rows, ``layers`` times, partial results of ``size`` bytes a slot."""

    def __init__(
        self,
        runner: RowRunner,
        spec: KernelSpec,
        config: dict[str, ConfigValue],
        device: int,
        lanes: int,
        layers: int,
        size: int,
        constants: dict[str, Any],
    ) -> None:
        work = runner.plain
        sections = work.section_params(lanes)
        every = {**sections, "slot_count": work.slots, "node_count": work.nodes, **constants}
        grid = (sections["block_end"][-1], layers, 1)
        self._launch = prepare_changing(spec, config, device, grid, THREADS, every)
        self._device = device
        self._needed = (layers * work.slots * size, layers * work.nodes) if work.slots else None

    def __call__(self, stream: int, tensors: Tensors, slope: float, *values: int) -> None:
        """Launch with the addresses between ``columns`` and ``slope`` of the parameters."""
        partials = arrivals = 0
        if self._needed is not None:
            memory, counters = scratch(self._device, stream, *self._needed)
            partials, arrivals = memory.data_ptr(), counters.data_ptr()
        self._launch(
            stream, tensors["items"].data_ptr(), tensors["columns"].data_ptr(), *values, slope,
            tensors["parent_of_slot"].data_ptr(), tensors["nodes"].data_ptr(), arrivals, partials,
        )  # fmt: skip


class _Gather(_RowLaunch):
    """``spmm_gat`` in one mode, for rows of ``n`` columns at addresses that end like ``low``."""

    def __init__(
        self,
        runner: RowRunner,
        mode: str,
        dtype: torch.dtype,
        heads: int,
        n: int,
        scaled: bool,
        low: int,
        device: int,
    ) -> None:
        width = n // heads
        tile = gat_tile(dtype, n, vector_at(dtype, width, low))
        self.parts = gat_parts(tile, heads, width)
        constants = {"heads": heads, "width": width, "n": n, "parts": self.parts}
        config, size = gat_config(dtype, tile, mode, scaled), slot_bytes(tile, mode)
        super().__init__(
            runner, SPMM_GAT, config, device, tile.lanes, tile.slabs(n), size, constants
        )


def vector_at(dtype: torch.dtype, width: int, low: int) -> int:
    """Return the elements of one vector access, which stays within a head.

    ``low`` is the bitwise or of all addresses, so all are at least as aligned as it is.
    """
    return vector_width(dtype, width, low // dtype.itemsize)


def gather_launch(runner: RowRunner, *key: Any) -> _Gather:
    try:
        found: _Gather = runner.attention_launches[key]
    except KeyError:
        found = runner.attention_launches[key] = _Gather(runner, *key)
    return found


def softmax_launch(runner: RowRunner, heads: int, device: int) -> _RowLaunch:
    key = ("softmax", heads, device)
    found: _RowLaunch | None = runner.attention_launches.get(key)
    if found is None:
        layers, size = -(-heads // head_lanes(heads)), SOFTMAX_LANES * _SOFTMAX_BYTES
        found = runner.attention_launches[key] = _RowLaunch(
            runner, GAT_SOFTMAX, softmax_config(heads), device, SOFTMAX_LANES, layers, size,
            {"heads": heads},
        )  # fmt: skip
    return found


def group_grid(count: int) -> tuple[int, int, int]:
    """Return the grid with a group of lanes for each of ``count`` (node, head)."""
    return -(-count // (TERMS_THREADS // TERMS_LANES)), 1, 1


def scores_launch(
    runner: RowRunner, dtype: torch.dtype, heads: int, n: int, low: int, device: int
) -> Callable[..., None]:
    """Return the launch of both terms of the scores for as many nodes as A has columns."""
    key = ("scores", dtype, heads, n, low, device)
    found: Callable[..., None] | None = runner.attention_launches.get(key)
    if found is None:
        count, width = runner.cols * heads, n // heads
        found = runner.attention_launches[key] = prepare_changing(
            GAT_SCORES, scores_config(dtype, vector_at(dtype, width, low), True), device,
            group_grid(count), TERMS_THREADS, {"count": count, "heads": heads, "width": width},
        )  # fmt: skip
    return found


def terms_launch(
    runner: RowRunner, dtype: torch.dtype, heads: int, n: int, low: int, device: int
) -> Callable[..., None]:
    key = ("terms", dtype, heads, n, low, device)
    found: Callable[..., None] | None = runner.attention_launches.get(key)
    if found is None:
        count, width = runner.rows * heads, n // heads
        found = runner.attention_launches[key] = prepare_changing(
            GAT_TERMS, terms_config(dtype, vector_at(dtype, width, low)), device,
            group_grid(count), TERMS_THREADS, {"count": count, "width": width},
        )  # fmt: skip
    return found


class _Vectors(ColumnLaunch):
    """``gat_vectors`` for as many nodes as A has rows."""

    def __init__(
        self,
        runner: RowRunner,
        dtype: torch.dtype,
        heads: int,
        n: int,
        bias: bool,
        low: int,
        device: int,
    ) -> None:
        width = n // heads
        vector = vector_at(dtype, width, low)
        grid = column_grid(runner.rows, n, vector)
        constants = {"nodes": runner.rows, "heads": heads, "width": width, "n": n}
        config = vectors_config(dtype, vector, grid.lanes, bias)
        needed = grid.scratch(vector, 3 if bias else 2)
        super().__init__(GAT_VECTORS, config, device, grid, needed, constants)


def vectors_launch(runner: RowRunner, *key: Any) -> _Vectors:
    try:
        found: _Vectors = runner.attention_launches["vectors", *key]
    except KeyError:
        found = runner.attention_launches["vectors", *key] = _Vectors(runner, *key)
    return found
