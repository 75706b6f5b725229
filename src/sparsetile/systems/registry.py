"""The systems there are, by name, and the way from a recipe to its runner.

A system is a folder of this package that registers itself when it is imported
(``systems/__init__.py`` imports them all). Plans, ``auto``, ``explain``, the capability table, the
checkers, the benchmarks and every contract suite read this registry: a system joins them by being
registered, and needs no other edit.
"""

from __future__ import annotations

import json
import threading
import weakref

from sparsetile.core.errors import UnsupportedError, value_error
from sparsetile.systems.base import BuiltSystem, ExactRunner, Request, Runner, System, part

__all__ = [
    "SYSTEMS",
    "candidates",
    "exact_part",
    "exact_runner",
    "exact_system",
    "register",
    "runner",
    "unregister",
    "unsupported",
]

SYSTEMS: dict[str, System] = {}

# Held weakly: plans and the operators' bundles keep their runners, and all of them share one.
_runners: weakref.WeakValueDictionary[str, Runner] = weakref.WeakValueDictionary()
_making = threading.RLock()  # a runner may ask for another, its exact one


def register(system: System) -> System:
    """Add a system; its name must be new."""
    if system.name in SYSTEMS or system.name == "auto":
        raise value_error(
            "register", "system.name", "a name that no system has", repr(system.name),
            "Choose another name, or call unregister first",
        )  # fmt: skip
    SYSTEMS[system.name] = system
    # By name, whichever was imported first: one system may take parts of another.
    for name in sorted(SYSTEMS):
        SYSTEMS[name] = SYSTEMS.pop(name)
    return system


def unregister(name: str) -> None:
    """Remove a system; plans that hold it go on."""
    SYSTEMS.pop(name, None)


def exact_system(device: str) -> System:
    """Return the system of a device type that computes exactly what the entries of A say.

    It serves max, min and the gradient of A's values, whichever system was chosen.
    """
    for system in SYSTEMS.values():
        if device in system.exact_on:
            return system
    known = sorted({kind for system in SYSTEMS.values() for kind in system.exact_on})
    raise value_error(
        "plan", "device", f"of type {' or '.join(known)}", device, "Move A to such a device"
    )


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


def exact_runner(recipe: str, asker: str) -> ExactRunner:
    """Return the runner of an exact system's recipe, for ``asker``, which repairs with it."""
    found = runner(recipe)
    if not isinstance(found, ExactRunner):
        raise TypeError(f"{asker}: exact must be an exact runner, got {type(found).__name__}.")
    return found


def exact_part(built: BuiltSystem) -> BuiltSystem | None:
    """Return the exact system's build that a build has in it to repair with; None where it has
    none."""
    recipe = json.loads(built.recipe.partition(":")[2]).get("exact")
    if recipe is None:
        return None
    return BuiltSystem(recipe.partition(":")[0], part("exact", built.tensors), recipe)


def candidates(request: Request) -> tuple[list[str], dict[str, list[str]]]:
    """Return the systems that can serve the request, and the reasons of those that cannot."""
    rejected = {name: system.reasons(request) for name, system in SYSTEMS.items()}
    able = [name for name, reasons in rejected.items() if not reasons]
    return able, {name: reasons for name, reasons in rejected.items() if reasons}


def unsupported(function: str, rejected: dict[str, list[str]], wanted: str) -> UnsupportedError:
    """Build the error that lists every rejected system with its reasons."""
    lines = [f"  {name}: {'; '.join(reasons)}" for name, reasons in rejected.items()]
    return UnsupportedError(
        f"{function}: system must support this product, got {wanted}. "
        "Each system's reason:\n" + "\n".join(lines)
    )
