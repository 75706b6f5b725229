"""Launches of the hybrid kernels: windows and rows of one product in one grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsetile.engines.rows.work import Work
from sparsetile.engines.runner import Runner
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import (
    current_stream_handle,
    device_index,
    ensure_cuda_context,
    on_device,
)
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.rstile import THREADS, WARPS, Slabs
from sparsetile.launch.bound import BoundProduct, Scratch, Step, prepare_steps
from sparsetile.launch.epilogue import epilogue_params
from sparsetile.launch.geometry import (
    ACCESS_BYTES,
    Geometry,
    aligned,
    batch_count,
    batch_pieces,
    stride_params,
)
from sparsetile.launch.interface import PLAIN, Epilogue, Prepared, Tensors

__all__ = ["HybridRunner", "Launch"]

# Most bytes of partial sums of a launch; batches that need more are split.
MAX_SCRATCH = 2**28
_UNUSED = ("tagged", "packed", "bundle_rows", "args", "minimum")
_SCRATCH = ("arrivals", "partials", "window_arrivals", "window_partials")


def _whole(n: int, itemsize: int) -> int:
    """The least width of whole accesses, at least ``n``."""
    step = ACCESS_BYTES // itemsize
    return -(-n // step) * step


@dataclass(frozen=True)
class Launch:
    """A loaded kernel with the parameters that depend only on the width."""

    kernel: LoadedKernel
    slabs: Slabs
    groups: int
    window_blocks: int
    row_ends: tuple[int, ...]

    @property
    def window_slabs(self) -> int:
        return self.groups << self.slabs.shift

    @property
    def row_slabs(self) -> int:
        return self.groups * self.slabs.row_slabs

    def grid(self, batches: int) -> tuple[int, int, int]:
        blocks = self.window_blocks + self.row_ends[-1] * self.slabs.row_slabs
        return blocks, self.groups, batches

    def slot_bytes(self) -> tuple[int, int]:
        """Bytes of a partial sum of windows, and of rows, in their slots."""
        rows = self.slabs.rows
        return 16 * self.slabs.columns * 4, rows.lanes * rows.vector * rows.times * 4


class HybridRunner(Runner):
    """Windows on Tensor Cores and rows on CUDA cores; a system defines the packing of A's tiles.

    ``meta``: ``positions`` (rows of C in windows), ``tiles``, ``items``, ``slots``, ``nodes`` of
    the windows, and ``residual``, the schedule of the other rows.
    """

    def load(
        self, dtype: torch.dtype, out_dtype: torch.dtype, slabs: Slabs, weighted: bool, device: int
    ) -> LoadedKernel:
        """Return the kernel for these slabs."""
        raise NotImplementedError

    def choose_slabs(self, dtype: torch.dtype, n: int) -> Slabs:
        """Return the slabs for ``n`` columns, a multiple of 16 bytes."""
        raise NotImplementedError

    def weights(self, tensors: Tensors, packed: Tensors) -> dict[str, Any]:
        """Return the parameters of A's tiles."""
        raise NotImplementedError

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._positions = int(meta["positions"])
        self._tiles = int(meta["tiles"])
        self._items = int(meta["items"])
        self._shared = int(meta["shared"])
        self._slots = int(meta["slots"])
        self._nodes = int(meta["nodes"])
        self._rest = Work.of(meta["residual"], False)
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def _launch_for(
        self, dtype: torch.dtype, out_dtype: torch.dtype, n: int, weighted: bool, device: int,
    ) -> Launch:  # fmt: skip
        key = (dtype, out_dtype, n, weighted, device)
        found = self._launches.get(key)
        if found is None:
            slabs = self.choose_slabs(dtype, n)
            found = self._launches[key] = Launch(
                self.load(dtype, out_dtype, slabs, weighted, device),
                slabs,
                slabs.groups(n),
                (self._shared << slabs.shift)
                + -(-((self._items - self._shared) << slabs.shift) // WARPS),
                self._rest.block_ends(slabs.rows.lanes),
            )
        return found

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        if n and self.rows:
            width = _whole(n, dtype.itemsize)
            self._launch_for(dtype, dtype, width, weighted, device_index(device))

    def _params(
        self, launch: Launch, tensors: Tensors, values: Tensor | None, packed: Tensors,
        epilogue: Epilogue,
    ) -> dict[str, Any]:  # fmt: skip
        """Parameters that do not depend on B, C and scratch memory."""
        address = {name: tensors[name].data_ptr() for name in self.tensor_names}
        return {
            **dict.fromkeys((*_UNUSED, *_SCRATCH), 0),
            **{name: address[name] for name in ("items", "parent_of_slot", "nodes")},
            **self._rest.section_params(launch.slabs.rows.lanes), "columns": address["columns"],
            "values": 0 if values is None else values.data_ptr(), "indptr": address["indptr"],
            "order": address["order"], "rows": self._positions, "slot_count": self._rest.slots,
            "node_count": self._rest.nodes, "slabs": launch.row_slabs,
            "row_slabs": launch.slabs.row_slabs, "row_window_offset": address["row_window_offset"],
            "tile_columns": address["tile_columns"], **self.weights(tensors, packed),
            "window_items": address["window_items"],
            "window_parent_of_slot": address["window_parent_of_slot"],
            "window_nodes": address["window_nodes"], "window_slot_count": self._slots,
            "window_node_count": self._nodes, "window_item_count": self._items,
            "shared_item_count": self._shared, "window_slabs": launch.window_slabs,
            "window_blocks": launch.window_blocks, "slab_shift": launch.slabs.shift,
            **epilogue_params(epilogue),
        }  # fmt: skip

    def _scratch_bytes(self, launch: Launch) -> tuple[int, int]:
        """Bytes of partial sums that one matrix of a batch needs: windows', rows'."""
        window, row = launch.slot_bytes()
        return (
            launch.window_slabs * self._slots * window,
            launch.row_slabs * self._rest.slots * row,
        )

    def spmm(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        n, batches = B.shape[-1], batch_count(B)
        if n == 0 or self.rows == 0 or batches == 0:
            return
        if packed is None:
            packed = self.pack(tensors, values, B.dtype)
        shape = Geometry.of(B, out) if aligned(B) else None
        if shape is None or shape.vector * B.element_size() != ACCESS_BYTES:
            self._spmm_padded(tensors, values, packed, B, out, epilogue)
            return
        launch = self._launch_for(B.dtype, out.dtype, n, values is not None, shape.device)
        window_bytes, row_bytes = self._scratch_bytes(launch)
        most = MAX_SCRATCH // max(window_bytes + row_bytes, 1)
        if len(pieces := batch_pieces(batches, most)) > 1:
            for piece in pieces:
                self.spmm(tensors, values, packed, B[piece], out[piece], epilogue)
            return
        self._multiply(launch, shape, batches, tensors, values, packed, out, epilogue)

    def _multiply(
        self, launch: Launch, shape: Geometry, batches: int, tensors: Tensors,
        values: Tensor | None, packed: Tensors, out: Tensor, epilogue: Epilogue,
    ) -> None:  # fmt: skip
        """Launch the kernel for operands of this shape, ``out`` being C."""
        window_bytes, row_bytes = self._scratch_bytes(launch)
        params = {**self._params(launch, tensors, values, packed, epilogue), **shape.params}
        with on_device(shape.device):
            ensure_cuda_context(shape.device)
            stream = current_stream_handle(shape.device)
            cut = self._slots + self._rest.slots > 0
            if cut:
                window_nodes = batches * launch.window_slabs * self._nodes
                row_nodes = batches * launch.row_slabs * self._rest.nodes
                memory, arrivals = scratch(
                    shape.device, stream, batches * (window_bytes + row_bytes),
                    window_nodes + row_nodes,
                )  # fmt: skip
                params["window_partials"] = memory.data_ptr()
                params["partials"] = memory.data_ptr() + batches * window_bytes
                params["window_arrivals"] = arrivals.data_ptr()
                params["arrivals"] = arrivals.data_ptr() + 4 * window_nodes
            launch.kernel.launch(launch.grid(batches), THREADS, stream, params, overlap=not cut)

    def _spmm_padded(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors, B: Tensor, out: Tensor,
        epilogue: Epilogue,
    ) -> None:  # fmt: skip
        """Multiply copies of B and C whose rows are whole accesses of 16 bytes; only of B if C's
        are.

        Storing C element by element, without a copy, took 1.5 to 5.7 times as long as a product of
        the next even width.
        """
        n, width = B.shape[-1], _whole(B.shape[-1], B.element_size())
        padded = B.new_zeros((*B.shape[:-1], width))
        padded[..., :n] = B
        if width == n and Geometry.of(padded, out).vector * B.element_size() == ACCESS_BYTES:
            self.spmm(tensors, values, packed, padded, out, epilogue)
            return
        bias = epilogue.bias
        if bias is not None:
            epilogue = replace(epilogue, bias=F.pad(bias, (0, width - n)))
        wide = out.new_empty((*out.shape[:-1], width))
        if epilogue.beta != 0.0:
            wide[..., :n] = out
        self.spmm(tensors, values, packed, padded, wide, epilogue)
        out.copy_(wide[..., :n])

    def prepare_launches(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> Sequence[Prepared] | None:  # fmt: skip
        """Return the launch of B -> C, both plain matrices; None if B has to be copied."""
        n = B.shape[1]
        if packed is None or not aligned(B) or (n * B.element_size()) % ACCESS_BYTES:
            return None
        device = tensors["indptr"].device.index
        launch = self._launch_for(B.dtype, B.dtype, n, values is not None, device)
        params = {
            **self._params(launch, tensors, values, packed, epilogue),
            **stride_params((B.stride(0) * B.element_size(), n, 0, 0)),
            "b": 0, "c": 0, "n": n,
        }  # fmt: skip
        needed = None
        if self._slots or self._rest.slots:
            window_bytes, row_bytes = self._scratch_bytes(launch)
            window_nodes = launch.window_slabs * self._nodes
            needed = Scratch(
                window_bytes + row_bytes,
                window_nodes + launch.row_slabs * self._rest.nodes,
                {"window_partials": 0, "partials": window_bytes},
                {"window_arrivals": 0, "arrivals": 4 * window_nodes},
            )
        step = Step(launch.kernel, launch.grid(1), THREADS, overlap=needed is None)
        return prepare_steps([step], params, epilogue, device, needed)

    def bind(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None
    ) -> BoundProduct | None:
        return BoundProduct(self, tensors, values, packed) if self.rows else None
