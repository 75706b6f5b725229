"""Plans and sparse linear layers over several processes, on torch.distributed.

>>> import sparsetile.dist
>>> plan = sparsetile.dist.plan(A, n=128)  # on every rank, after init_process_group
>>> C_local = plan @ plan.shard(B)

The rows of A, B and C are distributed over the ranks. Planning finds the rows of B that each rank
needs from others. Each product exchanges them while it computes the local part.
"""

from __future__ import annotations

from typing import Any

from sparsetile.dist.features import feature_shares
from sparsetile.dist.folder import open_folder, write_folder
from sparsetile.dist.partition import Partition
from sparsetile.dist.plan import DistributedPlan
from sparsetile.dist.planner import plan
from sparsetile.dist.shares import Share
from sparsetile.dist.streamed import StreamedPlan, stream_plan
from sparsetile.dist.tensor_parallel import ColumnParallelSparseLinear, RowParallelSparseLinear

_STYLES = ("SparseColwiseParallel", "SparseRowwiseParallel", "SparseSwiGLUParallel")

__all__ = [
    "ColumnParallelSparseLinear",
    "DistributedPlan",
    "Partition",
    "RowParallelSparseLinear",
    "Share",
    "SparseColwiseParallel",  # noqa: F822
    "SparseRowwiseParallel",  # noqa: F822
    "SparseSwiGLUParallel",  # noqa: F822
    "StreamedPlan",
    "feature_shares",
    "open_folder",
    "plan",
    "stream_plan",
    "write_folder",
]


def __getattr__(name: str) -> Any:
    """Import the styles of torch's parallelize_module at first use."""
    if name in _STYLES:
        from sparsetile.dist import styles

        return getattr(styles, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
