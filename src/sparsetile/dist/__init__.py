"""Plans over several processes, on torch.distributed.

>>> import sparsetile.dist
>>> plan = sparsetile.dist.plan(A, n=128)  # on every rank, after init_process_group
>>> C_local = plan @ plan.shard(B)

Rows of A, B and C lie on the ranks. What a rank lacks of B is found once and exchanged at each
product while the local part is computed.
"""

from __future__ import annotations

from sparsetile.dist.folder import open_folder, write_folder
from sparsetile.dist.partition import Partition
from sparsetile.dist.plan import DistributedPlan
from sparsetile.dist.planner import plan
from sparsetile.dist.shares import Share

__all__ = ["DistributedPlan", "Partition", "Share", "open_folder", "plan", "write_folder"]
