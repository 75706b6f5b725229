"""``sparsetile run``: the main job, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsetile.plan.plan import Plan
from sparsetile.systems import SYSTEMS
from tests.cli.conftest import Cli, assert_refused

pytestmark = pytest.mark.usefixtures("no_gpu")

FAST = ("-n", 8, "--repeats", 2)
ON_HOST = [name for name, system in SYSTEMS.items() if "cpu" in system.devices]


def test_it_multiplies_checks_times_and_prints_a_row_per_matrix(cli: Cli, folder: Path):
    outcome = cli("-q", "run", "weighted", "band", "--data", folder, *FAST)  # it may compile
    assert outcome.code == 0 and outcome.err == ""
    header, _, first, second = outcome.out.splitlines()
    for word in ("matrix", "shape", "nnz", "system", "time", "GFLOP/s", "GB/s", "error", "verdict"):
        assert word in header
    assert first.split()[0] == "weighted" and "60 x 50" in first and first.endswith("ok")
    assert second.split()[0] == "band" and "40 x 40" in second and second.endswith("ok")


def test_json_holds_the_same_figures(cli: Cli, folder: Path):
    (row,) = cli("run", "weighted", "--data", folder, *FAST, "--json").json
    assert row["shape"] == [60, 50] and row["nnz"] == 400 and row["weighted"] is True
    assert row["ok"] is True and 0 < row["error"] <= 1 and row["checked"] == "all rows"
    assert row["device"] == "cpu" and row["system"] in ON_HOST
    assert row["gflops"] == pytest.approx(2 * 400 * 8 / row["seconds"] / 1e9)
    moved = (4 + 4) * 400 + 4 * 8 * (50 + 60)
    assert row["gbytes_per_second"] == pytest.approx(moved / row["seconds"] / 1e9)
    assert row["floor_share"] is None and row["timing"] == "clock"
    assert 0 < row["p20_seconds"] <= row["seconds"] <= row["p80_seconds"]


def test_a_wrong_product_is_exit_code_1(cli: Cli, folder: Path, monkeypatch):
    right = Plan.run

    def wrong(self: Plan, B: torch.Tensor, **options: object) -> torch.Tensor:
        C = right(self, B, **options)  # type: ignore[arg-type]
        C[3, 5] += 1e-3
        return C

    monkeypatch.setattr(Plan, "run", wrong)
    outcome = cli("run", "weighted", "--data", folder, *FAST)
    assert outcome.code == 1
    assert outcome.out.splitlines()[-1].endswith("WRONG")


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "amin"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_type_and_reduction(cli: Cli, folder: Path, dtype: str, reduce: str):
    outcome = cli(
        "run", "weighted", "--data", folder, *FAST, "--dtype", dtype, "--reduce", reduce, "--json"
    )
    assert outcome.code == 0
    assert outcome.json[0]["dtype"] == dtype


@pytest.mark.parametrize("system", ON_HOST)
def test_the_system_can_be_named(cli: Cli, folder: Path, system: str):
    (row,) = cli("run", "band", "--data", folder, *FAST, "--system", system, "--json").json
    assert row["system"] == system and row["ok"]


def test_the_system_can_be_measured(cli: Cli, folder: Path):
    (row,) = cli("run", "band", "--data", folder, *FAST, "--tune", "measure", "--json").json
    assert row["ok"]


@pytest.mark.parametrize("command", ["run", "plan"])
def test_the_row_order_can_be_named(cli: Cli, folder: Path, command: str):
    fast = FAST if command == "run" else ("-n", 8)
    told = cli(command, "weighted", "--data", folder, *fast, "--reorder", "rcm", "--json").json
    assert (told[0] if command == "run" else told)["reorder"] == "rcm"
    assert_refused(
        cli(command, "weighted", "--data", folder, *fast, "--reorder", "best"),
        f"{command}: --reorder must be one of", "rcm",
    )  # fmt: skip


def test_a_pattern_stays_one_unless_weights_are_asked_for(cli: Cli, folder: Path):
    (plain,) = cli("run", "band", "--data", folder, *FAST, "--json").json
    (heavy,) = cli("run", "band", "--data", folder, *FAST, "--weighted", "--json").json
    assert (plain["weighted"], heavy["weighted"]) == (False, True)
    assert plain["ok"] and heavy["ok"]


def test_paths_specs_and_stand_ins_are_matrices_too(cli: Cli, folder: Path):
    names = [folder / "weighted.npz", "gen:banded?rows=30&bandwidth=1", "ddi-like?scale=0.01"]
    outcome = cli("run", *names, *FAST, "--json")
    assert outcome.code == 0
    assert [row["matrix"] for row in outcome.json] == [str(name) for name in names]


def test_a_matrix_without_entries_is_multiplied_too(cli: Cli):
    (row,) = cli("run", "gen:random?rows=5&cols=4&nnz=0", *FAST, "--json").json
    assert row["ok"] and row["gflops"] == 0


def test_values_too_large_for_the_type_are_announced(cli: Cli, tmp_path: Path):
    file = tmp_path / "large.mtx"
    file.write_text("%%MatrixMarket matrix coordinate real general\n2 2 2\n1 1 1e9\n2 2 1.5\n")
    outcome = cli("run", file, *FAST, "--dtype", "float16", "--json")
    assert "1 values of A are too large for float16 and become Inf" in outcome.err
    assert outcome.json[0]["ok"]


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("nowhere",), ("load: matrix must be", "got 'nowhere'")),
        (("nowhere.mtx",), ("got 'nowhere.mtx'",)),
        (("gen:frob?rows=3",), ("generator must be one of",)),
        (("gen:banded?rows=3&bandwidth=x",), ("bandwidth",)),
        (("band", "--data", "no/such/folder"), ("must be a folder",)),
        (("band", "--dtype", "int8"), ("run: --dtype must be one of", "'int8'")),
        (("band", "--reduce", "prod"), ("run: reduce must be one of", "'prod'")),
        (("band", "--system", "magic"), ("run: --system must be one of", "'magic'")),
        (("band", "--tune", "guess"), ("run: --tune must be one of", "'guess'")),
        (("band", "--device", "tpu"), ("run: --device must be one of", "'tpu'")),
        (
            ("band", "--device", "cuda"),
            ("run: --device must be auto or cpu if torch finds no CUDA GPU, got cuda. Run",),
        ),
    ],
)
def test_bad_usage_is_one_line(cli: Cli, words: tuple[str, ...], texts: tuple[str, ...]):
    assert_refused(cli("run", *words), *texts)


def test_a_damaged_file_is_one_line(cli: Cli, folder: Path):
    assert_refused(cli("run", folder / "broken.mtx"), "broken.mtx must be")


def test_a_system_that_cannot_is_one_line_with_its_reason(cli: Cli, folder: Path):
    outcome = cli("run", "band", "--data", folder, "--system", "csr")
    assert_refused(outcome, "got csr", "csr: runs on cuda, A is on cpu")


def test_rows_measured_before_an_error_are_still_printed(cli: Cli, folder: Path):
    outcome = cli("run", "band", "nowhere", "--data", folder, *FAST)
    assert outcome.code == 2
    assert outcome.out.splitlines()[-1].endswith("ok")
    assert "got 'nowhere'" in outcome.err


def test_a_device_number_beyond_the_last_is_refused(cli: Cli, folder: Path, torch_cuda):
    torch_cuda(is_available=True, device_count=2)
    outcome = cli("run", "band", "--data", folder, "--device", "cuda:7")
    assert_refused(outcome, "run: --device must be one of ['cuda:0', 'cuda:1'], got cuda:7.")


def test_tf32_is_allowed_for_the_run_alone(cli: Cli, folder: Path):
    before = torch.backends.cuda.matmul.allow_tf32
    assert cli("run", "band", "--data", folder, *FAST, "--tf32").code == 0
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_a_matrix_of_float64_is_multiplied_in_float64(cli: Cli, tmp_path: Path):
    path = tmp_path / "double.mtx"
    path.write_text("%%MatrixMarket matrix coordinate real general\n2 2 2\n1 1 1.5\n2 1 -2\n")
    for words, expected in (((), "float64"), (("--dtype", "float32"), "float32")):
        (row,) = cli("run", path, *FAST, *words, "--json").json
        assert row["dtype"] == expected and row["ok"]
    assert cli("plan", path, "--json").json["dtype"] == "float64"
    (row,) = cli("run", "gen:banded?rows=9&bandwidth=1", *FAST, "--json").json
    assert row["dtype"] == "float32"
