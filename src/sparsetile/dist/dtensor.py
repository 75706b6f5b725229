"""B and C as DTensors sharded on their rows. Imports torch's package at first use."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.dist.partition import Partition, even_bounds

__all__ = ["is_dtensor", "unwrap", "wrap"]


class Sharded(Protocol):
    """The attributes of a plan that DTensors need."""

    shape: tuple[int, int]
    local_shape: tuple[int, int]
    world_size: int
    partition: Partition

    @property
    def group(self) -> Any: ...


def is_dtensor(B: Any) -> bool:
    """Whether B is a DTensor, without importing its package."""
    return any(
        base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed.")
        for base in type(B).__mro__
    )


def _chunked(plan: Sharded) -> bool:
    """Whether rows of B and of C are split as ``torch.chunk`` does."""
    partition = plan.partition
    return partition.order is None and all(
        bounds == even_bounds(size, plan.world_size)
        for bounds, size in zip((partition.rows, partition.columns), plan.shape, strict=True)
    )


def unwrap(plan: Sharded, B: Any) -> tuple[Any, Tensor]:
    """Return the mesh and this rank's rows of a DTensor with the plan's layout, or raise."""
    from torch.distributed.tensor import Shard

    mesh, placements, dim = B.device_mesh, B.placements, B.dim() - 2
    wanted = (
        mesh.ndim == 1
        and placements[0] in (Shard(dim), Shard(-2))
        and dist.get_process_group_ranks(mesh.get_group())
        == dist.get_process_group_ranks(plan.group)
    )
    local = B.to_local() if wanted else None
    if local is None or local.shape[-2] != plan.local_shape[1] or not _chunked(plan):
        raise value_error(
            "run", "B", f"a DTensor sharded on dimension {dim} over the plan's group, in torch's "
            "chunks", f"{placements} over {mesh}",
            "Plan with partition='even', whose shares are those of a DTensor",
        )  # fmt: skip
    return mesh, local


def wrap(plan: Sharded, C: Tensor, mesh: Any) -> Tensor:
    """Return this rank's rows of C as a DTensor."""
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((*C.shape[:-2], plan.shape[0], C.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        C.contiguous(), mesh, [Shard(C.dim() - 2)], run_check=False, shape=shape, stride=stride
    )
