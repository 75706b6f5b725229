"""``sparsetile tune``: measurements of this machine that are stored on disk."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import torch
import typer

from sparsetile.cli.console import note, print_json, print_table, print_text
from sparsetile.cli.options import ACTIONS, Action, Json
from sparsetile.core.checks import one_of
from sparsetile.core.device import machine
from sparsetile.core.fitted import Fitted, clear_fitted, fitted_folder, kept_fits, read_fitted
from sparsetile.data.generators import from_spec
from sparsetile.tune import kept_timings
from sparsetile.tune.fit import fit_schedule
from sparsetile.tune.fit_systems import MATRICES
from sparsetile.tune.kept import Timing

__all__ = ["tune"]

_COLUMNS = ("matrix", "order", "N", "type", "device", "fastest", "ms", "others timed", "date")
_MODEL_COLUMNS = ("system", "products", "scale", "fixed", "R²", "worst factor")


def _row(timing: Timing) -> list[str]:
    key, chosen = timing.key, timing.system
    others = sorted(timing.measured - {chosen}, key=timing.seconds.__getitem__)
    return [
        str(key.get("matrix", "")).rsplit("-", 1)[0].replace("-", ", ") + " entries",
        str(key.get("order", "")).split("-")[0], str(key.get("n", "")), str(key.get("dtype", "")),
        str(key.get("device", "")), chosen, f"{timing.seconds[chosen] * 1e3:.3f}",
        ", ".join(f"{name} {timing.seconds[name] * 1e3:.3f}" for name in others),
        datetime.fromtimestamp(timing.date, UTC).strftime("%Y-%m-%d %H:%M"),
    ]  # fmt: skip


def _plain(timing: Timing) -> dict[str, Any]:
    return {**asdict(timing), "measured": sorted(timing.measured)}


def _print_fit(fitted: Fitted) -> None:
    if fitted.coefficients:
        named = ", ".join(f"{name} {each:.4g}" for name, each in fitted.coefficients.items())
        print_text(
            f"{fitted.gpu}: voltrix's schedule, seconds of Equation 1: {named}; R² "
            f"{fitted.r2_fitted:.4f}, {fitted.r2_others:.4f} on products it was not fitted to"
        )
    rows = [
        [name, str(each.products), f"{each.scale:.2f}", f"{each.fixed * 1e6:.1f}", f"{each.r2:.3f}",
         f"{each.worst:.2f}"]
        for name, each in sorted(fitted.systems.items()) if each.products
    ]  # fmt: skip
    if rows:
        print_text(
            f"{fitted.gpu}: each system's time by bytes of an element: scale x its model + fixed us"
        )
        print_table(_MODEL_COLUMNS, rows, right=_MODEL_COLUMNS[1:])


def _fit(as_json: bool) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fit_schedule(device, map(from_spec, MATRICES))
    found = read_fitted(machine(device).name)
    assert found is not None, "just written"
    if as_json:
        print_json({"path": str(fitted_folder()), "fitted": asdict(found)})
    else:
        _print_fit(found)
    return 0


def tune(
    action: Action = "show",
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Time generated products on this GPU, fit the cost models of all systems to them "
            "and store these; takes up to 90 seconds.",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Show, clear or locate what is stored here: timings of plans, cost models of --fit."""
    one_of("tune", "action", action, ACTIONS)
    if fit:
        return _fit(as_json)
    kept = kept_timings()
    if action == "path":
        print_text(str(kept.folder))
        return 0
    if action == "clear":
        note(f"sparsetile: removed {kept.clear() + clear_fitted()} files from {kept.folder}")
        return 0
    entries, fits = kept.entries(), kept_fits()
    if as_json:
        timings, models = [_plain(each) for each in entries], [asdict(each) for each in fits]
        print_json({"path": str(kept.folder), "timings": timings, "fitted": models})
        return 0
    if entries:
        print_table(_COLUMNS, [_row(each) for each in entries], right=("N", "ms"))
    for each in fits:
        _print_fit(each)
    if not entries and not fits:
        print_text(f"nothing is kept in {kept.folder}")
    return 0
