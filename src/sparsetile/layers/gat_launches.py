"""Prepared launches of graph attention's kernels.

On small graphs host time dominates. Launches are prepared once for each kind of operand
(``LoadedKernel.prepare``) and cached by the runner (:func:`launch_of`); a call writes addresses and
the slope. In keys, ``low`` is the bitwise or of all addresses: all are as aligned as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsetile.engines.rows.runner import RowRunner
from sparsetile.jit.source import ConfigValue
from sparsetile.jit.workspace import scratch
from sparsetile.kernels import edge_attention as entry_kernels
from sparsetile.kernels import gat as kernels
from sparsetile.kernels.columns import column_grid
from sparsetile.kernels.csr import THREADS, vector_width
from sparsetile.kernels.spec import KernelSpec
from sparsetile.launch.columns import ColumnLaunch, prepare_changing
from sparsetile.launch.interface import Tensors

__all__ = ["address", "group_grid", "launch_of", "vector_at"]

# Partial results of a lane of gat_softmax: highest, total, bent.
_SOFTMAX_BYTES = 12


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


class _RowLaunch:
    """A kernel over a runner's rows, ``layers`` times, partial results of ``size`` bytes a slot."""

    def __init__(
        self, runner: RowRunner, spec: KernelSpec, config: dict[str, ConfigValue], device: int,
        lanes: int, layers: int, size: int, constants: dict[str, Any],
    ) -> None:  # fmt: skip
        work = runner.plain
        sections = work.section_params(lanes)
        every = {**sections, "slot_count": work.slots, "node_count": work.nodes, **constants}
        grid = (sections["block_end"][-1], layers, 1)
        self._launch = prepare_changing(spec, config, device, grid, THREADS, every)
        self._device = device
        self._needed = (layers * work.slots * size, layers * work.nodes) if work.slots else None
        self.parts = constants.get("parts", 1)

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


