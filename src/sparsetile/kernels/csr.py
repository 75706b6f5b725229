"""Host side of ``spmm_csr.cu`` and ``sddmm_csr.cu``: configurations, limits, choice of tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sparsetile.core.layout import BUNDLE_ROWS
from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.params import BUNDLES, EPILOGUE, OPERANDS, SECTIONS, STRIDES, TREE
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "BUNDLE_DTYPES",
    "ELEMENTS",
    "FEW_COLUMNS",
    "FULL_LANES",
    "MIXED_ROWS",
    "MMA_ELEMENTS",
    "PLACES",
    "SDDMM_CSR",
    "SHORT_ROWS",
    "SMALL_BYTES",
    "SMALL_LANES",
    "SPMM_CSR",
    "THREADS",
    "RowShape",
    "RowTile",
    "bundle_tiles",
    "choose_bundle_tile",
    "choose_narrow_tile",
    "choose_tile",
    "element_types",
    "may_reload",
    "narrow_tiles",
    "out_dtypes",
    "row_tiles",
    "sddmm_config",
    "sddmm_tile",
    "spmm_config",
    "vector_width",
    "vector_widths",
]

# torch dtype -> trait of element.cuh
ELEMENTS = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
}
# Types of Tensor Cores with sums in float32: float32 is multiplied as TF32, and float64 has no
# instruction of our tiles' shapes.
MMA_ELEMENTS = {dtype: ELEMENTS[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16)}
# Types of winners' places in their rows, and their bytes.
PLACES = {torch.int16: 2, torch.int32: 4}
# Types for which a bundle's values of a column fit one access.
BUNDLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
THREADS = 128
# 16-byte accesses are the widest.
MAX_ACCESS_BYTES = 16
# Fewest bytes of a row of B that should be read at once: less wastes DRAM sectors.
SLAB_BYTES = 128
# Rows below this many entries are short: their fixed cost matters.
SHORT_ROW = 9
VERY_SHORT_ROW = 6
# Rows from which four (eight) of them share a warp, so that every SM has enough warps.
MANY_ROWS = 30_000
VERY_MANY_ROWS = 100_000
# Mean lengths of middling rows: in products of 128 or 64 bytes a row, eight rows of B in flight pay
# (64 bytes: only while rows are fewer than MIDDLING_MOST).
MIDDLING, MIDDLING_MOST = (6, 25), 25_000
# Mean length up to which 16 lanes have four vectors of 16-bit types, if rows are so many.
MIDDLING_SHORT, MIDDLING_LEAST = 12, 12_000
# Share of entries in long rows from which a whole warp should work on one row.
LONG_SHARE = 0.6
FEW_LONG = 0.05
# Narrow slabs pay if wide ones load each row of B into the cache at least this often: a narrow slab
# loads it once.
MANY_RELOADS = 2.5
# The same for whole rows of B: up to this, all slabs of an item should run before the next item,
# which reads rows of B in one piece. Bundles read each row of B less often, and lose less.
LOCAL = 1.3
LOCAL_BUNDLES = 6.0
# Bytes of a row of B in the widest slab of plain rows.
WIDE_SLAB_BYTES = 512
# Warps of work below which a bundle's slab is narrowed to make more of them.
BUNDLE_WARPS = 8_000
# Rows of B in flight in small products, in whole chunks and in the rest of a row: one memory
# latency instead of two. Their fewest lanes, with narrower vectors if necessary.
SMALL_IN_FLIGHT = 8
SMALL_PARTIAL = 8
SMALL_LANES = 8
# Whether their first column ids come with the items.
SMALL_HEADS = True
# Bytes of a row of B up to which a product may be small.
SMALL_BYTES = 256


@dataclass(frozen=True)
class RowTile:
    """Columns a group covers at once: ``lanes`` lanes of ``times`` vectors of elements.

    With ``parts`` above 1 the lanes read so many entries side by side.
    """

    vector: int
    lanes: int
    times: int = 1
    parts: int = 1

    @property
    def slab(self) -> int:
        return self.vector * self.lanes * self.times // self.parts

    def slabs(self, n: int) -> int:
        return -(-n // self.slab)


@dataclass(frozen=True)
class RowShape:
    """The shape of a product that the choice of a tile uses.

    Attributes
    ----------
    rows : int
        Items of one group.
    mean : float
        Their mean length.
    long_share : float
        Share of all entries in items for a whole warp.
    slab_reloads : float
        Loads of a slab's part of a row of B into the L2 cache; 0 if all of it fits.
    row_reloads : float
        The same for whole rows of B.
    small : bool
        The product is small: latency, not L2, limits its rows.
    shared : bool
        Thread blocks share rows.
    average : float
        Mean length of all rows, those of long items included; 0 if it is not known.
    """

    rows: int = 0
    mean: float = 0.0
    long_share: float = 0.0
    slab_reloads: float = 0.0
    row_reloads: float = 0.0
    small: bool = False
    shared: bool = False
    average: float = 0.0

    def at_width(self, row_bytes: int) -> RowShape:
        """Return the same for a product that may be wider than planned."""
        return replace(self, small=self.small and row_bytes <= SMALL_BYTES)

    def slabs_first(self, bundles: bool) -> bool:
        """Whether all slabs of an item should run before the next item."""
        return 0.0 < self.row_reloads <= (LOCAL_BUNDLES if bundles else LOCAL)

    @property
    def short(self) -> bool:
        """Rows are short, and many."""
        return self.mean <= SHORT_ROW and self.rows >= MANY_ROWS

    @property
    def middling(self) -> bool:
        """Rows are neither very short nor long."""
        return MIDDLING[0] <= self.average < MIDDLING[1]

    @property
    def long(self) -> bool:
        """Rows are long, and most entries in those that have a warp."""
        return self.average >= MIDDLING[1] and self.long_share >= LONG_SHARE

    @property
    def uniform(self) -> bool:
        """Hardly any row is long."""
        return self.long_share < FEW_LONG


# The extremes: an unknown matrix, and only short rows; and small products.
MIXED_ROWS = RowShape(long_share=1.0)
SHORT_ROWS = RowShape(rows=MANY_ROWS)
SMALL_ROWS = RowShape(small=True)
# Rows of middling lengths, and only long ones.
MIDDLING_ROWS = RowShape(average=MIDDLING[0])
LONG_ROWS = RowShape(long_share=1.0, average=MIDDLING[1])


def vector_widths(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the possible elements of one access, the most first."""
    full = MAX_ACCESS_BYTES // dtype.itemsize
    return (full, full // 2, 1) if full > 2 else (full, 1)


def vector_width(dtype: torch.dtype, *alignments: int) -> int:
    """Return the widest vector (elements) that divides every alignment given in elements."""
    for width in vector_widths(dtype):
        if not any(alignment % width for alignment in alignments):
            return width
    return 1


# Tiles (lanes, times) of full vectors; narrower vectors, for odd widths and strides, have one
# vector a lane. Measured on an H200 over the core suite (docs/explanation/notes/csr.md).
_FULL_TILES = {
    torch.float32: ((4, 2), (8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (32, 1), (32, 2)),
    torch.float16: ((4, 1), (8, 1), (8, 2), (16, 1), (16, 2), (32, 1)),
    torch.bfloat16: ((4, 1), (8, 1), (8, 2), (16, 1), (16, 2), (32, 1)),
    torch.float64: ((8, 1), (16, 1), (32, 1)),
}
# More tiles of 16-bit types, for rows of known lengths.
_MORE_TILES = {torch.float16: ((8, 4), (16, 4)), torch.bfloat16: ((8, 4), (16, 4))}
_NARROW_LANES = (8, 32)
# Columns of B up to which a group reads entries side by side, and its lanes; lanes that keep a
# quarter of an H200 busy.
FEW_COLUMNS = 16
_SIDE_LANES = (2, 4, 8, 32)
FULL_LANES = 65_536
# Tiles (vector, lanes, times) of small products, by bytes of an element; all have SMALL_LANES.
SMALL_TILES = {
    4: ((4, 8, 1), (4, 8, 2)),
    2: ((4, 8, 1), (8, 8, 1), (8, 8, 2)),
}
_BUNDLE_TILES = {
    torch.float32: ((8, 1), (16, 1), (16, 2), (32, 2)),
    torch.float16: ((4, 1), (8, 1), (16, 1)),
    torch.bfloat16: ((4, 1), (8, 1), (16, 1)),
}


def _is_small(dtype: torch.dtype, tile: RowTile) -> bool:
    """Whether there is a kernel for small products with this tile."""
    return (tile.vector, tile.lanes, tile.times) in SMALL_TILES.get(dtype.itemsize, ())


def narrow_tiles(dtype: torch.dtype) -> Iterator[RowTile]:
    """Yield the tiles of few columns, whose entries are read side by side."""
    for place, vector in enumerate(vector_widths(dtype)):
        for across in (1, 2, 4) if place == 0 else (1, 4, 8) if vector == 1 else (1, 4):
            for lanes in _SIDE_LANES if vector * across <= FEW_COLUMNS else ():
                if lanes > across and (lanes > 2 or vector == 1) and (across < 8 or lanes == 32):
                    yield RowTile(vector, lanes, 1, lanes // across)


def choose_narrow_tile(
    dtype: torch.dtype, n: int, vector: int, rows: int, mean: float
) -> RowTile | None:
    """Return the tile for few columns; None for more.

    Few lanes for a row waste none, and its warp works on more rows; but rows must be enough to keep
    the GPU busy, and a long one should take few rounds of loads. Eight lanes are usually best; at
    N = 1 two are for short rows, 2.1 against 4.4 us with 52,000 rows of 4 entries, 3.7 against 3.1
    with 25,000 of 5 (H200).
    """
    if n > FEW_COLUMNS:
        return None
    fitting = [tile for tile in narrow_tiles(dtype) if tile.vector == vector and tile.slab >= n]
    if not fitting:
        return None
    slab = min(tile.slab for tile in fitting)
    *others, most = (tile for tile in fitting if tile.slab == slab)
    for tile in others:
        rounds = mean / (tile.parts * narrow_in_flight(tile))
        full = rows * tile.lanes / FULL_LANES
        if rounds <= 1 and full >= (1.25 if tile.lanes == 2 else 4):
            return tile
        if tile.lanes == 8 and (full >= 1 / 4 if rounds <= 2 else full >= 2 and rounds <= 16):
            return tile
    return most


def narrow_in_flight(tile: RowTile) -> int:
    """Entries of a lane that are in flight at once: short rows have no more."""
    return 2 if tile.lanes == 4 else 4


def _full(dtype: torch.dtype, vector: int) -> bool:
    return vector * dtype.itemsize == MAX_ACCESS_BYTES


def _covering(tiles: tuple[tuple[int, int], ...], vectors: int) -> int:
    """Return the fewest lanes, with one vector each, that cover a row, or the most lanes."""
    lanes = sorted(lanes for lanes, times in tiles if times == 1)
    return next((count for count in lanes if count >= vectors), lanes[-1])


def _wishes(dtype: torch.dtype, vectors: int, shape: RowShape) -> list[tuple[int, int]]:
    """Tiles in order of preference for rows of ``vectors`` full vectors."""
    if dtype.itemsize == 2:
        if vectors < 32:
            return [(8, 2)]
        if shape.long:
            return [(32, 1)]
        if 0 < shape.average < MIDDLING[0]:
            return [(8, 4), (16, 2), (8, 2)]
        if 0 < shape.average < MIDDLING_SHORT and shape.rows >= MIDDLING_LEAST:
            return [(16, 4), (16, 2), (8, 2)]
        return [(16, 2), (8, 2)]
    if dtype is not torch.float32:
        return []
    if vectors <= 8:
        many = shape.mean <= VERY_SHORT_ROW and shape.rows >= VERY_MANY_ROWS
        return [(4, 2)] if many else []
    if shape.long_share >= LONG_SHARE:
        return [(32, 2)] if vectors >= 64 else [(16, 2)] if shape.average else []
    if vectors >= 64 or shape.short:
        return [(8, 4), (8, 2)]
    return [(16, 2), (8, 2)]


def may_reload(cols: int, row_bytes: int, l2: int) -> bool:
    """Whether narrow slabs of B would fit L2 where wide ones do not."""
    wide = cols * min(row_bytes, WIDE_SLAB_BYTES)
    return wide > l2 and cols * SLAB_BYTES <= 0.85 * l2


def choose_tile(
    dtype: torch.dtype,
    n: int,
    vector: int,
    shape: RowShape,
    *,
    cols: int = 0,
    l2: int = 0,
    args: bool = False,
    plain_sum: bool = False,
) -> RowTile:
    """Return the tile for rows of ``n`` columns read ``vector`` elements at a time.

    Short rows get few lanes with several vectors each, so that a warp works on several rows; long
    ones get a warp each. If a wide slab of B (``cols`` rows) is over the L2 cache of ``l2`` bytes,
    its rows come in no local order, and a slab of 128 bytes a row fits, the slab is that narrow:
    gathers from L2 run at twice DRAM's speed. With ``args``, the winners of an extremum take as
    many registers as its values, so a lane has only one vector. Only a ``plain_sum`` of
    ``spmm_csr`` reads entries side by side.
    """
    narrow = choose_narrow_tile(dtype, n, vector, shape.rows, shape.mean) if plain_sum else None
    if narrow is not None:
        return narrow
    if not _full(dtype, vector):
        lanes = next((a for a in _NARROW_LANES if a * vector >= n), _NARROW_LANES[-1])
        return RowTile(vector, lanes)
    if shape.slab_reloads >= MANY_RELOADS and may_reload(cols, n * dtype.itemsize, l2):
        return RowTile(vector, SLAB_BYTES // MAX_ACCESS_BYTES)
    vectors = -(-n // vector)
    if shape.small and not args:
        for tile in SMALL_TILES.get(dtype.itemsize, ()):
            if RowTile(*tile).slab == n:
                return RowTile(*tile)
    tiles = _FULL_TILES[dtype]
    few_middling = shape.middling and shape.rows < MIDDLING_MOST
    if few_middling and dtype.itemsize == 2 and n == 32 and not args:
        return RowTile(*SMALL_TILES[2][0])
    for lanes, times in [] if args else _wishes(dtype, vectors, shape):
        if vectors % (lanes * times) == 0 and n % vector == 0:
            return RowTile(vector, lanes, times)
    return RowTile(vector, _covering(tiles, vectors))


def choose_bundle_tile(dtype: torch.dtype, n: int, vector: int, items: int) -> RowTile:
    """Return the tile for ``items`` bundles of rows, or pieces of them.

    Every lane needs all values of an element, so a lane should have many columns; the registers of
    four rows of sums limit them.
    """
    if not _full(dtype, vector):
        return RowTile(vector, _NARROW_LANES[0])
    vectors = -(-n // vector)
    for lanes, times in ((32, 2), (16, 2)):
        fits = (lanes, times) in _BUNDLE_TILES[dtype] and vectors % (lanes * times) == 0
        enough = lanes < 32 or items * (vectors // (lanes * times)) >= BUNDLE_WARPS
        if fits and enough and n % vector == 0:
            return RowTile(vector, lanes, times)
    return RowTile(vector, _covering(_BUNDLE_TILES[dtype], vectors))


def _is_middling(tile: RowTile, shape: RowShape) -> bool:
    """Whether rows of middling lengths have eight rows of B in flight, also at their ends."""
    return shape.middling and (tile.vector, tile.lanes, tile.times) == (4, 8, 1)


def _in_flight(dtype: torch.dtype, tile: RowTile, shape: RowShape) -> int:
    """Rows of B that a group has in flight in whole chunks."""
    if tile.parts > 1:
        return narrow_in_flight(tile)
    few_long = shape.short and shape.long_share < 0.5
    if (shape.small or _is_middling(tile, shape)) and tile.times == 1:
        return SMALL_IN_FLIGHT
    if dtype.itemsize == 2 and tile.lanes == 32 and shape.long:
        return 8
    if tile.times == 1:
        return 8 if tile.lanes == 8 and dtype.itemsize >= 4 and not shape.uniform else 4
    if tile.times == 4 or (dtype.itemsize == 2 and (tile.lanes == 16 or few_long)):
        return 2
    return 4


def _min_blocks(
    dtype: torch.dtype, tile: RowTile, in_flight: int, args: bool, shared: bool = False
) -> int:
    """Blocks an SM should hold: limits the registers without spills."""
    if args:
        return 4 if dtype.itemsize == 2 else 5
    if dtype.itemsize == 2 and tile.times == 4:
        return 4 if shared else 5
    if tile.times == 4 or (dtype.itemsize == 2 and tile.times > 1):
        return 7 if tile.lanes == 8 and tile.times == 2 and in_flight == 2 else 6
    if dtype.itemsize == 2 or in_flight > 4 or (tile.times > 1 and tile.lanes > 4):
        return 7
    return 8


def _bundle_blocks(tile: RowTile) -> int:
    return 4 if tile.times > 1 else 5


def spmm_config(
    dtype: torch.dtype,
    tile: RowTile,
    weighted: bool,
    *,
    out_dtype: torch.dtype | None = None,
    extremum: bool = False,
    args: int = 0,
    bundles: bool = False,
    repair: bool = False,
    shape: RowShape = MIXED_ROWS,
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_csr.cu``; ``args`` are bytes of a winner's place, if one is wanted."""
    plain_sum = not (extremum or bundles or repair)
    narrow = tile.parts > 1
    small = shape.small and plain_sum and (narrow or _is_small(dtype, tile))
    shape = replace(shape, small=small)
    in_flight = 4 if bundles else _in_flight(dtype, tile, shape)
    shared = small or (plain_sum and not narrow and shape.shared)
    blocks = _min_blocks(dtype, tile, in_flight, args > 0, shared)
    blocks = _bundle_blocks(tile) if bundles else blocks
    partial = SMALL_PARTIAL if small or (plain_sum and _is_middling(tile, shape)) else 4
    return {
        **element_types(dtype, out_dtype),
        "kVec": tile.vector,
        "kLanes": tile.lanes,
        "kTimes": tile.times,
        "kParts": tile.parts,
        "kUnroll": in_flight,
        "kPartial": min(in_flight, partial),
        "kThreads": THREADS,
        "kMinBlocks": max(blocks * 128 // THREADS, 1),
        "kExtremum": extremum,
        "kArgs": args,
        "kRows": BUNDLE_ROWS if bundles else 1,
        "kWeighted": weighted,
        "kRepair": repair,
        "kShared": shared,
        "kHeads": small and not narrow and SMALL_HEADS,
    }


SDDMM_LANES = 8


def sddmm_tile(dtype: torch.dtype, n: int, vector: int) -> RowTile:
    """Return the tile of a sampled product: few lanes, whose sums need few shuffles."""
    times = -(-n // (vector * SDDMM_LANES))
    most = 4 if _full(dtype, vector) and dtype.itemsize > 2 else 2
    return RowTile(vector, SDDMM_LANES, next(t for t in (1, 2, 4) if t >= min(times, most)))


def sddmm_config(dtype: torch.dtype, tile: RowTile) -> dict[str, ConfigValue]:
    """Constants of ``sddmm_csr.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "kVec": tile.vector,
        "kLanes": tile.lanes,
        "kTimes": tile.times,
        "kUnroll": 4 if tile.times < 4 else 2,
        "kThreads": THREADS,
        "kMinBlocks": 5,
    }


def row_tiles(dtype: torch.dtype) -> Iterator[RowTile]:
    """Yield the tiles of rows."""
    full, *narrow = vector_widths(dtype)
    for lanes, times in _FULL_TILES[dtype]:
        yield RowTile(full, lanes, times)
    for vector, lanes in itertools.product(narrow, _NARROW_LANES):
        yield RowTile(vector, lanes)


def scheduled_tiles(dtype: torch.dtype) -> Iterator[RowTile]:
    """Yield the tiles of rows of known lengths."""
    yield from row_tiles(dtype)
    for lanes, times in _MORE_TILES.get(dtype, ()):
        yield RowTile(vector_widths(dtype)[0], lanes, times)


def bundle_tiles(dtype: torch.dtype) -> Iterator[RowTile]:
    """Yield the tiles of bundles of rows."""
    full, *narrow = vector_widths(dtype)
    for lanes, times in _BUNDLE_TILES.get(dtype, ()):
        yield RowTile(full, lanes, times)
    for vector in narrow if dtype in _BUNDLE_TILES else ():
        yield RowTile(vector, _NARROW_LANES[0])


def element_types(dtype: torch.dtype, out_dtype: torch.dtype | None) -> dict[str, ConfigValue]:
    """Types of operands and of C; C has the operands' if ``out_dtype`` is None."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "OUTPUT": ELEMENTS[dtype if out_dtype is None else out_dtype],
    }


def out_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Types of a product's result: its own, and float32 for the 16-bit ones."""
    return (dtype, torch.float32) if dtype.itemsize == 2 else (dtype,)


def _spmm_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, weighted in itertools.product(ELEMENTS, (True, False)):
        for tile in scheduled_tiles(dtype):
            plain = (MIXED_ROWS, SHORT_ROWS, MIDDLING_ROWS, LONG_ROWS)
            shapes = (*plain, SMALL_ROWS, *(replace(shape, shared=True) for shape in plain))
            for out, shape in itertools.product(out_dtypes(dtype), shapes):
                yield spmm_config(dtype, tile, weighted, out_dtype=out, shape=shape)
            yield spmm_config(dtype, tile, weighted, extremum=True)
            if tile.times == 1:
                for args in PLACES.values():
                    yield spmm_config(dtype, tile, weighted, extremum=True, args=args)
            for out in out_dtypes(dtype) if tile.lanes == 32 and tile.times == 1 else ():
                yield spmm_config(dtype, tile, weighted, out_dtype=out, repair=True)
        for tile, out, shape in itertools.product(
            narrow_tiles(dtype), out_dtypes(dtype), (MIXED_ROWS, SMALL_ROWS)
        ):
            yield spmm_config(dtype, tile, weighted, out_dtype=out, shape=shape)
        for tile, out in itertools.product(bundle_tiles(dtype), out_dtypes(dtype)):
            yield spmm_config(dtype, tile, weighted, out_dtype=out, bundles=True)


def _sddmm_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype in ELEMENTS:
        for vector, n in itertools.product(vector_widths(dtype), (8, 64, 128)):
            yield sddmm_config(dtype, sddmm_tile(dtype, n, vector))


SPMM_CSR = KernelSpec(
    file="rows/spmm_csr.cu",
    params=ParamStruct.of(
        pointer("items", "const int4*"),
        pointer("columns", "const int*"),
        pointer("values", "const E::Storage*"),
        pointer("heads", "const int*", "kHeads: column of each thread's first entry"),
        *OPERANDS,
        *BUNDLES,
        *STRIDES,
        *TREE,
        *EPILOGUE,
        *SECTIONS,
        i32("n"),
        i32("slabs"),
        i32("slab_fast", "grid.x counts slabs within blocks of items"),
        i32("early", "let the next kernel start as soon as all blocks are running"),
    ),
    configs=_spmm_configs,
    shared_memory=True,
)
SDDMM_CSR = KernelSpec(
    file="rows/sddmm_csr.cu",
    params=ParamStruct.of(
        pointer("items", "const int4*"),
        pointer("columns", "const int*"),
        pointer("g", "const E::Storage*"),
        pointer("b", "const E::Storage*"),
        pointer("out", "Acc*", "[batch][entries]"),
        i64("g_row_stride"),
        i64("b_row_stride"),
        i64("g_batch_stride"),
        i64("b_batch_stride"),
        i64("out_batch_stride"),
        *SECTIONS,
        i32("n"),
    ),
    configs=_sddmm_configs,
)
