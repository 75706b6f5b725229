"""Edges of a graph that passes by, multiplied by ``csr``'s kernel as they come.

A block of a mini-batch is multiplied two or three times. So nothing is counted, cut or compared:
two launches of ``list_block`` check the edges and list its rows, and the host waits once, for the
check. Columns of a row keep the order of the edges, and parallel edges are entries of their own.
"""

from __future__ import annotations

import dataclasses
import weakref

import torch
from torch import Tensor

from sparsetile.balance.segments import WIDE_LENGTH
from sparsetile.balance.tree import no_tree
from sparsetile.intake.csr import CSR
from sparsetile.kernels.blocks import LIST_BLOCK, OUTSIDE, UNSORTED, Stage
from sparsetile.kernels.csr import RowShape
from sparsetile.systems.base import Epilogue
from sparsetile.systems.csr.runner import CSRRunner
from sparsetile.systems.shared.staged import StagedKernel, building_on

__all__ = ["BlockRows"]


class BlockRows:
    """A[target, source] by rows on a GPU.

    Parameters
    ----------
    rows, columns : Tensor of int32 [E]
        Rows ascend.
    shape : (int, int)
    origin : BlockRows, optional
        What this is the transpose of.
    order : Tensor of int64 [E] or None
        Number of each entry's edge as it was given; None where rows ascended.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        shape: tuple[int, int],
        origin: BlockRows | None = None,
        order: Tensor | None = None,
    ) -> None:
        count, edges = shape[0], rows.numel()
        with building_on(rows.device) as index:
            kernel = StagedKernel(LIST_BLOCK, rows.device, index, edges=edges, row_count=count)
            kernel.give("rows", rows)
            indptr = kernel.new("indptr", count + 1, dtype=torch.int64)
            items = kernel.new("items", count, 4)
            kernel.launch(Stage.ITEMS, count + 1)
        self.csr, self.order, self._rows = CSR(indptr, columns, None, shape), order, rows
        # Not held: a block's memory goes with it at once, and not when cycles are looked for.
        self._origin = None if origin is None else weakref.ref(origin)
        self._turned: BlockRows | None = None
        self._scale: Tensor | None = None
        mean = edges / max(count, 1)
        wide = mean > WIDE_LENGTH  # a warp a row, else a group of lanes
        sections = [0, 0, count, 0, 0] if wide else [0, 0, 0, 0, count]
        shape_of_rows = RowShape(rows=0 if wide else count, mean=mean, long_share=float(wide))
        parent_of_slot, nodes = no_tree(rows.device)
        self._tensors = {
            "indptr": indptr, "columns": columns, "items": items,
            "parent_of_slot": parent_of_slot, "nodes": nodes,
        }  # fmt: skip
        self._runner = CSRRunner({
            "rows": count, "cols": shape[1], "nnz": edges, "tensors": list(self._tensors),
            "plain": {"sections": sections, "slots": 0, "nodes": 0}, "mixed": None, "elements": 0,
            "shape": dataclasses.asdict(shape_of_rows),
        })  # fmt: skip

    @classmethod
    def of_edges(cls, source: Tensor, target: Tensor, shape: tuple[int, int]) -> BlockRows | None:
        """Return edges by target, as many as there may be of them; None where one names no node.

        Parameters
        ----------
        source, target : Tensor of int64 [E]
            At least one edge.
        """
        edges, device = source.numel(), source.device
        flags = torch.zeros(1, dtype=torch.int32, device=device)
        with building_on(device) as index:
            kernel = StagedKernel(
                LIST_BLOCK, device, index, edges=edges, row_count=shape[0], column_count=shape[1]
            )
            kernel.give("sources", source.contiguous())
            kernel.give("targets", target.contiguous())
            kernel.give("flags", flags)
            rows, columns = kernel.new("rows", edges), kernel.new("columns", edges)
            kernel.launch(Stage.CHECK, edges)
            found = int(flags.item())
        if found & OUTSIDE:
            return None
        order = None
        if found & UNSORTED:
            rows, order = torch.sort(rows, stable=True)
            columns = columns[order]
        return cls(rows, columns, shape, order=order)

    def multiply(self, x: Tensor, epilogue: Epilogue) -> Tensor:
        """Return A·x, or the mean of each row's entries, with bias and ReLU."""
        out = x.new_empty(self.csr.shape[0], x.shape[1])
        self._runner.spmm(self._tensors, None, None, x.contiguous(), out, epilogue)
        return out

    @property
    def turned(self) -> BlockRows:
        """The transpose, made at first use."""
        origin = None if self._origin is None else self._origin()
        if origin is not None:
            return origin
        if self._turned is None:
            rows, order = torch.sort(self.csr.indices, stable=True)
            shape = (self.csr.shape[1], self.csr.shape[0])
            self._turned = BlockRows(rows, self._rows[order], shape, self)
        return self._turned

    @property
    def scale(self) -> Tensor:
        """1 / entries of each row, [rows, 1], in float64: a third is rounded once."""
        if self._scale is None:
            lengths = self.csr.row_lengths().clamp(min=1)
            self._scale = lengths.double().reciprocal().unsqueeze(-1)
        return self._scale
