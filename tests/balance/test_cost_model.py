"""Equation 1 and its fit."""

from __future__ import annotations

import numpy as np
import pytest

from sparsetile.balance.cost_model import CostModel, Reading, fit_cost_model

TRUE = CostModel(tile=2e-9, window=7e-9, fixed=5e-6)


def readings(noise: float = 0.0) -> list[Reading]:
    random = np.random.default_rng(1)
    found = []
    for width in (256, 512, 1024):
        for windows in (100, 1000, 5000):
            tiles = windows * int(random.integers(2, 40))
            seconds = TRUE.seconds(tiles, windows, width) * (1 + noise * random.standard_normal())
            found.append(Reading(tiles, windows, width, seconds))
    return found


def test_the_fit_finds_the_coefficients_that_made_the_times():
    fit = fit_cost_model(readings())
    assert fit.r2 == pytest.approx(1.0)
    assert fit.model.tile == pytest.approx(TRUE.tile)
    assert fit.model.window == pytest.approx(TRUE.window)
    assert fit.model.fixed == pytest.approx(TRUE.fixed)


def test_r2_falls_with_noise_and_stays_below_one():
    assert 0.9 < fit_cost_model(readings(0.1)).r2 < 1.0
    flat = [Reading(r.tiles, r.windows, r.width, 1.0 + 1e-9 * i) for i, r in enumerate(readings())]
    assert fit_cost_model(flat).r2 < 0.9


def test_no_coefficient_is_negative():
    shrinking = [
        Reading(r.tiles, r.windows, r.width, 1.0 / (r.windows * r.width)) for r in readings()
    ]
    model = fit_cost_model(shrinking).model
    assert min(model.tile, model.window, model.fixed) >= 0.0


def test_rejects_readings_that_do_not_determine_the_coefficients():
    with pytest.raises(ValueError) as caught:
        fit_cost_model(readings()[:2])
    assert str(caught.value) == (
        "fit_cost_model: readings must be at least 3, got 2. Measure more products."
    )
    with pytest.raises(ValueError) as caught:
        fit_cost_model([readings()[0]] * 5)
    assert str(caught.value) == (
        "fit_cost_model: readings must be of different windows, tiles and widths, got readings "
        "that do not tell the coefficients apart. Measure other matrices, too."
    )
