"""``import sparsetile`` in a fresh process: cheap, and without a touch of CUDA."""

from __future__ import annotations

import json

import pytest

# torch may load some of these by itself, so only what comes on top of torch counts.
_PROBE = """
import json, sys, time
import torch
before = set(sys.modules)
started = time.perf_counter()
import sparsetile
print(json.dumps({
    "seconds": time.perf_counter() - started,
    "added": sorted(set(sys.modules) - before),
    "initialised": torch.cuda.is_initialized(),
    "public": [name for name in sparsetile.__all__ if not hasattr(sparsetile, name)],
}))
"""


@pytest.fixture(scope="module")
def probe(interpreter) -> dict:
    done = interpreter(_PROBE)
    assert done.returncode == 0 and done.stderr == ""
    return json.loads(done.stdout)


def test_importing_does_not_initialise_cuda(probe):
    assert probe["initialised"] is False


@pytest.mark.parametrize(
    "library", ["cuda", "numba", "llvmlite", "scipy", "matplotlib", "safetensors", "typer", "rich"]
)
def test_importing_loads_no_heavy_library(probe, library):
    assert [name for name in probe["added"] if name.split(".")[0] == library] == []


def test_importing_loads_nothing_that_only_proves_or_shows(probe):
    ours = {name.split(".")[1] for name in probe["added"] if name.startswith("sparsetile.")}
    assert ours and not ours & {"bench", "cli", "check"}


def test_importing_does_not_load_torch_s_tracer(probe):
    """torch._dynamo alone takes longer to import than all the rest of the package."""
    assert [name for name in probe["added"] if name.startswith("torch._dynamo")] == []


def test_importing_takes_little_time_beyond_torch(probe):
    # 0.1 s on a desktop core; the bound is that of a slow and busy machine.
    assert probe["seconds"] < 5


def test_every_public_name_exists(probe):
    assert probe["public"] == []
