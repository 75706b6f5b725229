"""What the checkout is today, read once a process, when a test first asks."""

from __future__ import annotations

import functools

from tools.compile_all import kernel_digests
from tools.gpu_tests import GpuTests
from tools.parts import part_digests
from tools.record import ROOT

__all__ = ["digests_of_today", "gpu_tests_of_today", "kernel_digests_of_today"]

digests_of_today = functools.cache(part_digests)
kernel_digests_of_today = functools.cache(kernel_digests)


@functools.cache
def gpu_tests_of_today() -> GpuTests:
    """Return which parts the GPU tests of this checkout belong to."""
    return GpuTests(ROOT)
