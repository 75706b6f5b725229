"""Costs of rows in windows and on CUDA cores, and the predicted time of a product of ``rsh``.

Times are sums over rows and windows. A tile costs its rows of B and a fixed part. An entry on CUDA
cores costs a row of B, mostly from L1, and more if none of the next rows has its column. B and C
are read and written once in both cases. Constants of rows were fitted to H200 times of the core
matrices in two row orders with no row in windows, those of windows to times of ten of them with all
rows in windows (docs/explanation/notes/rsh.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparsetile.core.device import processors
from sparsetile.engines.cost import SHORT_WINDOW, rows_once
from sparsetile.engines.request import Request
from sparsetile.engines.rows.cost import least_seconds, predict_rows
from sparsetile.engines.tiles.short_cost import ACC_MODEL
from sparsetile.formats.bittcf import TILE_COLUMNS
from sparsetile.formats.fragments import step_tiles
from sparsetile.formats.window_split import (
    Counts,
    Partition,
    RowCosts,
    cheapest_partition,
    count_columns,
)
from sparsetile.kernels.rstile import choose_slabs

__all__ = [
    "PartTimes", "Split", "cheapest_split", "counted", "foreseen_seconds", "give_window_tiles",
    "long_windows", "predict_hybrid", "row_costs", "run_steps", "start_seconds", "window_tiles",
]  # fmt: skip

HEIGHT = 16
_TILES = "tiles of windows"  # key of a count
# In steps of the kernel; a share is the mean work of the GPU's warps. The warps of a thread block
# share a window of more than SHARED shares. A window of more than CUT shares is cut, and its pieces
# are joined through global memory. Both stay within the bounds beside them
# (docs/explanation/notes/rsh.md); SHARED_LEAST by bytes of an element: 384 columns for both.
SHARED, SHARED_LEAST, SHARED_MOST = 1.0, {4: 48, 2: 24}, 48
CUT, CUT_LEAST, CUT_MOST = 6.0, 160, 512


# Steps of two tiles at which a run of short windows ends: fewer in float32 products from WIDE
# columns, which have enough items.
RUN, WIDE_RUN, WIDE = 8, 2, 256


@dataclass(frozen=True)
class PartTimes:
    """Microseconds; a byte is one of a row of B."""

    start: float  # before the first and after the last row
    tile: float  # a thousand tiles: fixed, and a byte
    tile_byte: float
    window: float  # a thousand windows
    window_byte: float
    entry: float  # a thousand entries on CUDA cores, and new columns
    entry_byte: float
    new_byte: float
    row: float  # a thousand rows on CUDA cores
    row_byte: float
    in_l2: float  # a megabyte of B and C: the part that fits L2, and the rest
    beyond: float


# By bytes of an element.
TIMES = {
    4: PartTimes(3.0, 0.18, 8.1e-4, 0.0, 0.0, 1.4e-4, 6.6e-5, 5.5e-5, 0.0, 0.0, 0.275, 0.215),
    2: PartTimes(3.5, 0.16, 7.6e-4, 0.0, 0.0, 0.0, 8.3e-5, 3.1e-5, 0.0, 1.6e-4, 0.245, 0.25),
}
# Microseconds of an unhindered warp for a tile: fixed, and a byte of its columns, by bytes of an
# element. If windows do not fill the GPU the longest decides (matrices of 100 to 750 windows took
# 1.3 to 1.9 times the sum of their tiles).
TILE_CHAIN, CHAIN_BYTES = {4: (0.13, 6.0e-4), 2: (0.15, 2.0e-4)}, 512
# A piece of a cut window, in tiles.
PIECE = 6.0
# Entries per row of B read by windows of 8 and 16 rows, as powers of the same of four rows, and the
# tiles of 16 rows beside those that are full; read off 98 matrices (s3rmt3m3: 3.4 entries, 5.4 and
# 7.6; bcsstk32: 3.0, 4.7 and 6.8; kim1: 2.5, 3.3 and 3.9).
WIDER, SPARE_TILES = {8: 1.4, 16: 1.6}, 1.1
# Predicted time of a mixture, relative to CUDA cores alone, below which it is used.
MARGIN = 0.95


@dataclass(frozen=True, eq=False)
class Split:
    """Windows and residual rows, and the predicted seconds of one product."""

    partition: Partition | None  # None: all rows on CUDA cores
    seconds: float


def _times(request: Request) -> PartTimes:
    return TIMES[4 if request.dtype.itemsize >= 4 else 2]


def _tile_seconds(request: Request) -> float:
    times = _times(request)
    return (times.tile + times.tile_byte * request.row_bytes) * 1e-9


def row_costs(request: Request) -> RowCosts:
    """Return the costs of a request's rows in windows and on CUDA cores, in seconds."""
    row, times, tile = request.row_bytes, _times(request), _tile_seconds(request)
    return RowCosts(
        tile=tile,
        window=(times.window + times.window_byte * row) * 1e-9,
        entry=(times.entry + times.entry_byte * row) * 1e-9,
        new=times.new_byte * row * 1e-9,
        row=(times.row + times.row_byte * row) * 1e-9,
        longest=long_windows(request)[0],  # sharing a window costs about as much as cutting did
        piece=PIECE * tile,
    )


