"""Products of rows that were grouped on the GPU (``launch.grouping``), by the kernels of ``csr``.

The schedule's sizes are rounded, so launches are prepared for graphs like each other: a call writes
addresses. Sums may have a bias; a maximum or minimum keeps its winners' places, from which
``spmm_won`` collects the gradient by rows of the transpose.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.device import machine
from sparsetile.engines.rows.work import Launch, Work
from sparsetile.jit.loader import (
    current_stream_handle,
    device_index,
    ensure_cuda_context,
    on_device,
)
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.csr import (
    PLACES,
    SPMM_CSR,
    THREADS,
    RowShape,
    choose_tile,
    spmm_config,
    vector_width,
)
from sparsetile.kernels.grouping import Lists
from sparsetile.kernels.won import SPMM_WON, won_config, won_lanes, won_vector
from sparsetile.launch.columns import prepare_changing
from sparsetile.launch.geometry import (
    ACCESS_BYTES,
    MAX_ROW_BYTES,
    MAX_SCRATCH,
    reachable,
    stride_params,
)
from sparsetile.launch.grouping import GroupedRows
from sparsetile.launch.kept import KeptLaunches

__all__ = ["extremum", "flat_rows", "place_type", "product", "takes_width", "won"]

# Mean entries of a row from which a whole warp should work on one.
_LONG_MEAN = 20.0


class _Prepared:
    """A launch over a schedule and the scratch memory that it needs."""

    def __init__(self, launch: Callable[..., None], device: int, needed: tuple[int, int]) -> None:
        self._launch, self._device, self._needed = launch, device, needed

    def __call__(
        self, rows: GroupedRows, before: tuple[int, ...], after: tuple[float, ...] = ()
    ) -> None:
        """Launch with the addresses before and after those of the trees."""
        device = self._device
        stream = current_stream_handle(device)
        memory, counters = scratch(device, stream, *self._needed)
        at, places = rows.at, rows.places
        self._launch(
            stream, at, at + 4 * places.columns, *before, at + 4 * places.parents,
            at + 4 * places.nodes, counters.data_ptr(), memory.data_ptr(), *after,
        )  # fmt: skip


_launches = KeptLaunches[tuple[Any, ...], _Prepared]()


def _work(lists: Lists) -> Work:
    """Return the schedule's sizes: pieces of long rows have a warp each."""
    return Work("", (0, 0, lists.wide, 0, lists.rows), 2 * lists.wide, lists.wide, False)


def takes_width(rows: GroupedRows, n: int) -> bool:
    """Whether the scratch memory for so many columns is within its bounds."""
    return n > 0 and 2 * rows.lists.wide * n * 8 <= MAX_SCRATCH


def place_type(rows: GroupedRows) -> torch.dtype:
    """Return the type of winners' places; nobody knows how long the longest row is."""
    return torch.int16 if rows.entries <= torch.iinfo(torch.int16).max else torch.int32


def _prepare(
    rows: GroupedRows, mode: str, dtype: torch.dtype, n: int, stride: int, vector: int,
    weighted: bool, mean: bool, bias: bool, device: int,
) -> _Prepared:  # fmt: skip
    """Return a launch of ``spmm_csr``."""
    lists, work = rows.lists, _work(rows.lists)
    facts = machine(torch.device("cuda", device))
    # As far as sizes of the schedule tell, which are rounded.
    average = lists.wide * lists.segment / 2 / lists.rows
    shape = RowShape(
        rows=lists.rows, mean=average, long_share=1.0 if average >= _LONG_MEAN else 0.5
    )
    kept = mode.startswith("arg")
    tile = choose_tile(dtype, n, vector, shape, args=kept, plain_sum=mode == "sum")
    config = spmm_config(
        dtype, tile, weighted, extremum=mode != "sum",
        args=PLACES[place_type(rows)] if kept else 0,
    )  # fmt: skip
    kernel = SPMM_CSR.load(config, device)
    launch = Launch.of(kernel, work, tile, n, shape, facts.processors)
    constants = {
        **work.section_params(tile.lanes),
        **stride_params((stride * dtype.itemsize, n, 0, 0)),
        "epilogue": mean or bias, "mean": mean, "relu": 0, "minimum": mode.endswith("min"),
        "slot_count": work.slots, "node_count": work.nodes, "n": n, "slabs": launch.slabs,
        "slab_fast": launch.slab_fast, "early": 0,
    }  # fmt: skip
    needed = launch.slabs * work.slots * launch.partial_bytes(dtype, kept)
    made = prepare_changing(SPMM_CSR, config, device, launch.grid(1), THREADS, constants)
    return _Prepared(made, device, (needed, launch.slabs * work.nodes))


def _operand(x: Tensor) -> Tensor:
    """Return a matrix that kernels can read."""
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    # The dispatcher takes longer than these questions.
    if x.is_neg():
        x = x.resolve_neg()
    return x if x.stride(0) * x.element_size() <= MAX_ROW_BYTES else reachable(x)


