"""A launch of ``spmm_bcsr`` for one width, and the same ready for addresses of B and C."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import PreparedLaunch
from sparsetile.jit.tensor_map import map_bytes
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.bcsr import BlockTile
from sparsetile.systems.bcsr.engine import MapOf

__all__ = ["Launch", "PreparedBlocks", "queue_at"]

# Parameters that change from call to call: the maps of B and C, and C's address.
_OPERANDS = ("b", "stored", "c")
# Tensor maps that a prepared launch keeps: torch reuses few addresses.
_READY_MAPS = 64


@dataclass(frozen=True)
class Launch:
    """A loaded kernel with the parameters that depend only on the width."""

    kernel: LoadedKernel
    tile: BlockTile
    grid: tuple[int, int, int]
    queued: bool  # thread blocks take items from a queue in scratch memory

    def prepared(
        self, params: Mapping[str, Any], map_of_b: MapOf, map_of_c: MapOf, device: int,
        also: tuple[str, ...] = (),
    ) -> PreparedBlocks:  # fmt: skip
        """Return the launch with ``params``, ready for addresses of B, C and ``also``."""
        tile, rare = self.tile, ("queue",) if self.queued else ()
        made = self.kernel.prepare(self.grid, tile.threads, params, (*_OPERANDS, *also), rare)
        queue_of = functools.partial(queue_at, device) if self.queued else None
        return PreparedBlocks(made, map_of_b, map_of_c, queue_of)


class PreparedBlocks:
    """A launch for matrices like one B: each address of B and C has its own tensor map."""

    def __init__(
        self, prepared: PreparedLaunch, map_of_b: MapOf, map_of_c: MapOf,
        queue_of: Callable[[int], int] | None,
    ) -> None:  # fmt: skip
        """``queue_of``: returns the address of a stream's queue, if the launch has one."""
        self._launch, self._launch_with = prepared.launch, prepared.launch_with
        self._queue_of = queue_of
        self._map_of_b = map_of_b
        self._map_of_c = map_of_c
        self._ready_b: dict[int, bytes] = {}
        self._ready_c: dict[int, bytes] = {}

    def launch(self, stream: int, *values: int) -> None:
        """Multiply B, at the first address, into C, at the second; then other addresses."""
        b, c, *rest = values
        map_b = self._ready_b.get(b) or _ready(self._ready_b, b, self._map_of_b)
        map_c = self._ready_c.get(c) or _ready(self._ready_c, c, self._map_of_c)
        if self._queue_of is None:
            self._launch(stream, map_b, map_c, c, *rest)
        else:
            self._launch_with(stream, (self._queue_of(stream),), map_b, map_c, c, *rest)


def queue_at(device: int, stream: int) -> int:
    """Return the address of a stream's queue: the next item, and the finished thread blocks."""
    return scratch(device, stream, 1, 2)[1].data_ptr()


def _ready(kept: dict[int, bytes], pointer: int, map_of: MapOf) -> bytes:
    """Make the map of the matrix at an address, and keep it."""
    if len(kept) >= _READY_MAPS:
        kept.clear()  # in one step: another thread may be reading
    made = kept[pointer] = map_bytes(map_of(pointer))
    return made
