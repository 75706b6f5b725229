"""Sizes shared by the device kernels and the formats that they read."""

from __future__ import annotations

__all__ = ["BUNDLE_ROWS", "LENGTHS"]

# Rows of a bundle. Eight were slower: the extra sums in registers cost more than the reads of B
# that they saved.
BUNDLE_ROWS = 4
# Row lengths that schedules decide by (balance/segments.py, engines/rows/lengths.py). One pass
# counts the longer units for all of them.
LENGTHS = (16, 24, 32, 64, 96, 128, 256, 512, 1024, 2048)
