"""A distributed plan's values in a checkpoint, which any number of ranks may load.

Values of A are one vector, in the order of A's rows in the partition's order, split over the ranks
as torch splits a DTensor. ``torch.distributed.checkpoint`` saves such a vector and loads it into
another split. A rank's own entries are a range of it: ranges are exchanged on the way in and out.
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.dist.group import Ranks
from sparsetile.dist.partition import Partition, even_bounds
from sparsetile.intake.csr import CSR

__all__ = ["load_values", "state_of"]


class Saved(Protocol):
    """The attributes of a plan that a checkpoint needs."""

    shape: tuple[int, int]
    nnz: int
    local_nnz: int
    rank: int
    device: torch.device
    dtype: torch.dtype
    partition: Partition
    _csr: CSR
    _ranks: Ranks

    @property
    def values(self) -> Tensor | None: ...


def _pattern(plan: Saved) -> Tensor:
    """Numbers that tell one matrix, and one order of its rows, from another."""
    order = plan.partition.order
    digest = 0 if order is None else zlib.crc32(order.contiguous().numpy().data)
    return torch.tensor([*plan.shape, plan.nnz, digest])


def _overlaps(plan: Saved) -> tuple[list[int], list[int]]:
    """Entries of this rank in each rank's part of the vector, and of each rank in this one's."""
    counts = plan._ranks.numbers([plan.local_nnz], plan.device, "state_dict")[:, 0].tolist()
    parts = even_bounds(plan.nnz, len(counts))
    first = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
    me = plan.rank

    def common(rank: int, part: int) -> int:
        return max(0, min(first[rank + 1], parts[part + 1]) - max(first[rank], parts[part]))

    ranks = range(len(counts))
    return [common(me, part) for part in ranks], [common(rank, me) for rank in ranks]


def state_of(plan: Saved) -> dict[str, Any]:
    """Return the state of ``DistributedPlan.state_dict``. Every rank must call it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    state: dict[str, Any] = {"pattern": _pattern(plan)}
    values = plan.values
    if values is not None:
        out, back = _overlaps(plan)
        part = plan._ranks.exchange(values.detach().contiguous(), out, back, "state_dict")
        mesh = DeviceMesh.from_group(cast(Any, plan._ranks.group), plan.device.type)
        state["values"] = DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=torch.Size([plan.nnz]), stride=(1,)
        )
    return state


def load_values(plan: Saved, state: dict[str, Any]) -> Tensor | None:
    """Return this rank's values of a state that was loaded. Every rank must call it."""
    wanted, found = _pattern(plan), state.get("pattern")
    weighted = plan.values is not None
    if not isinstance(found, Tensor) or not torch.equal(found.cpu(), wanted):
        raise value_error(
            "load_state_dict", "state", "of this matrix in the partition's order",
            "another",
            "Plan the same A, with the same partition= or folder, on any number of ranks",
        )  # fmt: skip
    if weighted != ("values" in state):
        raise value_error(
            "load_state_dict", "state", "with values" if weighted else "without values",
            "none" if weighted else "some", "Load a checkpoint of a plan that is weighted alike",
        )  # fmt: skip
    if not weighted:
        return None
    part = state["values"].to_local().to(plan.dtype).contiguous()
    out, back = _overlaps(plan)
    return plan._ranks.exchange(part, back, out, "load_state_dict")
