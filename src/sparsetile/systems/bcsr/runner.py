"""Launches of ``spmm_bcsr``: from a plan's tensors to kernel parameters and tensor maps.

Tensors: ``work`` (block rows longest first, each with its first block and number of blocks),
``block_row_ptr``, ``block_col_idx``, ``order`` (empty: the given one), ``places`` of the entries in
the blocks, ``indptr``; if some cell of a block has no entry, also those of the exact system that
repairs C, as ``exact.indptr`` and so on.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.device import machine
from sparsetile.engines.request import part
from sparsetile.engines.runner import ExactRunner, Runner
from sparsetile.formats.cells import checked_values, scatter_cells
from sparsetile.formats.values import round_tf32
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import (
    current_stream_handle,
    device_index,
    ensure_cuda_context,
    on_device,
)
from sparsetile.jit.tensor_map import NO_MAP, TensorMap, encode_matrix
from sparsetile.jit.workspace import zeroed_flag
from sparsetile.kernels.bcsr import (
    BLOCK,
    ENGINE,
    FP8,
    PRODUCT,
    SLABS_TOGETHER,
    SPMM_BCSR,
    STORE_BOX,
    STORE_COLUMNS,
    TRANSPOSED_BOX,
    BlockTile,
    Store,
    bcsr_config,
    choose_block_tile,
    out_types,
)
from sparsetile.kernels.linear_few import FEW_TOKENS
from sparsetile.kernels.repair import (
    REPAIR_BLOCKS,
    REPAIR_STRIDED,
    REPAIR_THREADS,
    repair_config,
)
from sparsetile.kernels.tf32_operand import VECTOR
from sparsetile.launch.bound import BoundLinear, BoundProduct
from sparsetile.launch.epilogue import apply_epilogue, epilogue_params, row_bias_params
from sparsetile.launch.geometry import ACCESS_BYTES, batch_count, padded_like
from sparsetile.launch.interface import PLAIN, Epilogue, Prepared, Tensors
from sparsetile.systems.bcsr.engine import (
    MapOf,
    copies_well,
    described,
    no_map,
    side_by_side,
    stores_well,
    transposed_well,
)
from sparsetile.systems.bcsr.few import FewTokens
from sparsetile.systems.bcsr.launch import Launch, queue_at
from sparsetile.systems.bcsr.tf32_operand import OperandCopies, columns_at_once, copy_stride

__all__ = ["BCSRRunner"]

# Tensor maps that a runner keeps: those of B and C in use, each some hundred bytes.
_KEPT_MAPS = 512


class BCSRRunner(Runner):
    """Packed ``blocks``: A's blocks [blocks, 64, 64], float32 rounded to TF32."""

    packed_names = ("blocks",)
    pack_only = ("places",)

    def __init__(self, meta: Mapping[str, Any], exact: ExactRunner | None) -> None:
        super().__init__(meta)
        self._blocks = int(meta["blocks"])
        self._block_rows = -(-self.rows // BLOCK)
        self._exact = exact
        self.reads_values = exact is not None
        self._step = int(meta["step"])
        self._columns: int | None = meta["columns"]
        # Gate and up of a SwiGLU: ``rows`` are those of the result, half of A's.
        self._paired = bool(meta.get("paired", False))
        # Steps of the ladder take row-major operands.
        self.any_strides = self.fuses_linear = self._step == PRODUCT
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self._repairs: dict[tuple[Any, ...], LoadedKernel] = {}
        self._copies = OperandCopies()
        self._few = FewTokens(self.rows, self.cols, self._blocks, BLOCK)
        encode = encode_matrix if self._step >= ENGINE else described
        self._encode = functools.lru_cache(maxsize=_KEPT_MAPS)(encode)

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        places = tensors["places"]
        values = checked_values(values, self.nnz, dtype, places.device)
        if dtype is torch.float32:
            values = round_tf32(values)
        packed = scatter_cells(values, places, self._blocks * BLOCK**2)
        return {"blocks": packed.reshape(self._blocks, BLOCK, BLOCK)}

    def _launch_for(
        self, dtype: torch.dtype, out_dtype: torch.dtype, n: int, k_major: bool, device: int
    ) -> Launch:
        key = (dtype, out_dtype, n, k_major, device)
        found = self._launches.get(key)
        if found is None:
            facts = machine(torch.device("cuda", device))
            processors, rows = facts.processors, self._block_rows
            tile = choose_block_tile(n, rows, processors, dtype, self._columns)
            tile = replace(tile.at_step(self._step), paired=self._paired)
            config = bcsr_config(dtype, tile, out_dtype=out_dtype, k_major=k_major)
            kernel = SPMM_BCSR.load(config, device, tile.shared_bytes)
            queued = tile.queues(n, rows, self.cols, processors, facts.l2_bytes)
            grid = tile.grid(n, rows, processors)
            found = self._launches[key] = Launch(kernel, tile, grid, queued)
        return found

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        if n and self.rows:
            index = device_index(device)
            if dtype is torch.float32:
                self._copies.load(False, VECTOR, index)
                n = min(n, columns_at_once(self.cols))
            self._launch_for(dtype, out_types(dtype)[0], n, dtype.itemsize != 2, index)
            if self._exact is not None:
                self._exact.prepare_repair(n, dtype, weighted, device)
                self._strided_repair(dtype, dtype, weighted, index)

    def _block_map(self, packed: Tensor, tile: BlockTile) -> TensorMap:
        """Map of A's blocks, one below the other."""
        if not self._blocks:
            return NO_MAP
        shape = (self._blocks * BLOCK, BLOCK)
        row_bytes = BLOCK * packed.element_size()
        return self._encode(packed.data_ptr(), packed.dtype, shape, row_bytes, tile.block_box)

    def _map_of(
        self, dtype: torch.dtype, shape: tuple[int, int], row_stride: int, box: tuple[int, int]
    ) -> MapOf:
        """Return a function from an address to the map of a matrix there."""
        row_bytes, encode = row_stride * dtype.itemsize, self._encode
        return lambda pointer: encode(pointer, dtype, shape, row_bytes, box)

    def _map_of_b(self, B: Tensor, tile: BlockTile, k_major: bool) -> MapOf:
        """The same for a matrix with the layout of B, or of its copy."""
        if not self._blocks:
            return no_map
        if B.dtype is torch.float32:
            shape, stride = (B.shape[-1], self.cols), copy_stride(self.cols)
            return self._map_of(B.dtype, shape, stride, tile.box(True))
        rows = B.mT if k_major else B
        shape = (rows.shape[-2], rows.shape[-1])
        return self._map_of(B.dtype, shape, rows.stride(-2), tile.box(k_major))

    def _map_of_c(self, dtype: torch.dtype, n: int, stride: int, store: Store) -> MapOf:
        if store in (Store.BY_THREADS, Store.TRANSPOSED_BY_THREADS):
            return no_map
        if store is Store.TRANSPOSED:
            return self._map_of(dtype, (n, self.rows), stride, TRANSPOSED_BOX)
        return self._map_of(dtype, (self.rows, n), stride, STORE_BOX)

    def _engine_stores(self, tensors: Tensors, out_dtype: torch.dtype) -> bool:
        """Whether TMA stores C: 16 bits, rows in the plan's order."""
        return self._step >= ENGINE and out_dtype.itemsize == 2 and not tensors["order"].numel()

    def _store_of(self, tensors: Tensors, out: Tensor) -> Store:
        if out.dtype is torch.float32 and out.stride(-1) != 1 and out.stride(-2) == 1:
            return Store.TRANSPOSED_BY_THREADS
        if not self._engine_stores(tensors, out.dtype):
            return Store.BY_THREADS
        transposed = out.stride(-1) != 1 and stores_well(out.mT)
        return Store.TRANSPOSED if transposed else Store.BY_ENGINE

    def _params(
        self, tensors: Tensors, tile: BlockTile, n: int, c_stride: int, store: Store,
        epilogue: Epilogue, spoilt: Tensor | None = None, silu: bool = False,
    ) -> dict[str, int | float]:  # fmt: skip
        """Parameters beside the maps and C's address."""
        shared = epilogue_params(epilogue)
        return {
            "work": tensors["work"].data_ptr(),
            "block_col_idx": tensors["block_col_idx"].data_ptr(),
            "order": tensors["order"].data_ptr(), "indptr": tensors["indptr"].data_ptr(),
            **row_bias_params(epilogue),
            "spoilt": 0 if spoilt is None else spoilt.data_ptr(), "queue": 0, "c_stride": c_stride,
            "rows": self.rows, "n": n, "block_rows": self._block_rows, "slabs": tile.slabs(n),
            "together": SLABS_TOGETHER, "silu": silu, "store": store, **shared,
            "epilogue": bool(shared["epilogue"]) or silu,
        }  # fmt: skip

    def spmm(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        if B.shape[-1] == 0 or self.rows == 0 or batch_count(B) == 0:
            return
        if packed is None:
            packed = self.pack(tensors, values, B.dtype)
        blocks = packed["blocks"]
        if self._exact is None:
            self._product(tensors, blocks, B, out, epilogue)
            return
        exact = part("exact", tensors)
        # Set if a sum was not finite; only then a repair reads C. It begins at 0 in each product
        # and is shared with no other thread or stream.
        device = B.device.index
        spoilt = zeroed_flag(device, current_stream_handle(device))
        if epilogue.beta == 0.0:
            self._product(tensors, blocks, B, out, epilogue, spoilt)
            self._repair(exact, values, B, out, epilogue, spoilt)
        else:  # a repair must not find the old `out` added to non-finite sums
            product = out.new_empty(out.shape, dtype=torch.float32)
            self._product(tensors, blocks, B, product, PLAIN, spoilt)
            self._repair(exact, values, B, product, PLAIN, spoilt)
            apply_epilogue(product, out, tensors["indptr"], epilogue)

    def linear(
        self, tensors: Tensors, blocks: Tensor, X: Tensor, Y: Tensor, epilogue: Epilogue,
        silu: bool = False,
    ) -> None:  # fmt: skip
        """Write activation(X·Aᵀ + bias) into Y [tokens, rows], for a layer whose blocks are full.

        ``silu`` follows the bias. With ``paired`` in the plan's facts ``work`` alternates block
        rows of the gate and of up, and Y is silu(gate) · up.
        """
        self._product(tensors, blocks, X.mT, Y.mT, epilogue, silu=silu)

    def _repair(
        self, exact: Tensors, values: Tensor | None, B: Tensor, out: Tensor, epilogue: Epilogue,
        spoilt: Tensor,
    ) -> None:  # fmt: skip
        """Recompute non-finite elements, only from A's entries: row-major operands like csr, others
        element by element."""
        assert self._exact is not None  # checked by the caller
        if epilogue.row_bias is None and side_by_side(B) and side_by_side(out):
            self._exact.repair(exact, values, B, out, epilogue, spoilt)
            return
        device = B.device.index
        params: dict[str, Any] = {
            "flag": spoilt.data_ptr(),
            "columns": exact["columns"].data_ptr(),
            "values": 0 if values is None else values.data_ptr(),
            "indptr": exact["indptr"].data_ptr(),
            **row_bias_params(epilogue),
            "b_row_stride": B.stride(-2), "b_column_stride": B.stride(-1),
            "c_row_stride": out.stride(-2), "c_column_stride": out.stride(-1),
            "rows": self.rows, "n": B.shape[-1],
            **epilogue_params(epilogue),
        }  # fmt: skip
        kernel = self._strided_repair(B.dtype, out.dtype, values is not None, device)
        grid = (REPAIR_BLOCKS * machine(B.device).processors, 1, 1)
        pairs = [(B, out)] if B.dim() == 2 else list(zip(B, out, strict=True))
        with on_device(device):
            stream = current_stream_handle(device)
            for one, c in pairs:
                params |= {"b": one.data_ptr(), "c": c.data_ptr()}
                kernel.launch(grid, REPAIR_THREADS, stream, params)

    def _strided_repair(
        self, dtype: torch.dtype, out_dtype: torch.dtype, weighted: bool, device: int
    ) -> LoadedKernel:
        key = (dtype, out_dtype, weighted, device)
        if key not in self._repairs:
            config = repair_config(dtype, out_dtype, weighted)
            self._repairs[key] = REPAIR_STRIDED.load(config, device)
        return self._repairs[key]

    def _takes_few(
        self, tensors: Tensors, B: Tensor, out: Tensor | None, epilogue: Epilogue
    ) -> bool:
        """Whether this is a linear layer of few tokens, whose kernel reads the blocks once."""
        return (
            B.shape[-1] <= FEW_TOKENS
            and self._step == PRODUCT
            and self._columns is None
            and not epilogue.mean
            and "block_row_ptr" in tensors  # missing in older plan files
            and (out is None or out.stride(-2) == 1)
            and FewTokens.takes(B.mT)
            and not self._few.reasons(B.dtype, B.device)
        )

    def _few_tokens(
        self, tensors: Tensors, blocks: Tensor, B: Tensor, out: Tensor, epilogue: Epilogue,
        spoilt: Tensor | None,
    ) -> None:  # fmt: skip
        lists = (tensors["block_row_ptr"], tensors["block_col_idx"])
        pairs = [(B, out)] if B.dim() == 2 else list(zip(B, out, strict=True))
        for one, c in pairs:
            self._few.run(
                lists, blocks, one.mT, c.mT, epilogue, order=tensors["order"], spoilt=spoilt
            )

    def _product(
        self, tensors: Tensors, blocks: Tensor, B: Tensor, out: Tensor, epilogue: Epilogue,
        spoilt: Tensor | None = None, silu: bool = False,
    ) -> None:  # fmt: skip
        """All batches, through copies of B and C that the kernel does not support."""
        if self._takes_few(tensors, B, out, epilogue):
            self._few_tokens(tensors, blocks, B, out, epilogue, spoilt)
            return
        n, tf32 = B.shape[-1], B.dtype is torch.float32
        if tf32 and n > (step := columns_at_once(self.cols)):
            for at in range(0, n, step):
                some = slice(at, at + step)
                bias = None if epilogue.bias is None else epilogue.bias[some]
                piece = replace(epilogue, bias=bias)
                self._product(tensors, blocks, B[..., some], out[..., some], piece, spoilt, silu)
            return
        k_major = tf32 or transposed_well(B)
        # The only layout in which Tensor Cores take FP8, and that gate and up are compiled for.
        if (B.dtype is FP8 or self._paired) and not k_major:
            B, k_major = padded_like(B.mT, ACCESS_BYTES).copy_(B.mT).mT, True
        if self._blocks and not k_major and not copies_well(B):
            B = padded_like(B, STORE_COLUMNS).copy_(B)
        target, store = out, self._store_of(tensors, out)
        if store < Store.TRANSPOSED and not stores_well(out):
            target = padded_like(out, STORE_COLUMNS)
            if epilogue.beta != 0.0:
                target.copy_(out)
        device = B.device.index
        launch = self._launch_for(B.dtype, out.dtype, n, k_major, device)
        map_of_b = self._map_of_b(B, launch.tile, k_major)
        stride = target.stride(-1 if store >= Store.TRANSPOSED else -2)
        map_of_c = self._map_of_c(out.dtype, n, stride, store)
        params: dict[str, Any] = self._params(
            tensors, launch.tile, n, stride, store, epilogue, spoilt, silu
        )
        pairs = [(B, target)] if B.dim() == 2 else list(zip(B, target, strict=True))
        with on_device(device):
            ensure_cuda_context(device)  # the first tensor map needs it, too
            params["a"] = self._block_map(blocks, launch.tile)
            stream = current_stream_handle(device)
            if launch.queued:
                params["queue"] = queue_at(device, stream)
            for one, c in pairs:
                copied = tf32 and self._blocks
                b = self._copies.copy(one, device, stream) if copied else one.data_ptr()
                at = c.data_ptr()
                params |= {"b": map_of_b(b), "stored": map_of_c(at), "c": at}
                launch.kernel.launch(launch.grid, launch.tile.threads, stream, params)
        if target is not out:
            out.copy_(target)

    def prepare_launches(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> Sequence[Prepared] | None:  # fmt: skip
        """Return the launch of B -> C, both plain matrices; None if copies are needed, and for an
        epilogue."""
        n = B.shape[1]
        if not epilogue.plain or packed is None:
            return None
        if B.dtype is torch.float32 or not copies_well(B) or n % STORE_COLUMNS:
            return None
        device = tensors["work"].device.index
        launch = self._launch_for(B.dtype, B.dtype, n, False, device)
        engine = self._engine_stores(tensors, B.dtype)
        store = Store.BY_ENGINE if engine else Store.BY_THREADS
        params: dict[str, Any] = self._params(tensors, launch.tile, n, n, store, PLAIN)
        params |= {"a": self._block_map(packed["blocks"], launch.tile)}
        params |= {"b": NO_MAP, "stored": NO_MAP, "c": 0}
        maps = self._map_of_b(B, launch.tile, False), self._map_of_c(B.dtype, n, n, store)
        return (launch.prepared(params, *maps, device),)

    def prepare_blocks(
        self, tensors: Tensors, blocks: Tensor, X: Tensor, epilogue: Epilogue, silu: bool = False,
        also: tuple[str, ...] = (),
    ) -> Prepared | None:  # fmt: skip
        """Return the launch of ``spmm_bcsr`` that reads X [tokens, K] and writes Y as they are;
        None if it needs copies. ``also`` as in :meth:`Launch.prepared`."""
        n, device = X.shape[0], X.device.index
        if X.stride(0) < X.shape[1]:
            return None
        launch = self._launch_for(X.dtype, X.dtype, n, True, device)
        store = Store.TRANSPOSED
        params: dict[str, Any] = self._params(
            tensors, launch.tile, n, self.rows, store, epilogue, silu=silu
        )
        params |= {"a": self._block_map(blocks, launch.tile), "b": NO_MAP, "stored": NO_MAP, "c": 0}
        map_of_b = self._map_of_b(X.mT, launch.tile, True)
        map_of_c = self._map_of_c(X.dtype, n, self.rows, store)
        return launch.prepared(params, map_of_b, map_of_c, device, also)

    def prepare_linear(
        self, tensors: Tensors, packed: Tensors, X: Tensor, epilogue: Epilogue
    ) -> Prepared | None:
        """Return the launch of X [tokens, K], aligned, to a contiguous Y; None if it needs copies.

        It takes the addresses of X and Y and, if the epilogue has a row bias, of that.
        """
        also = () if epilogue.row_bias is None else ("row_bias",)
        blocks = packed["blocks"]
        if self._takes_few(tensors, X.mT, None, epilogue):
            lists = tensors["block_row_ptr"], tensors["block_col_idx"]
            order = tensors["order"]
            return self._few.prepare(lists, blocks, X, epilogue, False, order=order, also=also)
        if self.rows % STORE_COLUMNS or not self._engine_stores(tensors, X.dtype):
            return None
        return self.prepare_blocks(tensors, blocks, X, epilogue, also=also)

    def bind_linear(self, tensors: Tensors, packed: Tensors | None) -> BoundLinear | None:
        if not self.rows or self._exact is not None or packed is None:
            return None
        sixteen = packed["blocks"].dtype.itemsize == 2
        return BoundLinear(self, tensors, packed) if sixteen else None

    def bind(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None
    ) -> BoundProduct | None:
        if (
            not self.rows
            or self._exact is not None
            or (packed is not None and packed["blocks"].dtype is FP8)
        ):
            return None
        return BoundProduct(self, tensors, values, packed)