def vector_at(dtype: torch.dtype, width: int, low: int) -> int:
    """Return the elements of one vector access, which stays within a head."""
    return vector_width(dtype, width, low // dtype.itemsize)


def group_grid(count: int) -> tuple[int, int, int]:
    """Return the grid with a group of lanes for each of ``count`` (node, head)."""
    return -(-count // (kernels.TERMS_THREADS // kernels.TERMS_LANES)), 1, 1


def _gather(
    runner: RowRunner, mode: str, dtype: torch.dtype, heads: int, n: int, scaled: bool, edges: bool,
    low: int, device: int,
) -> _RowLaunch:  # fmt: skip
    """``spmm_gat``; in mode ``backward`` a head's sums come in ``parts``."""
    width = n // heads
    tile = kernels.gat_tile(dtype, n, vector_at(dtype, width, low))
    parts = kernels.gat_parts(tile, heads, width)
    constants = {"heads": heads, "width": width, "n": n, "parts": parts}
    config, size = (
        kernels.gat_config(dtype, tile, mode, scaled, edges),
        kernels.slot_bytes(tile, mode),
    )
    return _RowLaunch(
        runner, kernels.SPMM_GAT, config, device, tile.lanes, tile.slabs(n), size, constants
    )


def _softmax(runner: RowRunner, heads: int, edges: bool, device: int) -> _RowLaunch:
    config, lanes = kernels.softmax_config(heads, edges), kernels.SOFTMAX_LANES
    layers, size = -(-heads // kernels.head_lanes(heads)), lanes * _SOFTMAX_BYTES
    constants = {"heads": heads}
    return _RowLaunch(runner, kernels.GAT_SOFTMAX, config, device, lanes, layers, size, constants)


def _scores(
    runner: RowRunner, dtype: torch.dtype, heads: int, n: int, low: int, device: int
) -> Callable[..., None]:
    """Both terms of the scores for as many nodes as A has columns."""
    count, width = runner.cols * heads, n // heads
    config = kernels.scores_config(dtype, vector_at(dtype, width, low), True)
    constants = {"count": count, "heads": heads, "width": width}
    return prepare_changing(
        kernels.GAT_SCORES, config, device, group_grid(count), kernels.TERMS_THREADS, constants
    )


def _terms(
    runner: RowRunner, dtype: torch.dtype, heads: int, n: int, low: int, device: int
) -> Callable[..., None]:
    count, width = runner.rows * heads, n // heads
    config = kernels.terms_config(dtype, vector_at(dtype, width, low))
    constants = {"count": count, "width": width}
    return prepare_changing(
        kernels.GAT_TERMS, config, device, group_grid(count), kernels.TERMS_THREADS, constants
    )


def _vectors(
    runner: RowRunner, dtype: torch.dtype, heads: int, n: int, bias: bool, low: int, device: int
) -> ColumnLaunch:
    """``gat_vectors`` for as many nodes as A has rows."""
    width = n // heads
    vector = vector_at(dtype, width, low)
    grid = column_grid(runner.rows, n, vector)
    constants = {"nodes": runner.rows, "heads": heads, "width": width, "n": n}
    config = kernels.vectors_config(dtype, vector, grid.lanes, bias)
    needed = grid.scratch(vector, 3 if bias else 2)
    return ColumnLaunch(kernels.GAT_VECTORS, config, device, grid, needed, constants)


def _edge_scores(
    runner: RowRunner, mode: int, dtype: torch.dtype, heads: int, n: int, dims: int, sums: int,
    shared: bool, low: int, device: int,
) -> Callable[..., None]:  # fmt: skip
    """``edge_scores`` for all entries, whose features have ``dims`` numbers."""
    width, spec = n // heads, entry_kernels.EDGE_SCORES
    vector = vector_at(dtype, width, low)
    config = entry_kernels.scores_per_entry_config(dtype, vector, mode, bool(dims), sums)
    constants = {
        "count": runner.nnz, "heads": heads, "width": width, "n": n, "dims": dims,
        "shared": shared,
    }  # fmt: skip
    grid = entry_kernels.entry_grid(runner.nnz)
    return prepare_changing(spec, config, device, grid, entry_kernels.ENTRY_THREADS, constants)


def _edge_rows(
    runner: RowRunner, mode: int, dtype: torch.dtype, heads: int, n: int, dims: int, keep: bool,
    shared: bool, low: int, device: int,
) -> _RowLaunch:  # fmt: skip
    width = n // heads
    tile = entry_kernels.rows_tile(dtype, n, vector_at(dtype, width, low))
    config = entry_kernels.rows_config(dtype, tile, mode, bool(dims), keep)
    constants = {"heads": heads, "width": width, "n": n, "dims": dims, "shared": shared}
    return _RowLaunch(
        runner, entry_kernels.EDGE_ROWS, config, device, tile.lanes, tile.slabs(n),
        entry_kernels.rows_slot_bytes(tile, keep), constants,
    )  # fmt: skip


def _edge_columns(
    runner: RowRunner, dtype: torch.dtype, heads: int, n: int, dims: int, sums: int, low: int,
    device: int,
) -> ColumnLaunch:  # fmt: skip
    width = n // heads
    vector = vector_at(dtype, width, low)
    grid = column_grid(runner.nnz, n, vector)
    constants = {"count": runner.nnz, "heads": heads, "width": width, "n": n, "dims": dims}
    config = entry_kernels.columns_config(dtype, vector, grid.lanes, sums)
    needed = grid.scratch(vector, sums)
    return ColumnLaunch(entry_kernels.EDGE_COLUMNS, config, device, grid, needed, constants)


_MAKERS: dict[str, Callable[..., Any]] = {
    "gather": _gather, "softmax": _softmax, "scores": _scores, "terms": _terms,
    "vectors": _vectors, "edge_scores": _edge_scores, "edge_rows": _edge_rows,
    "edge_columns": _edge_columns,
}  # fmt: skip


def launch_of(runner: RowRunner, *key: Any) -> Any:
    """Return a kernel's launch for operands of one kind: its name, then its maker's arguments."""
    try:
        return runner.attention_launches[key]
    except KeyError:
        made = runner.attention_launches[key] = _MAKERS[key[0]](runner, *key[1:])
        return made
