"""Run any tests of PyG layers, PyG's own among them, on sparsetile.

python -m pytest -p sparsetile.pyg.plugin pytorch_geometric/test/nn/conv

Tests that pass without ``-p sparsetile.pyg.plugin`` and fail with it show bugs of the patch.
"""

from __future__ import annotations

from sparsetile.pyg.patching import patch, unpatch

__all__ = ["pytest_configure", "pytest_report_header", "pytest_unconfigure"]


def pytest_configure(config: object) -> None:
    """Patch before tests are imported."""
    patch()


def pytest_report_header(config: object) -> str:
    """Say so at the top of pytest's report."""
    return "PyG runs on sparsetile (sparsetile.pyg.patch)"


def pytest_unconfigure(config: object) -> None:
    """Leave nothing behind."""
    unpatch()
