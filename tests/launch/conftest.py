"""GPUs that tests of launches pretend to have."""

from tests.systems.conftest import folder, gpu_facts

__all__ = ["folder", "gpu_facts"]
