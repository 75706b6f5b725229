"""``voltrix``: Voltrix-SpMM, bulk copies of rows of B behind 16x8 bitmap tiles (sm_90a).

Parts: BMat (formats/bmat.py), windows and columns of C distributed over persistent thread blocks
(balance/cobalance.py), the warp-specialised kernel (kernels/cuda/windows/spmm_bmat.cu). For wide B:
one bulk copy loads each row of B, and wide copies are faster. Deterministic: windows are shared
along N, or cut along their tiles and added in a fixed order. docs/explanation/notes/voltrix.md
explains the decisions.

``ablation`` names the last enabled part of the paper's breakdown: ``sync`` (rows copied by threads,
one buffer, whole tiles of A, a thread block per window), ``tma`` (bulk copies, two buffers),
``bmat`` (bits and packed values), ``multitier`` (all stages, several MMAs per consumer, several
producers), ``bits`` (persistent blocks: the whole paper). Without an ablation, weighted A is stored
as whole tiles again, which take more memory and no decoding. Others change the distribution of
windows: ``contiguous`` is the paper's, neighbouring windows for each block, ``greedy`` that without
the genetic search, ``unbalanced`` the same number of neighbouring windows for each block.
"""

from __future__ import annotations

import torch

from sparsetile.balance import CoBalanced, CostModel, l2_reload_factor
from sparsetile.balance.cobalance import MIN_TILES, PARTIAL
from sparsetile.core.device import H200, l2_bytes, machine, processors
from sparsetile.engines.request import BuildTimer, BuiltSystem, Request, order_tensor
from sparsetile.formats import BMat
from sparsetile.formats.bmat import WINDOW_ROWS
from sparsetile.kernels.bmat import (
    BITS,
    ELEMENTS,
    LADDER,
    PIECE_BYTES,
    STEP,
    TILE_ROWS,
    WIDTHS,
    Pipe,
    choose_pipe,
    most_shared_bytes,
    row_pieces,
    slab_width,
    widest_slab,
)
from sparsetile.kernels.csr import MANY_RELOADS
from sparsetile.launch.geometry import ACCESS_BYTES
from sparsetile.systems.requirements import bulk_reasons, shared_reasons, tile_reasons
from sparsetile.systems.tiles import TileSystem
from sparsetile.systems.voltrix.cost import predict_voltrix, schedule_costs, stack_share
from sparsetile.systems.voltrix.runner import VoltrixRunner

__all__ = ["SYSTEM", "VoltrixSystem"]

MULTITIER, CONTIGUOUS, GREEDY, UNBALANCED = "multitier", "contiguous", "greedy", "unbalanced"
TALL, SHORT = "windows of 32", "windows of 16"
# Steps of the breakdown without persistent blocks.
NOT_PERSISTENT = ("sync", "tma", "bmat", MULTITIER)
# Share of L2 up to which B's slabs run together, and up to which a slab's part of it may grow.
L2_SHARE, SLAB_SHARE = 0.6, 0.85
# Fewest pieces of 128 bytes of a narrowed slab, and pieces of a unit of columns: narrow copies are
# slow.
SLAB_PIECES, UNIT_PIECES = 8, 4
# A separate launch recomputes non-finite results if a window has this many tiles, for one warp to
# process, or if rows of B have this many bytes, some 20 us of a product.
LONG_WINDOW, LARGE_GATHER = 64, 64 * 2**20
# Every window costs the same: the same number of windows for each block.
EVEN_WINDOWS = CostModel(tile=0.0, window=1.0)


def _stack(request: Request) -> int:
    """Parts of sixteen rows of a window: two if that saves enough reads of B."""
    if request.ablation in (TALL, SHORT):
        return 2 if request.ablation == TALL else 1
    if request.ablation is not None:
        return 1  # the paper's windows
    share = stack_share(request.dtype, request.row_bytes)
    return 2 if request.pairs(2 * WINDOW_ROWS) < share * request.pairs(WINDOW_ROWS) else 1


def _slab_width(request: Request, stack: int) -> int:
    """Pieces of a slab: the widest, or narrower if rows of B come in no local order and a slab of
    that width fits L2, from which it is then gathered at twice DRAM's speed."""
    most = widest_slab(request.dtype, stack)
    csr, widest = request.csr, slab_width(request.dtype, request.n, most)
    room = SLAB_SHARE * l2_bytes(request.device)
    fitting = [w for w in WIDTHS if w >= SLAB_PIECES and csr.shape[1] * w * PIECE_BYTES <= room]
    if not fitting or max(fitting) >= widest:
        return widest
    slab_bytes = min(request.row_bytes, widest * PIECE_BYTES)
    if l2_reload_factor(csr, request.permutation.perm, slab_bytes) < MANY_RELOADS:
        return widest
    return slab_width(request.dtype, request.n, max(fitting))