def _run(
    rows: GroupedRows, mode: str, values: Tensor | None, x: Tensor, mean: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    x = _operand(x)
    n, stride, dtype, at = x.shape[1], x.stride(0), x.dtype, x.data_ptr()
    out = x.new_empty(rows.shape[0], n)
    kept = mode.startswith("arg")
    places = x.new_empty(rows.shape[0], n, dtype=place_type(rows)) if kept else None
    if bias is not None and (bias.dtype is not torch.float32 or not bias.is_contiguous()):
        bias = bias.float().contiguous()
    if not rows.shape[0]:
        return out, places
    size = x.element_size()
    if (at | stride * size | n * size) % ACCESS_BYTES:
        vector = vector_width(dtype, n, stride, at // size)
    else:
        vector = ACCESS_BYTES // size
    device = device_index(x.device)
    weighted, biased = values is not None, bias is not None
    kind = (mode, dtype, n, stride, vector, weighted, mean, biased, device)
    key = (rows.lists, place_type(rows), *kind)
    with on_device(device):
        ensure_cuda_context(device)
        launch = _launches.get(key)
        if launch is None:
            launch = _launches.keep(key, _prepare(rows, *kind))
        launch(
            rows,
            (
                0 if values is None else values.data_ptr(), 0, at, out.data_ptr(), 0, 0, 0,
                0 if places is None else places.data_ptr(),
            ),
            (rows.indptr_at, 0 if bias is None else bias.data_ptr(), 1.0, 0.0),
        )  # fmt: skip
    return out, places


def product(
    rows: GroupedRows, values: Tensor | None, x: Tensor, *, mean: bool = False,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return A·x + bias, or the mean of each row's products plus bias; values are 1 if None."""
    return _run(rows, "sum", values, x, mean, bias)[0]


def extremum(
    rows: GroupedRows, x: Tensor, reduce: str, winners: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the max or min of each row, and the winners' places in their rows if asked for."""
    return _run(rows, f"arg{reduce}" if winners else reduce, None, x)


def won(transposed: GroupedRows, grad: Tensor, places: Tensor) -> Tensor:
    """Return the gradient of an extremum's operand, collected by rows of the transpose."""
    grad = grad.resolve_neg().contiguous()
    if grad.data_ptr() % ACCESS_BYTES:
        grad = grad.clone()
    n, dtype, device = grad.shape[1], grad.dtype, device_index(grad.device)
    out = grad.new_empty(transposed.shape[0], n)
    if not transposed.shape[0]:
        return out
    key = (transposed.lists, places.dtype, "won", dtype, n, device)
    with on_device(device):
        ensure_cuda_context(device)
        launch = _launches.get(key)
        if launch is None:
            launch = _launches.keep(key, _prepare_won(transposed, places.dtype, dtype, n, device))
        launch(
            transposed,
            (
                transposed.at + 4 * transposed.places.order, transposed.transposed.indptr_at, 0,
                grad.data_ptr(), places.data_ptr(), out.data_ptr(),
            ),
        )  # fmt: skip
    return out


def _prepare_won(
    rows: GroupedRows, places: torch.dtype, dtype: torch.dtype, n: int, device: int
) -> _Prepared:
    work, vector = _work(rows.lists), won_vector(dtype, places, n)
    lanes = won_lanes(n, vector)
    slabs = -(-n // (vector * lanes))
    sections = work.section_params(lanes)
    constants = {
        **sections, "n": n, "grad_batch_stride": 0, "out_batch_stride": 0,
        "slot_count": work.slots, "node_count": work.nodes,
    }  # fmt: skip
    grid = (sections["block_end"][-1], slabs, 1)
    config = won_config(dtype, places, vector, lanes)
    made = prepare_changing(SPMM_WON, config, device, grid, THREADS, constants)
    return _Prepared(made, device, (slabs * work.slots * lanes * vector * 4, slabs * work.nodes))


@functools.lru_cache(maxsize=256)
def _recipe(shape: tuple[int, int], entries: int, lists: Lists, names: tuple[str, ...]) -> str:
    """Return the recipe of a plan of ``csr`` with this schedule."""
    work = _work(lists)
    body = {
        "rows": shape[0], "cols": shape[1], "nnz": entries, "tensors": list(names),
        "plain": {"sections": list(work.sections), "slots": work.slots, "nodes": work.nodes},
        "mixed": None, "elements": 0, "longest": entries,
        "shape": {"rows": lists.rows, "mean": entries / max(shape[0], 1), "long_share": 1.0},
    }  # fmt: skip
    return f"csr:{json.dumps(body, sort_keys=True)}"


def flat_rows(rows: GroupedRows, differentiable: bool) -> tuple[list[Tensor], str]:
    """Return the flat plan of A's rows (``plan.traced.flat``), with its transpose if wanted."""
    tensors, recipes = [], []
    for each in (rows, rows.transposed) if differentiable else (rows,):
        parts = each.tensors()
        if each.is_transpose:
            tensors += [each.order, each.order[:0]]
        tensors += [parts["indptr"], *parts.values()]
        recipes.append([_recipe(each.shape, each.entries, each.lists, tuple(parts)), None])
    return tensors, json.dumps(recipes)
