"""``systems``, ``plan``, ``cache``, ``tune``: tables, files, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sparsetile
from sparsetile.cli import compile as compile_module
from sparsetile.core.fitted import keep_fitted
from sparsetile.data.generators import banded
from tests.cli.conftest import Cli, assert_refused
from tests.cli.test_compile import few


def test_systems_prints_the_capability_table(cli: Cli):
    outcome = cli("systems")
    assert outcome.code == 0 and outcome.err == ""
    lines = outcome.out.splitlines()
    names = [line.split()[1] for line in lines if line.startswith("system ")]
    assert names == [row["name"] for row in sparsetile.systems()]
    assert cli("systems", "--json").json == sparsetile.systems()


@pytest.mark.usefixtures("no_gpu")
def test_plan_explains_and_saves_a_plan_that_loads(cli: Cli, folder: Path, tmp_path: Path):
    file = tmp_path / "a.safetensors"
    outcome = cli("plan", "weighted", "--data", folder, "-n", 16, "--out", file)
    assert outcome.code == 0
    assert outcome.out.startswith("Plan(60x50, 400 entries") and "slower" in outcome.out
    assert outcome.err == f"sparsetile: saved {file} ({file.stat().st_size} bytes)\n"
    plan = sparsetile.load_plan(file)
    assert (plan.shape, plan.n, plan.dtype) == ((60, 50), 16, torch.float32)


@pytest.mark.usefixtures("no_gpu")
def test_plan_as_json_names_its_choices(cli: Cli, folder: Path):
    found = cli("plan", "band", "--data", folder, "--system", "cpu", "--json").json
    assert found["system"] == "cpu" and found["n"] == 128 and found["floor_seconds"] > 0
    assert found["rejected"] == {}


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("nowhere",), ("got 'nowhere'",)),
        (("x", "--out", "a.bin"), ("plan: --out must be a file named .safetensors, got 'a.bin'.",)),
        (
            ("x", "--out", "no/where/a.safetensors"),
            ("plan: --out must be a file in a folder that exists",),
        ),
        (("x", "--tune", "guess"), ("plan: --tune must be one of",)),
        (("x", "--dtype", "int8"), ("plan: --dtype must be one of",)),
        (("gen:banded?rows=9&bandwidth=1", "--system", "magic"), ("system must be one of",)),
    ],
)
def test_plan_refuses_bad_usage(cli: Cli, words: tuple[str, ...], texts: tuple[str, ...]):
    assert_refused(cli("plan", *words), *texts)


def test_the_cache_is_located_counted_and_cleared(cli: Cli, tmp_path: Path, constants):
    constants(compile_module, KERNELS={"sddmm_csr": few("sddmm_csr", 1)})
    folder = tmp_path / "kernels"
    assert cli("cache", "path").out == f"{folder}\n"
    assert cli("cache", "--json").json["files"] == 0
    assert cli("compile", "--arch", "sm_80").code == 0
    found = cli("cache", "show", "--json").json
    assert found["path"] == str(folder) and found["files"] > 0 and found["bytes"] > 1000
    assert found["limit_bytes"] == 512 * 2**20
    assert str(found["files"]) in cli("cache").out
    cleared = cli("cache", "clear")
    assert cleared.code == 0 and cleared.out == ""
    assert f"removed {found['files']} files" in cleared.err
    assert cli("cache", "--json").json["files"] == 0


def test_an_empty_cache_can_be_cleared(cli: Cli):
    assert "removed 0 files" in cli("cache", "clear").err


def test_the_cache_refuses_bad_usage(cli: Cli, environment):
    assert_refused(cli("cache", "burn"), "cache: action must be one of ['show', 'clear', 'path']")
    environment(SPARSETILE_CACHE_MEGABYTES="much")
    assert_refused(cli("cache"), "SPARSETILE_CACHE_MEGABYTES must be a positive whole number")


def test_kept_timings_are_shown_located_and_cleared(cli: Cli):
    folder = cli("tune", "path").out.strip()
    assert cli("tune").out == f"nothing is kept in {folder}\n"
    sparsetile.plan(banded(40, 2), 8, tune="measure", device="cpu")
    shown = cli("tune", "show")
    assert shown.code == 0 and "40x40" in shown.out and "identity" in shown.out
    (timing,) = cli("tune", "--json").json["timings"]
    assert timing["key"]["n"] == 8 and timing["system"] in timing["measured"]
    assert "removed 1 files" in cli("tune", "clear").err
    assert cli("tune", "--json").json["timings"] == []


def test_tune_shows_and_clears_cost_models(cli: Cli):
    keep_fitted("NVIDIA H200", "kernels", {"tile": 4e-12, "window": 1.2e-11}, 0.99, 0.98)
    out = " ".join(cli("tune").out.split())
    assert "NVIDIA H200: voltrix's schedule" in out and "tile 4e-12" in out and "0.9800" in out
    (model,) = cli("tune", "--json").json["fitted"]
    assert model["coefficients"]["window"] == 1.2e-11
    assert "removed 1 files" in cli("tune", "clear").err
    assert cli("tune", "--json").json["fitted"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")
def test_tune_fits_on_a_gpu_alone(cli: Cli):
    assert_refused(cli("tune", "--fit"), "tune: --fit must be run on a machine with a GPU")


def test_tune_refuses_bad_usage(cli: Cli):
    assert_refused(cli("tune", "burn"), "tune: action must be one of ['show', 'clear', 'path']")
