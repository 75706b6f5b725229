"""GPUs that tests of engines pretend to have, as those of systems do."""

from __future__ import annotations

from tests.systems.conftest import folder, gpu_facts

__all__ = ["folder", "gpu_facts"]