def _schedule(request: Request, tiles: BMat, pipe: Pipe, width: int) -> CoBalanced:
    """Distribute windows, for each slab of B, over all thread blocks, or over a part of them if B
    fits L2: slabs then run at the same time."""
    units, device = tiles.units().near(), request.device
    columns = -(-width // UNIT_PIECES)
    if request.ablation in NOT_PERSISTENT:
        return CoBalanced.make(units, workers=None, width=columns, step=STEP).to(
            request.csr.indptr.device
        )
    slabs = -(-max(row_pieces(request.dtype, request.n), 1) // width)
    fits = request.csr.shape[1] * request.row_bytes <= L2_SHARE * l2_bytes(device)
    resident = processors(device) * pipe.blocks
    most = max(resident // slabs, 1) if fits else resident
    # Number of units of columns, including those of pieces of long windows.
    parts = (tiles.window_count + tiles.tile_count // MIN_TILES) * columns
    name = machine(device).name if device.type == "cuda" else H200.name
    return CoBalanced.make(
        units, workers=max(1, min(most, parts)), width=columns,
        model=EVEN_WINDOWS if request.ablation == UNBALANCED else schedule_costs(name), step=STEP,
        in_turn=request.ablation not in (CONTIGUOUS, GREEDY, UNBALANCED),
        refine=request.ablation == CONTIGUOUS, partial=PARTIAL * tiles.stack,
    ).to(request.csr.indptr.device)  # fmt: skip


def _is_large(request: Request, tiles: BMat) -> bool:
    """Whether a second launch for non-finite results is a small part of the product's time."""
    lengths = tiles.window_tile_ptr.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    gathered = tiles.tile_count * TILE_ROWS * request.row_bytes
    return longest >= LONG_WINDOW or gathered >= LARGE_GATHER


def _operands(request: Request) -> str:
    """Describe how B and C are read and written."""
    if request.row_bytes % ACCESS_BYTES == 0:
        return "as they are where rows are 16-byte aligned; else B or C is copied once"
    return "B and C are copied once: rows are no multiple of 16 bytes"


class VoltrixSystem(TileSystem):
    """Tensor Cores on BMat tiles, fed by bulk copies."""

    name = "voltrix"
    summary = "Voltrix-SpMM: bulk copies of wide rows of B, 16x8 bitmap tiles, TF32 or 16-bit"
    dtypes = tuple(ELEMENTS)
    architectures = "sm_90 and newer"
    kernels = ("spmm_bmat", "redo_bmat")
    ablations = (*LADDER, MULTITIER, CONTIGUOUS, GREEDY, UNBALANCED, TALL, SHORT)
    contract_ablations = (None, BITS, TALL)
    runner = VoltrixRunner

    def further_reasons(self, request: Request) -> list[str]:
        found = [*tile_reasons(request), *bulk_reasons(request)]
        if found or request.dtype not in self.dtypes:
            return found
        return shared_reasons(request, most_shared_bytes(request.dtype, request.n))

    def predict(self, request: Request) -> float:
        return predict_voltrix(request)

    def build(self, request: Request) -> BuiltSystem:
        csr, timer = request.csr, BuildTimer(request)
        stack = _stack(request)
        tiles = BMat.pack(csr, request.permutation.perm, stack=stack)
        timer("format")
        variant = request.ablation if request.ablation in LADDER else None
        if variant is None and (csr.values is None or request.ablation == MULTITIER):
            variant = BITS  # a pattern has only bits to decode
        width = _slab_width(request, stack)
        pipe = choose_pipe(request.dtype, width, variant, stack)
        schedule = _schedule(request, tiles, pipe, width)
        items = schedule.items.clone()
        items[:, 4:6] = torch.clamp(items[:, 4:6] * UNIT_PIECES, max=width)
        pairs = torch.arange(0, tiles.tile_count + 1, STEP, device=request.device)
        pair_values = tiles.first_values(pairs).to(torch.int32)
        items[:, 6] = pair_values[items[:, 1].to(torch.int64) // STEP]
        tensors = {
            "window_tile_ptr": tiles.window_tile_ptr, "pair_values": pair_values,
            "columns": tiles.columns, "bitmaps": tiles.bitmaps, "entries": tiles.entries,
            "order": order_tensor(tiles.order, csr), "indptr": csr.indptr, **schedule.tensors(),
            "items": items,
        }  # fmt: skip
        choices = {
            "format": f"BMat, {tiles.tile_count} tiles of {stack * WINDOW_ROWS}x8, "
            f"{tiles.entries_per_pair:.1f} entries a column, {tiles.bytes} bytes"
            + (", values as whole tiles" if pipe.dense else ""),
            "schedule": f"{schedule.item_count} items for {schedule.worker_count} thread blocks "
            f"a slab of {width * PIECE_BYTES} bytes, {schedule.shared_windows} splits along N, "
            f"{schedule.slot_count} partial sums, largest share {schedule.largest:.3f} of the mean",
            "pipeline": f"{pipe.producers} producers, {pipe.consumers} consumers, {pipe.stages} "
            f"stages of {pipe.step_tiles} tiles, {pipe.blocks} blocks an SM",
            "operands": _operands(request),
        }
        timer("schedule")
        return self.built(
            request, tensors, choices, timer.seconds, positions=csr.shape[0],
            items=schedule.item_count, slots=schedule.slot_count, nodes=schedule.node_count,
            width=width, workers=schedule.worker_count, pipe=variant, stack=stack,
            redo=variant in (None, BITS) and _is_large(request, tiles),
        )  # fmt: skip


SYSTEM = VoltrixSystem()
