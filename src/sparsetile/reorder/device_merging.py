"""The order by merging on a GPU, by ``merge_rows`` and one sort a level (``merging.py``)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR
from sparsetile.kernels.merge_rows import BLOCK, MERGE_ROWS, MOST_LEVELS, RANGE, SIDE, Stage
from sparsetile.kernels.stages import STAGE_THREADS
from sparsetile.launch.staged import StagedKernel, building_on, built_by_kernels

__all__ = ["KEY_BITS", "LEVELS", "ROUNDS", "SIGNATURES", "SORTS", "key_bits", "merged_on_device"]

# Hash functions, sorts and rounds of a level; levels: 2 ** LEVELS rows are the highest window.
SIGNATURES, SORTS, ROUNDS, LEVELS = BLOCK, 6, 4, MOST_LEVELS
# Bits of a sort key below the number of its sort.
KEY_BITS = 29
# Most keys that are numbered in 31 bits.
MOST_KEYS = 2**31


def key_bits(groups: int) -> int:
    """Bits of a sort key for the first of its two values: twice as many as groups."""
    return min(max((groups - 1).bit_length() + 1, 8), KEY_BITS - 2)


def merged_on_device(csr: CSR) -> Tensor | None:
    """Return the rows in the order by merging; the host waits once, for the number of used rows.

    None if fewer than two rows have entries, they are too many, or A's device is not supported.
    """
    if not (csr.nnz and built_by_kernels(csr.device)):
        return None
    with building_on(csr.device) as index:
        used_rows = torch.cumsum(csr.indptr[1:] > csr.indptr[:-1], 0, dtype=torch.int32)
        used = int(used_rows[-1])
        if used < 2 or used * SORTS >= MOST_KEYS:
            return None
        return _Merging(csr, used_rows, used, index).run()


class _Merging(StagedKernel):
    """One matrix."""

    def __init__(self, csr: CSR, used_rows: Tensor, used: int, index: int) -> None:
        self._rows, self._entries, self._used = csr.shape[0], csr.nnz, used
        # Groups of each level, and of what the last one makes.
        self._groups = [used]
        while len(self._groups) <= LEVELS and self._groups[-1] > 1:
            self._groups.append((self._groups[-1] + 1) // 2)
        level_nodes = [sum(self._groups[1 : level + 1]) for level in range(LEVELS)]
        super().__init__(
            MERGE_ROWS,
            csr.device,
            index,
            entries=csr.nnz,
            height=csr.shape[0],
            used=used,
            sorts=SORTS,
            levels=len(self._groups) - 1,
            level_nodes=level_nodes,
        )
        self.give("indptr", csr.indptr.contiguous())
        self.give("columns", csr.indices.contiguous())
        self.give("used_rows", used_rows)

    def run(self) -> Tensor:
        """Return the order."""
        used, ranges = self._used, -(-self._entries // RANGE)
        order = self.new("order", self._rows, dtype=torch.int64)
        self.new("rows", used)
        self.new("range_rows", ranges)
        values, united = self.new("values", used, BLOCK), self.new("united", self._groups[1], BLOCK)
        self.launch(Stage.ROWS, max(self._rows, ranges))
        self.launch(Stage.SIGNATURES, ranges * BLOCK)
        self.keep_only(["rows", "order", "values", "united"])
        keys = self.new("keys", SORTS * used)
        self.give("best", torch.zeros(ROUNDS * used, dtype=torch.int64, device=self._device))
        self.new("mate", used)
        counts = self.new("counts", used, dtype=torch.int64)
        self.new("rest", used)
        self.new("nodes", sum(self._groups[1:]), 4)
        self.params |= {"groups": used, "key_bits": key_bits(used)}
        self.launch(Stage.KEYS, used)
        for level, (groups, made) in enumerate(zip(self._groups, self._groups[1:], strict=False)):
            # Threads of stages with a warp for each block.
            warps = -(-groups // BLOCK) * BLOCK
            self.params |= {"groups": groups, "level": level, "key_bits": key_bits(made)}
            self.give("sorted", torch.sort(keys[: SORTS * groups], stable=True).indices)
            for turn in range(ROUNDS):
                self.params["turn"] = turn
                self.launch(Stage.ROUND, (SORTS + 1) * warps)
            self.params["turn"] = ROUNDS
            self.launch(Stage.SIDES, -(-groups // SIDE) * STAGE_THREADS)
            self.give("sums", torch.cumsum(counts[:groups], 0))
            self.launch(Stage.REST, groups)
            self.launch(Stage.UNITE, warps)
            values, united = self.give("values", united), self.give("united", values)
        self.give("sums", torch.cumsum(counts[: self._groups[-1]], 0))
        self.launch(Stage.ORDER, self._groups[-1] << len(self._groups) - 1)
        return order
