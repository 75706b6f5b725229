"""Launches of ``spmm_csr`` and ``sddmm_csr``: from a plan's tensors to kernel parameters.

``items``, ``parent_of_slot`` and ``nodes`` are the plain schedule, every row by itself: max, min,
repair and SDDMM use it. If rows were bundled, sums use the mixed schedule (``mixed_items`` and so
on) with the bundles' tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.device import machine
from sparsetile.engines.rows.won import WonElements
from sparsetile.engines.rows.work import Launch, Work
from sparsetile.engines.runner import ExactRunner
from sparsetile.formats.bundles import scatter_values
from sparsetile.jit.loader import (
    current_stream_handle,
    device_index,
    ensure_cuda_context,
    on_device,
)
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.csr import (
    BUNDLE_DTYPES,
    FEW_COLUMNS,
    MIXED_ROWS,
    PLACES,
    SDDMM_CSR,
    SPMM_CSR,
    THREADS,
    RowShape,
    RowTile,
    choose_bundle_tile,
    choose_tile,
    sddmm_config,
    sddmm_tile,
    spmm_config,
    vector_width,
)
from sparsetile.launch.bound import (
    BoundExtremum,
    BoundProduct,
    Scratch,
    Step,
    prepare_steps,
)
from sparsetile.launch.epilogue import epilogue_params
from sparsetile.launch.geometry import (
    MAX_SCRATCH,
    Geometry,
    batch_count,
    batch_pieces,
    stride_params,
)
from sparsetile.launch.interface import PLAIN, Epilogue, Prepared, Tensors

__all__ = ["RowRunner"]


class RowRunner(ExactRunner):
    """Packed ``values``: those of bundles, four per list element."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._plain = Work.of(meta["plain"], False)
        self._mixed = None if meta["mixed"] is None else Work.of(meta["mixed"], True)
        self.packed_names = () if self._mixed is None else ("values",)
        self._elements = int(meta["elements"])
        self._shape = RowShape(**meta["shape"])
        # Older files do not say how long the longest row is.
        short = int(meta.get("longest", self.nnz)) <= torch.iinfo(torch.int16).max
        self._place_dtype = torch.int16 if short else torch.int32
        self._won = WonElements(self._plain, self.rows)
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self.attention_launches: dict[tuple[Any, ...], Any] = {}  # used by gat.py

    @property
    def plain(self) -> Work:
        """The schedule of rows, without bundles."""
        return self._plain

    @property
    def mixed(self) -> Work | None:
        """The schedule of bundles and of rows outside them, if there are bundles."""
        return self._mixed

    @property
    def shape(self) -> RowShape:
        """The shape that the choice of a tile uses."""
        return self._shape

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        if self._mixed is None or values is None or dtype not in BUNDLE_DTYPES:
            return {"values": torch.empty(0, dtype=dtype, device=tensors["indptr"].device)}
        entries, slots = tensors["bundle_entries"], tensors["bundle_slots"]
        return {"values": scatter_values(values.to(dtype), entries, slots, self._elements)}

    def _launch_for(
        self,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        n: int,
        vector: int,
        mode: str,
        weighted: bool,
        device: int,
    ) -> Launch:
        key = (dtype, out_dtype, n, vector, mode, weighted, device)
        found = self._launches.get(key)
        if found is None:
            bundles = (
                mode == "sum"
                and self._mixed is not None
                and dtype in BUNDLE_DTYPES
                and n > FEW_COLUMNS
            )
            work = self._mixed if bundles and self._mixed is not None else self._plain
            facts = machine(torch.device("cuda", device))
            shape = self._shape.at_width(n * dtype.itemsize)
            if mode == "repair":
                tile = RowTile(vector, 32)
            elif bundles:
                items = work.sections[1] + work.sections[3]
                tile = choose_bundle_tile(dtype, n, vector, items)
            else:
                args = mode in ("argmax", "argmin")
                tile = choose_tile(
                    dtype, n, vector, shape, cols=self.cols, l2=facts.l2_bytes, args=args,
                    plain_sum=mode == "sum",
                )  # fmt: skip
            config = spmm_config(
                dtype,
                tile,
                weighted,
                out_dtype=out_dtype,
                extremum=mode in ("max", "min", "argmax", "argmin"),
                args=PLACES[self._place_dtype] if mode in ("argmax", "argmin") else 0,
                bundles=bundles,
                repair=mode == "repair",
                shape=shape if mode == "sum" else MIXED_ROWS,
            )
            small = bool(config["kShared"])
            found = self._launches[key] = Launch.of(
                SPMM_CSR.load(config, device), work, tile, n, self._shape, facts.processors, small
            )
        return found

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        self._prepare("sum", n, dtype, weighted, device)

    def prepare_repair(
        self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device
    ) -> None:
        self._prepare("repair", n, dtype, weighted, device)

    def _prepare(
        self, mode: str, n: int, dtype: torch.dtype, weighted: bool, device: torch.device
    ) -> None:
        if n and self._plain.items:
            vector = vector_width(dtype, n)
            self._launch_for(dtype, dtype, n, vector, mode, weighted, device_index(device))

    def params(
        self,
        launch: Launch,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        mode: str,
        epilogue: Epilogue,
    ) -> dict[str, Any]:
        """Return the parameters that do not depend on B, C and scratch memory."""
        work = launch.work
        bundled = {"tagged": 0, "bundle_rows": 0, "packed": 0}
        if work.bundled:
            bundled = {
                "tagged": tensors["tagged"].data_ptr(),
                "bundle_rows": tensors["bundle_rows"].data_ptr(),
                "packed": 0 if packed is None else packed["values"].data_ptr(),
            }
        return {
            **work.pointers(tensors),
            **work.section_params(launch.tile.lanes, launch.small),
            **bundled,
            "columns": tensors["columns"].data_ptr(),
            "values": 0 if values is None else values.data_ptr(),
            # Only plans of small products have them, and not with bundles.
            "heads": tensors["heads"].data_ptr() if "heads" in tensors else 0,
            "indptr": tensors["indptr"].data_ptr(),
            "args": 0,
            "arrivals": 0,
            "partials": 0,
            "slabs": launch.slabs,
            "slot_count": work.slots,
            "node_count": work.nodes,
            "minimum": mode in ("min", "argmin"),
            "slab_fast": launch.slab_fast,
            "early": launch.early,
            **epilogue_params(epilogue),
        }

    def _run(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        out: Tensor,
        args: Tensor | None,
        mode: str,
        epilogue: Epilogue,
        only_if: Tensor | None = None,
    ) -> None:
        n, batches = B.shape[-1], batch_count(B)
        if n == 0 or self._plain.items == 0 or batches == 0:
            return
        shape = Geometry.of(B, out)
        device, weighted = shape.device, values is not None
        launch = self._launch_for(B.dtype, out.dtype, n, shape.vector, mode, weighted, device)
        work = launch.work
        if work.bundled and values is not None and packed is None:
            packed = self.pack(tensors, values, B.dtype)
        if launch.too_wide:
            half = n // 2 // THREADS * THREADS or n // 2
            for columns in (slice(0, half), slice(half, None)):
                some = None if args is None else args[..., columns]
                bias = None if epilogue.bias is None else epilogue.bias[columns]
                self._run(
                    tensors, values, packed, B[..., columns], out[..., columns], some, mode,
                    replace(epilogue, bias=bias), only_if,
                )  # fmt: skip
            return
        slot_bytes = launch.partial_bytes(B.dtype, args is not None)
        scratch_bytes = max(launch.slabs * work.slots * slot_bytes, 1)  # of a matrix
        if len(pieces := batch_pieces(batches, MAX_SCRATCH // scratch_bytes)) > 1:
            for piece in pieces:
                some = None if args is None else args[piece]
                self._run(
                    tensors, values, packed, B[piece], out[piece], some, mode, epilogue, only_if
                )
            return
        params = self.params(launch, tensors, values, packed, mode, epilogue) | shape.params
        noted = only_if if args is None else args
        params["args"] = 0 if noted is None else noted.data_ptr()
        with on_device(device):
            ensure_cuda_context(device)
            stream = current_stream_handle(device)
            if work.slots:
                layers = batches * launch.slabs
                memory, arrivals = scratch(
                    device, stream, layers * work.slots * slot_bytes, layers * work.nodes
                )
                params["arrivals"], params["partials"] = arrivals.data_ptr(), memory.data_ptr()
            launch.kernel.launch(
                launch.grid(batches), THREADS, stream, params, overlap=launch.overlap
            )

    def spmm(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        self._run(tensors, values, packed, B, out, None, "sum", epilogue)

    def repair(
        self,
        tensors: Tensors,
        values: Tensor | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
        only_if: Tensor | None = None,
    ) -> None:
        self._run(tensors, values, None, B, out, None, "repair", epilogue, only_if)

    def extremum(
        self,
        tensors: Tensors,
        values: Tensor | None,
        B: Tensor,
        out: Tensor,
        args: Tensor | None,
        maximum: bool,
    ) -> None:
        mode = ("" if args is None else "arg") + ("max" if maximum else "min")
        self._run(tensors, values, None, B, out, args, mode, PLAIN)

    def bind_extremum(self, tensors: Tensors, values: Tensor | None) -> BoundExtremum | None:
        return BoundExtremum(self, tensors, values) if self._plain.items else None

    def prepare_extremum(
        self, tensors: Tensors, values: Tensor | None, B: Tensor, mode: str
    ) -> Sequence[Prepared] | None:
        return self._prepare_matrix(tensors, values, None, B, mode, B.dtype, PLAIN)

    @property
    def place_dtype(self) -> torch.dtype:
        return self._place_dtype

    def won(
        self,
        tensors: Tensors,
        values: Tensor | None,
        grad: Tensor,
        args: Tensor,
        order: Tensor,
        indptr: Tensor,
        out: Tensor,
    ) -> None:
        self._won(tensors, values, grad, args, order, indptr, out)

    def prepare_launches(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> Sequence[Prepared] | None:
        """Return the launch of B -> C, both plain matrices; None if a grid is too small."""
        return self._prepare_matrix(tensors, values, packed, B, "sum", B.dtype, epilogue)

    def _prepare_matrix(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        mode: str,
        out_dtype: torch.dtype,
        epilogue: Epilogue,
    ) -> Sequence[Prepared] | None:
        """Return the launch of a matrix like B; rows of C are contiguous."""
        if not self._plain.items:
            return ()
        extremum, kept = mode.endswith(("max", "min")), mode.startswith("arg")
        n, stride, size = B.shape[1], B.stride(0), B.element_size()
        vector = vector_width(B.dtype, n, stride, B.data_ptr() // size)
        weighted, device = values is not None, tensors["indptr"].device.index
        launch = self._launch_for(B.dtype, out_dtype, n, vector, mode, weighted, device)
        if launch.too_wide:
            return None
        params = {
            **self.params(launch, tensors, values, packed, mode, epilogue),
            **stride_params((stride * size, n, 0, 0)),
            "b": 0, "c": 0, "n": n,
        }  # fmt: skip
        step = Step(launch.kernel, launch.grid(1), THREADS, launch.overlap)
        work, needed = launch.work, None
        if work.slots:
            slots = launch.slabs * work.slots
            size = slots * launch.partial_bytes(B.dtype, kept)
            needed = Scratch(size, launch.slabs * work.nodes)
        return prepare_steps([step], params, epilogue, device, needed, ("args",) * extremum)

    def bind(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None
    ) -> BoundProduct | None:
        return BoundProduct(self, tensors, values, packed) if self.rows else None

    def sddmm(self, tensors: Tensors, G: Tensor, B: Tensor) -> Tensor:
        n, batches = B.shape[-1], batch_count(B)
        acc = torch.float64 if B.dtype is torch.float64 else torch.float32
        out = torch.empty((batches, self.nnz), dtype=acc, device=B.device)
        if n == 0:
            out.zero_()
        elif self.nnz:
            for piece in batch_pieces(batches):
                cut = piece if B.dim() == 3 else slice(None)
                self._launch_sddmm(tensors, G[cut], B[cut], out[piece])
        return out[0] if batches == 1 else out.sum(0)

    def _launch_sddmm(self, tensors: Tensors, G: Tensor, B: Tensor, out: Tensor) -> None:
        n, batches = B.shape[-1], batch_count(B)
        batched = B.dim() == 3
        g_batch, b_batch = (G.stride(0), B.stride(0)) if batched else (0, 0)
        size = B.element_size()
        vector = vector_width(
            B.dtype, n, G.stride(-2), B.stride(-2), g_batch, b_batch,
            G.data_ptr() // size, B.data_ptr() // size,
        )  # fmt: skip
        tile = sddmm_tile(B.dtype, n, vector)
        device, work = B.device.index, self._plain
        kernel = SDDMM_CSR.load(sddmm_config(B.dtype, tile), device)
        sections = work.section_params(tile.lanes)
        params: dict[str, Any] = {
            "items": tensors["items"].data_ptr(),
            "columns": tensors["columns"].data_ptr(),
            "g": G.data_ptr(),
            "b": B.data_ptr(),
            "out": out.data_ptr(),
            "g_row_stride": G.stride(-2),
            "b_row_stride": B.stride(-2),
            "g_batch_stride": g_batch,
            "b_batch_stride": b_batch,
            "out_batch_stride": self.nnz,
            "n": n,
            **sections,
        }
        grid = (sections["block_end"][-1], 1, batches)
        with on_device(device):
            ensure_cuda_context(device)
            kernel.launch(grid, THREADS, current_stream_handle(device), params)
