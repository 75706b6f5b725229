"""The choice of windows for ``wcsr``, and the predicted time of its product.

Tall windows gather rows of B behind distinct (64-row window, column) pairs, then move B and C
once. They reach 0.64 of L2's gather rate and 0.7 of DRAM, fitted to
results/h200/asyncsparse.jsonl.gz. Decoding is as slow as the gather of 256 columns in float32:
narrower B is not faster (estimate).
"""

from __future__ import annotations

from sparsetile.engines.request import Request
from sparsetile.engines.tiles.short_cost import predict_short_windows
from sparsetile.kernels.wcsr import TILE

__all__ = ["predict_wcsr", "tall_windows_pay"]

HEIGHT, SHORT_HEIGHT = 64, 8
_L2, _DRAM, _START, _ITEM = 0.64, 0.7, 7e-6, 4
# Cost of a tile of a tall window, and of a tall window beside its tiles, in tiles of short windows:
# from readings of both kernels in float32 at N=512 (docs/explanation/notes/wcsr.md). Decoding
# limits tall windows. It is the same in 16 bits, for which short ones take 0.6 of the time, and for
# up to 256 columns of B. These two are estimates.
TALL_TILE_COST, TALL_WINDOW_COST = 1.2, 50.0
SIXTEEN_BIT_COST, TALL_COLUMNS = 1.6, 256


def _tiles(request: Request, height: int) -> tuple[float, int]:
    """Approximate tiles of windows of ``height`` rows, and the number of windows."""
    windows = -(-request.csr.shape[0] // height)
    # A window's last tile is half full in the mean.
    return request.pairs(height) / TILE + windows / 2, windows


def tall_windows_pay(request: Request) -> bool:
    """Whether windows of 64 rows are expected to be faster than those of 8 or 16."""
    tall, windows = _tiles(request, HEIGHT)
    short, _ = _tiles(request, SHORT_HEIGHT)
    n = max(request.n, 1)
    tile_cost = TALL_TILE_COST * (-(-n // TALL_COLUMNS) * TALL_COLUMNS) / n
    if request.dtype.itemsize == 2:
        tile_cost *= SIXTEEN_BIT_COST
    return tile_cost * tall + TALL_WINDOW_COST * windows <= short


def predict_wcsr(request: Request) -> float:
    """Return the seconds of one product; if short windows are taken, those of ``acc``."""
    if not tall_windows_pay(request):
        return predict_short_windows(request)
    csr, item, n, ceilings = request.csr, request.dtype.itemsize, request.n, request.machine
    pairs = request.pairs(HEIGHT)
    columns = -(-n // TALL_COLUMNS) * TALL_COLUMNS
    gathered = _ITEM * columns * pairs / ceilings.l2_gather
    once = item * n * (min(csr.shape[1], pairs) + csr.shape[0]) / ceilings.dram
    return _START + gathered / _L2 + once / _DRAM