def counted(request: Request) -> Counts:
    """Count the request's columns, once."""
    return request.once(
        "columns", lambda: count_columns(request.csr, request.permutation.perm, HEIGHT)
    )


def window_tiles(pairs: Tensor) -> Tensor:
    """Return the tiles of all windows, given the distinct columns of each."""
    return ((pairs + TILE_COLUMNS - 1) // TILE_COLUMNS).sum()


def give_window_tiles(request: Request, tiles: int) -> None:
    """Store the known number of tiles of all windows of ``HEIGHT`` rows."""
    request.once(_TILES, lambda: tiles)


def long_windows(request: Request) -> tuple[int, int]:
    """Return the tiles above which warps share a window, and above which it is cut.

    The second is the paper's adaptive rule, with its terms measured. Cutting less lets the longest
    window run alone at the end; cutting more costs partial sums.
    """
    tiles = request.once(_TILES, lambda: int(window_tiles(counted(request).pairs[::HEIGHT])))
    depth = step_tiles(request.dtype.itemsize)
    slabs = choose_slabs(request.dtype, max(request.n, 1))
    warps = processors(request.device) * slabs.warps
    share = tiles / depth * -(-request.n // slabs.columns) / warps
    least = SHARED_LEAST[4 if request.dtype.itemsize >= 4 else 2]
    shared = min(max(round(SHARED * share), least), SHARED_MOST)
    cut = min(max(round(CUT * share), CUT_LEAST), CUT_MOST)
    return depth * shared, depth * cut


def run_steps(request: Request) -> int:
    """Return the steps of two tiles at which a run of short windows ends."""
    return WIDE_RUN if request.dtype.itemsize >= 4 and request.n >= WIDE else RUN


def cheapest_split(request: Request) -> Split:
    """Return the cheaper of all rows on CUDA cores and the best mixture."""
    return request.once(("split", request.n, request.dtype), lambda: _cheapest_split(request))


def _once_seconds(request: Request) -> float:
    """Seconds that B and C take, each once."""
    times, once = _times(request), request.row_bytes * rows_once(request.csr)
    beyond = max(once - request.machine.l2_bytes, 0)
    return ((once - beyond) * times.in_l2 + beyond * times.beyond) * 1e-12


def start_seconds(request: Request) -> float:
    """Seconds of a product beside its rows and windows: its start, and B and C, each once."""
    return _times(request).start * 1e-6 + _once_seconds(request)


def _longest_seconds(request: Request, tiles: Tensor) -> float:
    """Seconds of the longest window that one warp processes; longer ones are shared."""
    fixed, byte = TILE_CHAIN[4 if request.dtype.itemsize >= 4 else 2]
    longest = min(int(tiles.max()), long_windows(request)[0])
    each = fixed + byte * min(request.row_bytes, CHAIN_BYTES)
    return (_times(request).start + longest * each) * 1e-6


def _cheapest_split(request: Request) -> Split:
    counts, costs = counted(request), row_costs(request)
    rows, windows = costs.of_rows(counts), costs.of_windows(counts)
    alone, start = predict_rows(request), start_seconds(request)
    partition = cheapest_partition(counts, rows, windows, MARGIN * alone - start)
    if partition is None or not partition.windows.numel():
        return Split(None, alone)
    mixed = float(windows[partition.windows].sum() + rows[partition.residual].sum())
    mixed = max(mixed + start, least_seconds(request))
    pairs = counts.pairs[partition.windows]
    mixed = max(mixed, _longest_seconds(request, (pairs + TILE_COLUMNS - 1) // TILE_COLUMNS))
    return Split(None, alone) if mixed > MARGIN * alone else Split(partition, mixed)


def predict_hybrid(request: Request) -> float:
    """Return the seconds of one product."""
    return cheapest_split(request).seconds


def foreseen_seconds(request: Request, sharing: float) -> float:
    """Return about what a product in tiles takes: the less of all rows in windows of 8, and of 16.

    ``sharing`` is the entries per row of B that four rows read. Nothing is counted for it, so it
    only says whether comparing the systems may be worth its time.
    """
    short, tall = (request.csr.nnz / sharing ** WIDER[rows] for rows in (SHORT_WINDOW, HEIGHT))
    tile = _tile_seconds(request)
    windows = start_seconds(request) + SPARE_TILES * tall / TILE_COLUMNS * tile
    acc = ACC_MODEL[4 if request.dtype.itemsize >= 4 else 2]
    return min(windows, acc.seconds(request, round(short)))
