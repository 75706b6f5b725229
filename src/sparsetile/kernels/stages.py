"""Kernels that build a format in stages: threads and grid, a thread for each element of a stage."""

from __future__ import annotations

from collections.abc import Iterator

from sparsetile.jit.source import ConfigValue

__all__ = ["STAGE_THREADS", "stage_config", "stage_configs", "stage_grid"]

STAGE_THREADS = 256
# Thread blocks for each SM: all that it holds.
_BLOCKS = 8


def stage_config() -> dict[str, ConfigValue]:
    """Constants of such a kernel."""
    return {"kThreads": STAGE_THREADS}


def stage_configs() -> Iterator[dict[str, ConfigValue]]:
    """All of such a kernel: one."""
    yield stage_config()


def stage_grid(work: int, processors: int) -> tuple[int, int, int]:
    """A thread for each of ``work`` elements, or all that the GPU holds, which take turns."""
    return (min(-(-work // STAGE_THREADS), processors * _BLOCKS), 1, 1)
