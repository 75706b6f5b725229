"""Products straight from CSR arrays on a GPU: nothing is built, kept or waited for.

A product is one launch. What it needs beside addresses and sizes is prepared once for each kind of
call (width, types, alignment, and sizes to about an eighth), so that arrays that are new in each
call cost the host little. Scratch memory has the list of long rows that the kernel makes.

Kernels number entries with 32 bits. A matrix of 2^31 or more is a launch for each piece of rows
with fewer; to find the pieces, the host waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.device import processors
from sparsetile.core.settings import entry_limit
from sparsetile.core.streams import refuse_capture
from sparsetile.intake.pieces import RowPiece, checked_pieces
from sparsetile.jit.loader import (
    LoadedKernel,
    current_device,
    current_stream_handle,
    ensure_cuda_context,
    on_device,
)
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.csr import THREADS, sddmm_tile, vector_width
from sparsetile.kernels.direct import (
    LIST_COUNTERS,
    SDDMM_DIRECT,
    SPMM_DIRECT,
    Lists,
    direct_config,
    direct_sddmm_config,
    direct_tile,
)
from sparsetile.launch.epilogue import epilogue_params
from sparsetile.launch.faults import faults_address
from sparsetile.launch.geometry import (
    MAX_SCRATCH,
    batch_count,
    batch_pieces,
    reachable,
    stride_params,
)
from sparsetile.launch.interface import Epilogue
from sparsetile.launch.kept import KeptLaunches

__all__ = ["direct_product", "direct_sddmm", "product_into", "takes_arrays"]

# Blocks of an SM that stride over the list of long rows.
_WIDE_BLOCKS_PER_SM = 8
# Sizes of which no product was tested; entries may be more.
_LIMIT, _WIDEST = 2**31, 65535
_SIZES = ("entries", "cols", "rows")


class _Prepared:
    """A launch and its scratch memory: counters; lists, then places for the sums of pieces.

    Parameters
    ----------
    launch : callable
        ``PreparedLaunch.launch_sized``.
    groups : int
        Of a thread block, a row each.
    wide_blocks : int
    lists : Lists
    layers : int
        Slabs in all matrices of a batch.
    slot_bytes : int
        Of the sum of a row's piece; 0 if nothing is added.
    """

    def __init__(
        self,
        launch: Callable[..., None],
        groups: int,
        wide_blocks: int,
        lists: Lists,
        layers: int,
        slot_bytes: int,
    ) -> None:
        self._launch, self._groups, self._wide_blocks = launch, groups, wide_blocks
        self._nodes = 16 * lists.items
        self._parents = self._nodes + 16 * lists.nodes
        self._partials = self._parents + _padded(4 * lists.slots)
        self._joins = slot_bytes > 0
        self.bytes = self._partials + layers * lists.slots * slot_bytes
        self._counters = LIST_COUNTERS + (layers * lists.nodes if slot_bytes else 0)
        # Addresses of the scratch memory of the last product, and what the launch takes of them.
        self._last: tuple[int, int, tuple[int, ...]] = (-1, -1, ())

    def launch(self, device: int, rows: int, *values: int) -> None:
        """Launch for addresses of arrays, row pointers first, and sizes."""
        stream = current_stream_handle(device)
        memory, counters = scratch(device, stream, self.bytes, self._counters)
        at, counts = memory.data_ptr(), counters.data_ptr()
        last_at, last_counts, places = self._last
        if at != last_at or counts != last_counts:
            places = (at, at + self._parents, at + self._nodes, counts)
            if self._joins:
                places = (*places, counts + 4 * LIST_COUNTERS, at + self._partials)
            self._last = (at, counts, places)
        self._launch(stream, self._wide_blocks - rows // -self._groups, places, *values)


# By what a launch depends on, sizes rounded; and by the exact sizes of recent calls.
_prepared = KeptLaunches[tuple[Any, ...], _Prepared]()
_recent = KeptLaunches[tuple[Any, ...], _Prepared]()


def _padded(size: int) -> int:
    return -(-size // 16) * 16


def _rounded(number: int) -> int:
    """Return a number that is not less, with at most four significant bits."""
    step = 1 << max(number.bit_length() - 4, 0)
    return -(-number // step) * step


def takes_arrays(indptr: Tensor, indices: Tensor, cols: int, n: int) -> bool:
    """Whether sizes are such that these products were tested."""
    return max(indptr.shape[0], cols) < _LIMIT and n <= _WIDEST


def _prepare(
    lists: Lists,
    lanes: int,
    device: int,
    indptr: Tensor,
    indices: Tensor,
    kernel: LoadedKernel,
    grid: tuple[int, int],
    params: dict[str, Any],
    patch: tuple[str, ...],
    slot_bytes: int,
) -> _Prepared:
    """Return the launch of a kernel; ``slot_bytes`` of the sum of a row's piece, or 0."""
    most = processors(indptr.device) * _WIDE_BLOCKS_PER_SM
    wide_blocks = min(most, -(-lists.items // (THREADS // 32)))
    rare: tuple[str, ...] = ("items", "parent_of_slot", "nodes", "counts")
    if slot_bytes:
        rare = (*rare, "arrivals", "partials")
    fields = {
        **kernel.params.zeros,
        **params,
        "faults": faults_address(device),
        "wide_indptr": indptr.dtype is torch.int64,
        "wide_columns": indices.dtype is torch.int64,
        "wide_length": lists.wide,
        "segment": lists.segment,
        "most_items": lists.items,
        "slot_count": lists.slots,
        "node_count": lists.nodes,
        "wide_blocks": wide_blocks,
    }
    patched = (*patch[:5], *_SIZES, *patch[5:])
    launch = kernel.prepare((1, *grid), THREADS, fields, patched, rare, overlap=True)
    return _Prepared(
        launch.launch_sized, THREADS // lanes, wide_blocks, lists, grid[0] * grid[1], slot_bytes
    )


def _prepare_product(
    indptr: Tensor,
    indices: Tensor,
    B: Tensor,
    out_dtype: torch.dtype,
    sizes: tuple[int, int],
    reduce: str,
    epilogue: Epilogue,
    device: int,
) -> _Prepared:
    n, batches, size = B.shape[-1], batch_count(B), B.element_size()
    b_row, b_batch = B.stride(-2), B.stride(0) if B.dim() == 3 else 0
    vector = vector_width(B.dtype, n, b_row, b_batch, B.data_ptr() // size)
    extremum = reduce in ("max", "min")
    tile = direct_tile(B.dtype, n, vector, *sizes, extremum=extremum)
    config = direct_config(B.dtype, tile, out_dtype=out_dtype, extremum=extremum)
    params = {
        **epilogue_params(epilogue),
        **stride_params((b_row * size, n, b_batch, 0)),
        "minimum": reduce == "min", "slabs": tile.slabs(n), "n": n,
    }  # fmt: skip
    # Matrices of C are as far apart as this call's rows make them.
    patch = ("indptr", "columns", "values", "b", "c", *(("c_batch_stride",) * (batches > 1)))
    lists = Lists.of(*sizes, tile.lanes, n * size, int(config["kUnroll"]) * tile.parts)
    return _prepare(
        lists, tile.lanes, device, indptr, indices, SPMM_DIRECT.load(config, device),
        (tile.slabs(n), batches), params, patch,
        tile.slab * tile.parts * (8 if B.dtype is torch.float64 else 4),
    )  # fmt: skip


def direct_product(
    indptr: Tensor,
    indices: Tensor,
    values: Tensor | None,
    B: Tensor,
    reduce: str = "sum",
    epilogue: Epilogue | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return A·B, or the mean, max or min of each row's products; 0 for empty rows.

    Parameters
    ----------
    indptr, indices : Tensor of int32 or int64
        Contiguous, on B's GPU. They are checked there (``launch.faults``).
    values : Tensor [entries] or None
        Contiguous, of B's type.
    B : Tensor [K, N] or [batch, K, N]
        Columns have unit stride.
    reduce : {"sum", "mean", "max", "min"}
    epilogue : Epilogue, optional
        After a sum or mean; beta must be 0.
    """
    shape, rows, n = B.shape, indptr.shape[0] - 1, B.shape[-1]
    if len(shape) == 2 and out_dtype is None:
        out = B.new_empty(rows, n)  # a third quicker than with a tuple
    else:
        out = B.new_empty((*shape[:-2], rows, n), dtype=out_dtype or B.dtype)
    if out.numel():
        product_into(indptr, indices, values, B, out, reduce, epilogue, out_dtype)
    return out


def product_into(
    indptr: Tensor,
    indices: Tensor,
    values: Tensor | None,
    B: Tensor,
    out: Tensor,
    reduce: str = "sum",
    epilogue: Epilogue | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Write a product into rows of C: contiguous ones of each matrix, at least one element."""
    shape, entries, pointer = B.shape, indices.shape[0], B.data_ptr()
    rows, cols = indptr.shape[0] - 1, shape[-2]
    device, kind = B.get_device(), (B.stride(), pointer & 15, B.dtype)
    exact = (shape, kind, rows, entries, indptr.dtype, indices.dtype, reduce, device)
    found = _recent.get(exact) if epilogue is None and out_dtype is None else None
    if found is None:
        if entries >= entry_limit() and rows > 1:
            for piece in _row_pieces(indptr, indices, cols):
                some = None if values is None else values[piece.entries]
                own = piece.pointers(indptr), indices[piece.entries], some
                product_into(*own, B, out[..., piece.rows, :], reduce, epilogue, out_dtype)
            return
        B = reachable(B)
        pointer = B.data_ptr()
        found = _product_of(indptr, indices, B, out.dtype, reduce, epilogue)
        pieces = _pieces(found, batch_count(B))
        if len(pieces) > 1:
            for cut in pieces:
                product_into(indptr, indices, values, B[cut], out[cut], reduce, epilogue, out_dtype)
            return
        if epilogue is None and out_dtype is None and pointer & 15 == kind[1]:
            _recent.keep(exact, found)
    arrays: tuple[int, ...] = (
        indptr.data_ptr(), indices.data_ptr(), 0 if values is None else values.data_ptr(),
        pointer, out.data_ptr(), entries, cols, rows,
    )  # fmt: skip
    if len(shape) == 3 and shape[0] > 1:
        arrays = (*arrays, out.stride(0))
    ensure_cuda_context(device)
    if current_device() == device:
        found.launch(device, rows, *arrays)
    else:
        with on_device(device):
            found.launch(device, rows, *arrays)


def _row_pieces(indptr: Tensor, indices: Tensor, cols: int) -> list[RowPiece]:
    """Return the pieces of a matrix of too many entries for one launch."""
    remedy = "Multiply once before the capture, and capture a plan's product"
    refuse_capture("spmm", indptr.device, remedy)
    return checked_pieces("spmm", indptr, indices, cols, entry_limit())


def _product_of(
    indptr: Tensor,
    indices: Tensor,
    B: Tensor,
    out_dtype: torch.dtype,
    reduce: str,
    epilogue: Epilogue | None,
) -> _Prepared:
    """Return the launch of a product like this one; sizes may be somewhat less."""
    wanted = epilogue or Epilogue(mean=reduce == "mean")
    sizes = _rounded(indptr.shape[0] - 1), _rounded(indices.shape[0])
    bias = 0 if wanted.bias is None else wanted.bias.data_ptr()
    device = B.get_device()
    key = (
        B.shape[-1], batch_count(B), B.stride(), B.data_ptr() & 15, B.dtype, out_dtype, sizes,
        indptr.dtype, indices.dtype, reduce, bias, wanted.alpha, wanted.mean, wanted.relu, device,
    )  # fmt: skip
    found = _prepared.get(key)
    if found is None:
        with on_device(device):
            ensure_cuda_context(device)
            found = _prepare_product(indptr, indices, B, out_dtype, sizes, reduce, wanted, device)
        _prepared.keep(key, found)
    return found


def _pieces(found: _Prepared, batches: int) -> list[slice]:
    """Cut a batch into what one grid and the scratch memory can hold."""
    return batch_pieces(batches, MAX_SCRATCH // max(found.bytes // batches, 1))


def _sum_type(B: Tensor) -> torch.dtype:
    return torch.float64 if B.dtype is torch.float64 else torch.float32


def direct_sddmm(indptr: Tensor, indices: Tensor, G: Tensor, B: Tensor) -> Tensor:
    """Return dot(G[row], B[column]) for each entry, summed over batches, in the type of sums.

    Parameters
    ----------
    indptr, indices
        As for :func:`direct_product`.
    G, B : Tensor [M, N] and [K, N], or batches of them
        Columns have unit stride.
    """
    rows, entries, n = indptr.shape[0] - 1, indices.shape[0], B.shape[-1]
    if entries >= entry_limit() and rows > 1:
        sums = torch.empty(entries, dtype=_sum_type(B), device=B.device)
        for piece in _row_pieces(indptr, indices, B.shape[-2]):
            own = piece.pointers(indptr), indices[piece.entries], G[..., piece.rows, :]
            sums[piece.entries] = direct_sddmm(*own, B)
        return sums
    G, B, batches = reachable(G), reachable(B), batch_count(B)
    out = B.new_empty((batches, entries), dtype=_sum_type(B))
    if not (entries and rows and n and batches):
        return out.new_zeros(entries)
    device, size = B.get_device(), B.element_size()
    g, b = G.data_ptr(), B.data_ptr()
    sizes = _rounded(rows), _rounded(entries)
    key = (
        n, batches, G.stride(), B.stride(), g & 15, b & 15, B.dtype, sizes, indptr.dtype,
        indices.dtype, device,
    )  # fmt: skip
    with on_device(device):
        ensure_cuda_context(device)
        found = _prepared.get(key)
        if found is None:
            batch = (G.stride(0), B.stride(0)) if B.dim() == 3 else (0, 0)
            vector = vector_width(
                B.dtype, n, G.stride(-2), B.stride(-2), *batch, g // size, b // size
            )
            tile = sddmm_tile(B.dtype, n, vector)
            params = {
                "g_row_stride": G.stride(-2), "b_row_stride": B.stride(-2),
                "g_batch_stride": batch[0], "b_batch_stride": batch[1], "n": n,
            }  # fmt: skip
            patch = ("indptr", "columns", "g", "b", "out", *(("out_batch_stride",) * (batches > 1)))
            config = direct_sddmm_config(B.dtype, tile)
            kernel = SDDMM_DIRECT.load(config, device)
            lists = Lists.of(*sizes, tile.lanes, n * size, int(config["kUnroll"]))
            made = _prepare(
                lists, tile.lanes, device, indptr, indices, kernel,
                (1, batches), params, patch, 0,
            )  # fmt: skip
            found = _prepared.keep(key, made)
        if batches > 1 and len(pieces := _pieces(found, batches)) > 1:
            return torch.stack(
                [direct_sddmm(indptr, indices, G[each], B[each]) for each in pieces]
            ).sum(0)
        arrays = (
            indptr.data_ptr(), indices.data_ptr(), g, b, out.data_ptr(), entries, B.shape[-2], rows
        )  # fmt: skip
        found.launch(device, rows, *(arrays if batches == 1 else (*arrays, entries)))
    return out[0] if batches == 1 else out.sum(0)
