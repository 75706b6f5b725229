"""The systems there are, by name, and the way from a recipe to its runner.

A new system is one file plus one line here; every contract suite then runs on it.
"""

from __future__ import annotations

import json
import threading
import weakref

from sparsetile.core.errors import UnsupportedError
from sparsetile.systems.acc.system import AccSystem
from sparsetile.systems.base import Request, Runner, System
from sparsetile.systems.bcsr.system import BCSRSystem
from sparsetile.systems.cpu.system import CPUSystem
from sparsetile.systems.csr.system import CSRSystem
from sparsetile.systems.cusparse.system import CuSparseSystem
from sparsetile.systems.dense.system import DenseSystem
from sparsetile.systems.wcsr.system import WCSRSystem

__all__ = ["PATTERN_SYSTEMS", "SYSTEMS", "candidates", "runner", "unsupported"]

_ACC, _CSR, _CPU = AccSystem(), CSRSystem(), CPUSystem()

# The system of each device type that serves max, min and the gradient of A's values, and that
# computes exactly what the entries of A say.
PATTERN_SYSTEMS: dict[str, System] = {"cuda": _CSR, "cpu": _CPU}

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        _ACC,
        BCSRSystem(_CSR),
        _CSR,
        CuSparseSystem(),
        DenseSystem(PATTERN_SYSTEMS),
        WCSRSystem(_ACC),
        _CPU,
    )
}


# Held weakly: plans and the operators' bundles keep their runners, and all of them share one.
_runners: weakref.WeakValueDictionary[str, Runner] = weakref.WeakValueDictionary()
_making = threading.RLock()  # a runner may ask for another, its exact one


def runner(recipe: str) -> Runner:
    """Return the runner of a recipe; the same object for the same text while anyone holds it."""
    found = _runners.get(recipe)
    if found is None:
        with _making:
            found = _runners.get(recipe)
            if found is None:
                name, _, body = recipe.partition(":")
                found = _runners[recipe] = SYSTEMS[name].make_runner(json.loads(body))
    return found


def candidates(request: Request) -> tuple[list[str], dict[str, list[str]]]:
    """Return the systems that can serve the request, and the reasons of those that cannot."""
    rejected = {name: system.reasons(request) for name, system in SYSTEMS.items()}
    able = [name for name, reasons in rejected.items() if not reasons]
    return able, {name: reasons for name, reasons in rejected.items() if reasons}


def unsupported(function: str, rejected: dict[str, list[str]], wanted: str) -> UnsupportedError:
    """Build the error that lists every rejected system with its reasons."""
    lines = [f"  {name}: {'; '.join(reasons)}" for name, reasons in rejected.items()]
    return UnsupportedError(
        f"{function}: system must be able to serve this product, got {wanted}. "
        "Each system's reason:\n" + "\n".join(lines)
    )
