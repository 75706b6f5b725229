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
# Fields of the parameter struct that change from call to call: B's map and c, after A's map.
_OPERANDS = struct.Struct(f"@{MAP_WORDS}QP")
_OPERANDS_OFFSET = 8 * MAP_WORDS
# Addresses and strides that the copy engine and 16-byte stores take.
_STEP_BYTES = 16
# Tensor maps that a runner keeps: those of the B's in use, each some hundred bytes.
_KEPT_MAPS = 256


@dataclass(frozen=True)
class Launch:
    """A loaded kernel with what depends on the width alone."""

    kernel: LoadedKernel
    tile: BlockTile
    grid: tuple[int, int, int]


class PreparedBlocks:
    """A launch for matrices like one B: each address of B has a tensor map of its own."""

    def __init__(self, launch: PreparedLaunch, encode: Callable[[int], TensorMap]) -> None:
        self._launch = launch.launch
        self._encode = encode

    def launch(self, stream: int, *fields: int) -> None:
        """Multiply B, at the first address, into C, at the second."""
        b, c = fields
        self._launch(stream, *self._encode(b), c)


def _aligned(matrix: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    size = matrix.element_size()
    strides = (stride * size for stride in matrix.stride()[:-1])
    return not any(at % _STEP_BYTES for at in (matrix.data_ptr(), *strides))


def _copies_well(B: Tensor) -> bool:
    """Whether the copy engine takes B as it is."""
    return _aligned(B) and B.stride(-2) >= B.shape[-1]


def _stores_well(out: Tensor) -> bool:
    """Whether eight neighbouring columns of C may be stored at once, from every eighth on."""
    return _aligned(out) and out.shape[-1] % STORE_COLUMNS == 0


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

    def _operand_map(
        self, dtype: torch.dtype, shape: tuple[int, int], row_bytes: int, pointer: int
    ) -> TensorMap:
        """Map of a B at ``pointer``."""
        return self._encode(pointer, dtype, shape, row_bytes, BOX) if self._blocks else NO_MAP

    def _mapped_like(self, B: Tensor) -> Callable[[int], TensorMap]:
        """Address -> map of a matrix there that is laid out as those of B."""
        shape, row_bytes = (B.shape[-2], B.shape[-1]), B.stride(-2) * B.element_size()
        return functools.partial(self._operand_map, B.dtype, shape, row_bytes)

    def _params(
        self,
        parts: Sequence[Tensor],
        tile: BlockTile,
        n: int,
        c_row_stride: int,
        epilogue: Epilogue,
    ) -> tuple[int | float, ...]:
        """Fields of the struct after B's map and c."""
        bias, order = epilogue.bias, parts[_ORDER]
        return (
            parts[_WORK].data_ptr(), parts[_IDX].data_ptr(),
            order.data_ptr() if order.numel() else 0,
            parts[_INDPTR].data_ptr() if epilogue.mean else 0,
            0 if bias is None else bias.data_ptr(),
            c_row_stride,
            epilogue.alpha, epilogue.beta,
            self.rows, n, self._block_rows, tile.slabs(n), SLABS_TOGETHER,
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
        target = out
        if not _stores_well(out):
            target = _padded_like(out)
            if epilogue.beta != 0.0:
                target.copy_(out)
        device, n = B.device.index, B.shape[-1]
        launch = self._launch_for(B.dtype, out.dtype, n, device)
        block_map, map_of = self._block_map(packed), self._mapped_like(B)
        params = self._params(parts, launch.tile, n, target.stride(-2), epilogue)
        pairs = [(B, target)] if B.dim() == 2 else list(zip(B, target, strict=True))
        with on_device(device):
            enter(device)
            stream = current_stream_handle(device)
            for one, c in pairs:
                launch.kernel.launch(
                    launch.grid, launch.tile.threads, stream,
                    *block_map, *map_of(one.data_ptr()), c.data_ptr(), *params,
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
        params = self._params(parts, launch.tile, n, n, PLAIN)
        prepared = launch.kernel.prepare(
            launch.grid, launch.tile.threads,
            (*self._block_map(packed), *NO_MAP, 0, *params), _OPERANDS, _OPERANDS_OFFSET,
        )  # fmt: skip
        return PreparedBlocks(prepared, self._mapped_like(B))

    def bind(
        self, parts: Sequence[Tensor], values: Tensor | None, packed: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        if not self.rows or self._exact is not None:
            return None
        return BoundProduct(self, parts, values, packed)
