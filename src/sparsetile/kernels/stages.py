"""Kernels that build a format in stages: threads and grid, one thread per element of a stage."""

from __future__ import annotations

from collections.abc import Iterator

from sparsetile.jit.source import ConfigValue

__all__ = ["STAGE_THREADS", "stage_config", "stage_configs", "stage_grid"]

STAGE_THREADS = 256
# Thread blocks per SM: all that it holds.
STAGE_BLOCKS = 8


def stage_config() -> dict[str, ConfigValue]:
    """Constants of such a kernel."""
    return {"kThreads": STAGE_THREADS}


def stage_configs() -> Iterator[dict[str, ConfigValue]]:
    """All configurations of such a kernel: one."""
    yield stage_config()


def stage_grid(work: int, processors: int) -> tuple[int, int, int]:
    """One thread per element, or all that the GPU holds, which stride over ``work`` elements."""
    return (min(-(-work // STAGE_THREADS), processors * STAGE_BLOCKS), 1, 1)
