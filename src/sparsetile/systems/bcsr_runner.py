"""Launches of ``spmm_bcsr``: from a plan's tensors to kernel parameters and tensor maps.

Parts, in order: block rows longest first, each with its first block and how many it has;
block_col_idx; row order (empty: the given one); place of each entry in the blocks; row pointers;
then, where some cell of a block holds no entry, the parts of the exact system that repairs C.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.formats.cells import checked_values, scatter_cells
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import PreparedLaunch, current_stream_handle, on_device
from sparsetile.jit.tensor_map import MAP_WORDS, NO_MAP, TensorMap, encode_matrix
from sparsetile.kernels.bcsr import (
    BLOCK,
    BOX,
    SLABS_TOGETHER,
    SPMM_BCSR,
    STORE_BOX,
    STORE_COLUMNS,
    BlockTile,
    bcsr_config,
    choose_block_tile,
)
from sparsetile.systems.base import PLAIN, Epilogue, Runner
from sparsetile.systems.bound import BoundProduct
from sparsetile.systems.csr_runner import CSRRunner
from sparsetile.systems.finish import finish
from sparsetile.systems.geometry import batch_count
from sparsetile.systems.thread_context import enter

__all__ = ["BCSRRunner"]

_WORK, _IDX, _ORDER, _PLACES, _INDPTR, _EXACT = range(6)
# Fields of the parameter struct that change from call to call, after A's map: those of B and C,
# and c.
_OPERANDS = struct.Struct(f"@{2 * MAP_WORDS}QP")
_OPERANDS_OFFSET = 8 * MAP_WORDS
# Addresses and strides that the copy engine and 16-byte stores take.
_STEP_BYTES = 16
# Tensor maps that a runner keeps: those of the B's and C's in use, each some hundred bytes.
_KEPT_MAPS = 512

# Address -> map of the matrix there.
MapOf = Callable[[int], TensorMap]


@dataclass(frozen=True)
class Launch:
    """A loaded kernel with what depends on the width alone."""

    kernel: LoadedKernel
    tile: BlockTile
    grid: tuple[int, int, int]


class PreparedBlocks:
    """A launch for matrices like one B: each address of B and C has a tensor map of its own."""

    def __init__(self, launch: PreparedLaunch, map_of_b: MapOf, map_of_c: MapOf) -> None:
        self._launch = launch.launch
        self._map_of_b = map_of_b
        self._map_of_c = map_of_c

    def launch(self, stream: int, *fields: int) -> None:
        """Multiply B, at the first address, into C, at the second."""
        b, c = fields
        self._launch(stream, *self._map_of_b(b), *self._map_of_c(c), c)


def _aligned(matrix: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    size = matrix.element_size()
    strides = (stride * size for stride in matrix.stride()[:-1])
    return not any(at % _STEP_BYTES for at in (matrix.data_ptr(), *strides))


def _copies_well(matrix: Tensor) -> bool:
    """Whether the copy engine takes B, or C, as it is."""
    return _aligned(matrix) and matrix.stride(-2) >= matrix.shape[-1]


def _stores_well(out: Tensor, bulk: bool) -> bool:
    """Whether C is written in place.

    By the copy engine if ``bulk``; else eight neighbouring columns at once, from every eighth on.
    """
    return _copies_well(out) if bulk else _aligned(out) and out.shape[-1] % STORE_COLUMNS == 0


def _no_map(pointer: int) -> TensorMap:
    return NO_MAP


def _padded_like(matrix: Tensor) -> Tensor:
    """Uninitialised memory of the same shape; rows have room for whole groups of columns."""
    width = -(-matrix.shape[-1] // STORE_COLUMNS) * STORE_COLUMNS
    return matrix.new_empty((*matrix.shape[:-1], width))[..., : matrix.shape[-1]]


class BCSRRunner(Runner):
    """See the module's text for the parts. Packed: A's blocks [blocks, 64, 64]."""

    packs = True

    def __init__(self, meta: Mapping[str, Any], exact: CSRRunner | None) -> None:
        super().__init__(meta)
        self._blocks = int(meta["blocks"])
        self._block_rows = -(-self.rows // BLOCK)
        self._exact = exact
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self._encode = functools.lru_cache(maxsize=_KEPT_MAPS)(encode_matrix)

    def pack(self, parts: Sequence[Tensor], values: Tensor | None, dtype: torch.dtype) -> Tensor:
        places = parts[_PLACES]
        values = checked_values(values, self.nnz, dtype, places.device)
        packed = scatter_cells(values, places, self._blocks * BLOCK**2)
        return packed.reshape(self._blocks, BLOCK, BLOCK)

    def _launch_for(
        self, dtype: torch.dtype, out_dtype: torch.dtype, n: int, device: int
    ) -> Launch:
        key = (dtype, out_dtype, n, device)
        found = self._launches.get(key)
        if found is None:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            tile = choose_block_tile(n, self._block_rows, processors)
            config = bcsr_config(dtype, tile, out_dtype=out_dtype)
            kernel = SPMM_BCSR.load(config, device, tile.shared_bytes)
            grid = tile.grid(n, self._block_rows, processors)
            found = self._launches[key] = Launch(kernel, tile, grid)
        return found

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        if n and self.rows:
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._launch_for(dtype, dtype, n, index)
            if self._exact is not None:
                self._exact.prepare_repair(n, dtype, weighted, device)

    def _block_map(self, packed: Tensor) -> TensorMap:
        """Map of A's blocks, one below the other."""
        if not self._blocks:
            return NO_MAP
        shape = (self._blocks * BLOCK, BLOCK)
        row_bytes = BLOCK * packed.element_size()
        return self._encode(packed.data_ptr(), packed.dtype, shape, row_bytes, BOX)

    def _map_of(
        self, dtype: torch.dtype, shape: tuple[int, int], row_stride: int, box: tuple[int, int]
    ) -> MapOf:
        """Address -> map of a matrix there."""
        row_bytes, encode = row_stride * dtype.itemsize, self._encode
        return lambda pointer: encode(pointer, dtype, shape, row_bytes, box)

    def _map_of_b(self, B: Tensor) -> MapOf:
        """Address -> map of a matrix there that is laid out as those of B."""
        if not self._blocks:
            return _no_map
        return self._map_of(B.dtype, (B.shape[-2], B.shape[-1]), B.stride(-2), BOX)

    def _map_of_c(self, dtype: torch.dtype, n: int, row_stride: int, bulk: bool) -> MapOf:
        if not bulk:
            return _no_map
        return self._map_of(dtype, (self.rows, n), row_stride, STORE_BOX)

    @staticmethod
    def _stores_in_bulk(parts: Sequence[Tensor], out_dtype: torch.dtype) -> bool:
        """Whether C leaves by the copy engine: 16 bits, whose rows lie in the plan's order."""
        return out_dtype.itemsize == 2 and not parts[_ORDER].numel()

    def _params(
        self,
        parts: Sequence[Tensor],
        tile: BlockTile,
        n: int,
        c_row_stride: int,
        bulk: bool,
        epilogue: Epilogue,
    ) -> tuple[int | float, ...]:
        """Fields of the struct after the maps and c."""
        bias, order = epilogue.bias, parts[_ORDER]
        return (
            parts[_WORK].data_ptr(), parts[_IDX].data_ptr(),
            order.data_ptr() if order.numel() else 0,
            parts[_INDPTR].data_ptr() if epilogue.mean else 0,
            0 if bias is None else bias.data_ptr(),
            c_row_stride,
            epilogue.alpha, epilogue.beta,
            self.rows, n, self._block_rows, tile.slabs(n), SLABS_TOGETHER, bulk,
            not epilogue.plain, epilogue.relu,
        )  # fmt: skip

    def spmm(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        packed: Tensor | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        if B.shape[-1] == 0 or self.rows == 0 or batch_count(B) == 0:
            return
        if packed is None:
            packed = self.pack(parts, values, B.dtype)
        if self._exact is None:
            self._product(parts, packed, B, out, epilogue)
        elif epilogue.beta == 0.0:
            self._product(parts, packed, B, out, epilogue)
            self._exact.repair(parts[_EXACT:], values, B, out, epilogue)
        else:  # a repair must not find what `out` held added to what is not finite
            product = out.new_empty(out.shape, dtype=torch.float32)
            self._product(parts, packed, B, product, PLAIN)
            self._exact.repair(parts[_EXACT:], values, B, product)
            finish(product, out, parts[_INDPTR], epilogue)

    def _product(
        self, parts: Sequence[Tensor], packed: Tensor, B: Tensor, out: Tensor, epilogue: Epilogue
    ) -> None:
        """All batches, through aligned copies of B and C where they are not aligned themselves."""
        if self._blocks and not _copies_well(B):
            B = _padded_like(B).copy_(B)
        target, bulk = out, self._stores_in_bulk(parts, out.dtype)
        if not _stores_well(out, bulk):
            target = _padded_like(out)
            if epilogue.beta != 0.0:
                target.copy_(out)
        device, n = B.device.index, B.shape[-1]
        launch = self._launch_for(B.dtype, out.dtype, n, device)
        block_map, map_of_b = self._block_map(packed), self._map_of_b(B)
        map_of_c = self._map_of_c(out.dtype, n, target.stride(-2), bulk)
        params = self._params(parts, launch.tile, n, target.stride(-2), bulk, epilogue)
        pairs = [(B, target)] if B.dim() == 2 else list(zip(B, target, strict=True))
        with on_device(device):
            enter(device)
            stream = current_stream_handle(device)
            for one, c in pairs:
                launch.kernel.launch(
                    launch.grid, launch.tile.threads, stream,
                    *block_map, *map_of_b(one.data_ptr()), *map_of_c(c.data_ptr()), c.data_ptr(),
                    *params,
                )  # fmt: skip
        if target is not out:
            out.copy_(target)

    def prepare_launch(
        self, parts: Sequence[Tensor], values: Tensor | None, packed: Tensor | None, B: Tensor
    ) -> PreparedBlocks | None:
        """Return the launch of B -> C, both plain matrices; None where copies are needed."""
        n = B.shape[1]
        if packed is None or not _copies_well(B) or n % STORE_COLUMNS:
            return None
        launch = self._launch_for(B.dtype, B.dtype, n, parts[0].device.index)
        bulk = self._stores_in_bulk(parts, B.dtype)
        params = self._params(parts, launch.tile, n, n, bulk, PLAIN)
        prepared = launch.kernel.prepare(
            launch.grid, launch.tile.threads,
            (*self._block_map(packed), *NO_MAP, *NO_MAP, 0, *params), _OPERANDS, _OPERANDS_OFFSET,
        )  # fmt: skip
        return PreparedBlocks(prepared, self._map_of_b(B), self._map_of_c(B.dtype, n, n, bulk))

    def bind(
        self, parts: Sequence[Tensor], values: Tensor | None, packed: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        if not self.rows or self._exact is not None:
            return None
        return BoundProduct(self, parts, values, packed)
