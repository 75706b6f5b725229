"""What systems of tiles on Tensor Cores share."""

from __future__ import annotations

from sparsetile.engines.request import Request
from sparsetile.systems.base import System
from sparsetile.systems.requirements import ampere_reasons, hopper_reasons, tile_reasons

__all__ = ["TileSystem"]


class TileSystem(System):
    """Tiles of A in the plan's row order, by ``mma.sync`` or, on ``sm_90a``, by WGMMA and TMA."""

    devices = ("cuda",)
    deterministic = True
    architectures = "sm_80 and newer"
    ordered = True
    rounds_to_tf32 = True
    counts_pairs = True

    def further_reasons(self, request: Request) -> list[str]:
        hopper = self.architectures == "sm_90a"
        return [*tile_reasons(request), *(hopper_reasons if hopper else ampere_reasons)(request)]
