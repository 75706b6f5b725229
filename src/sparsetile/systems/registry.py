"""The systems by name, and the runners of their recipes.

A system is a folder of this package, or was given to :func:`register`. Plans, ``auto``,
``explain``, the capability table, the checkers, the benchmarks and every contract suite read this
registry, so a new system needs no other edit.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from sparsetile.core.errors import UnsupportedError, value_error
from sparsetile.engines.request import BuiltSystem, Request, part
from sparsetile.engines.runner import ExactRunner, Runner
from sparsetile.systems.base import System

__all__ = [
    "SYSTEMS", "Systems", "candidates", "exact_part", "exact_runner", "exact_system", "register",
    "runner", "unregister", "unsupported",
]  # fmt: skip


class Systems(Mapping[str, System]):
    """Systems by name, in alphabetical order.

    An unused system costs nothing: only ``__init__.py`` of its folder is imported, with ``DEVICES``
    (supported types of devices) and, if the system is exact on some or planned quickly,
    ``EXACT_ON`` and ``QUICK_ON``. ``system.py`` is imported when its ``SYSTEM`` is looked up by
    name.
    """

    def __init__(self, package: str, folder: Path) -> None:
        self._package, self._folder = package, folder
        self._found: dict[str, System | ModuleType] | None = None
        self._exact: dict[str, str | None] = {}  # by type of device; every plan asks
        self._lock = threading.RLock()

    def _known(self) -> dict[str, System | ModuleType]:
        if self._found is None:
            with self._lock:
                folders = [each for each in pkgutil.iter_modules([str(self._folder)]) if each.ispkg]
                self._found = {
                    each.name: importlib.import_module(f"{self._package}.{each.name}")
                    for each in folders
                }
        return self._found

    def __getitem__(self, name: str) -> System:
        found = self._known()[name]
        if isinstance(found, ModuleType):
            with self._lock:
                system = importlib.import_module(f"{found.__name__}.system")
                found = self._known()[name] = system.SYSTEM
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known()))

    def __len__(self) -> int:
        return len(self._known())

    def __contains__(self, name: object) -> bool:
        return name in self._known()

    def on(self, device: str) -> list[str]:
        """Return the names of the systems that run on a type of device."""
        return [name for name in self if device in self._devices(name, "DEVICES", "devices")]

    def exact_on(self, device: str) -> str | None:
        """Return the name of a device type's exact system."""
        if device not in self._exact:
            exact = (n for n in self if device in self._devices(n, "EXACT_ON", "exact_on"))
            self._exact[device] = next(exact, None)
        return self._exact[device]

    def quick_on(self, device: str) -> list[str]:
        """Return the names of the systems that are planned about as quickly as the exact one."""
        return [name for name in self if device in self._devices(name, "QUICK_ON", "quick_on")]

    def _devices(self, name: str, of_folder: str, of_system: str) -> tuple[str, ...]:
        found = self._known()[name]
        if isinstance(found, ModuleType):
            return getattr(found, of_folder, ())
        return getattr(found, of_system)  # type: ignore[no-any-return]

    def add(self, system: System) -> None:
        """Add a system that has no folder here."""
        self._known()[system.name] = system
        self._exact = {}

    def remove(self, name: str) -> None:
        """Remove a system."""
        self._known().pop(name, None)
        self._exact = {}


SYSTEMS = Systems("sparsetile.systems", Path(__file__).parent)

# Weak references: plans and the operators' bundles keep their runners, and all share one.
_runners: weakref.WeakValueDictionary[str, Runner] = weakref.WeakValueDictionary()
_making = threading.RLock()  # a runner may ask for another, its exact one


def register(system: System) -> System:
    """Add a system; its name must be new."""
    if system.name in SYSTEMS or system.name == "auto":
        raise value_error(
            "register", "system.name", "a name that no system has", repr(system.name),
            "Choose another name, or call unregister first",
        )  # fmt: skip
    SYSTEMS.add(system)
    return system


def unregister(name: str) -> None:
    """Remove a system; plans that use it keep working."""
    SYSTEMS.remove(name)


def exact_system(device: str) -> System:
    """Return the system of a device type that computes exactly from the entries of A.

    It serves max, min and the gradient of A's values, whichever system was chosen.
    """
    name = SYSTEMS.exact_on(device)
    if name is None:
        known = [kind for kind in ("cpu", "cuda") if SYSTEMS.exact_on(kind)]
        raise value_error(
            "plan", "device", f"of type {' or '.join(known)}", device, "Move A to such a device"
        )
    return SYSTEMS[name]


def runner(recipe: str) -> Runner:
    """Return the runner of a recipe; the same object for the same text while it is alive."""
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
    """Return the exact system's build inside a build, which repairs its products; None without
    one."""
    recipe = json.loads(built.recipe.partition(":")[2]).get("exact")
    if recipe is None:
        return None
    return BuiltSystem(recipe.partition(":")[0], part("exact", built.tensors), recipe)


def candidates(request: Request, *names: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the systems that can serve the request, and the reasons of those that cannot.

    Without names, only systems that run on the request's type of device are considered.
    """
    asked = names or SYSTEMS.on(request.device.type)
    rejected = {name: SYSTEMS[name].reasons(request) for name in asked}
    able = [name for name, reasons in rejected.items() if not reasons]
    return able, {name: reasons for name, reasons in rejected.items() if reasons}


def unsupported(function: str, rejected: dict[str, list[str]], wanted: str) -> UnsupportedError:
    """Build the error that lists every rejected system with its reasons."""
    lines = [f"  {name}: {'; '.join(reasons)}" for name, reasons in rejected.items()]
    return UnsupportedError(
        f"{function}: system must support this product, got {wanted}. "
        "Each system's reason:\n" + "\n".join(lines)
    )
