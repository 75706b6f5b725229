"""The study of Voltrix-SpMM's experiments: generated matrices, rates, and the record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tools.voltrix_study import (
    DEVIATIONS,
    EXPERIMENTS,
    GAMMA_MEAN,
    _pipes,
    gamma_tiles,
    main,
    overlap_rate,
)

from sparsetile.formats import BMat
from sparsetile.kernels import bmat
from sparsetile.tune.fit import r2_of, with_window_tiles


def test_generated_windows_have_the_tiles_that_were_asked_for():
    tiles = [3, 0, 16, 1]
    csr = with_window_tiles(tiles, 128)
    found = BMat.pack(csr)
    even = [count + count % 2 for count in tiles]
    assert found.tiles_per_window().tolist() == even and csr.nnz == 8 * sum(tiles)
    assert found.distinct == csr.nnz, "an entry a column"
    assert csr.shape == (64, 128) and torch.equal(csr.values, with_window_tiles(tiles, 128).values)


def test_rejects_windows_with_more_tiles_than_columns():
    with pytest.raises(ValueError) as caught:
        with_window_tiles([5], 32)
    assert str(caught.value) == (
        "with_window_tiles: tiles must be at most 4 a window, got 5. Use more columns."
    )


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_gamma_windows_have_the_papers_mean_and_deviation(deviation):
    tiles = np.array(gamma_tiles(deviation))
    assert abs(tiles.mean() - GAMMA_MEAN) < 1 and tiles.min() >= 1
    assert abs(tiles.std() - deviation) <= 0.08 * deviation


def test_rates_are_those_of_the_papers_equations():
    assert overlap_rate(4.0, 2.0, 1.0) == pytest.approx(2 / 3)
    assert overlap_rate(1.0, 1.0, 1.0) is None
    assert r2_of([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1.0
    assert r2_of([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]) == 0.0


def test_changed_pipelines_are_put_back():
    before, held = dict(bmat.PIPES), dict(bmat.STACKED_PIPES)
    with pytest.raises(RuntimeError), _pipes(lambda pipe: bmat.LADDER["bmat"](pipe)):
        assert all(pipe.producers == 1 for pipe in bmat.PIPES.values())
        raise RuntimeError
    assert before == bmat.PIPES and held == bmat.STACKED_PIPES


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")
def test_without_a_gpu_the_record_says_what_was_not_run(tmp_path: Path):
    out = tmp_path / "study.json"
    assert main(["--out", str(out), "--commit", "abc"]) == 0
    record = json.loads(out.read_text())
    assert record["commit"] == "abc" and record["gpu"] is None
    assert record["not_run"] == [[None, "gamma", "no GPU"], [None, "fit", "no GPU"]]
    assert list(record["experiments"]) == list(EXPERIMENTS)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--only", "gama"], "voltrix_study: --only must be one of"),
        (["--time-limit", "0"], "--time-limit must be seconds above 0, got 0.0"),
    ],
)
def test_bad_arguments_are_refused(arguments, said, tmp_path, capsys):
    assert main(["--out", str(tmp_path / "a.json"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert main(["--out", str(tmp_path)]) == 2
    assert "--out must be a file, got the folder" in capsys.readouterr().err
