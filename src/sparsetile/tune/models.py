"""Where the constants of cost models come from, and predictions corrected by a fit.

    measured   ``sparsetile tune --fit`` timed products on this GPU, with today's kernels
    shipped    the constants were fitted on a GPU of this model, and ship with the package
    scaled     the constants are an H200's, scaled by what the driver says of this GPU

A fit (``tune/fit_systems.py``) gives each system and size of element two numbers: its time is
``fixed + scale * prediction``. The shape of the prediction stays that of the system's own model, so
a fit needs few products, and cannot be wrong by more than the model for matrices unlike them.
"""

from __future__ import annotations

import functools

from sparsetile.core.device import Machine
from sparsetile.core.fitted import Fitted, SystemModel, read_fitted
from sparsetile.engines.request import Request
from sparsetile.jit.source import device_tree_digest

__all__ = ["corrected", "current_fit", "model_name", "source_of"]


def model_name(system: str, itemsize: int) -> str:
    """Return the name of a system's model for elements of ``itemsize`` bytes."""
    return f"{system}/{4 if itemsize >= 4 else 2}"


def current_fit(ceilings: Machine) -> Fitted | None:
    """Return the fit of this GPU with today's kernels, None if there is none."""
    if not ceilings.processors:
        return None
    found = read_fitted(ceilings.name)
    return found if found is not None and found.kernels == device_tree_digest() else None


def source_of(ceilings: Machine) -> str:
    """Return "measured", "shipped" or "scaled"; see the module's docstring."""
    fit = current_fit(ceilings)
    if fit is not None and fit.systems:
        return "measured"
    return "scaled" if ceilings.scaled else "shipped"


def corrected(system: str, request: Request, seconds: float) -> float:
    """Return a system's prediction as the fit of this GPU corrects it, if there is one."""
    ceilings = request.machine
    fit = request.once(("fit", ceilings), functools.partial(current_fit, ceilings))
    model: SystemModel | None = None
    if fit is not None:
        model = fit.systems.get(model_name(system, request.dtype.itemsize))
    return seconds if model is None else model.fixed + model.scale * seconds
