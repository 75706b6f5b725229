"""tools.choices: what the model would have taken of the systems that records hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sparsetile.bench.record import append_record
from sparsetile.core.device import H200
from sparsetile.intake.files import write_npz
from tests.bench.fakes import environment, failed, record
from tests.contracts.cases import csr_of, random_matrix, tf32
from tools import choices

GPU = environment(device_name=H200.name)


ENTRIES = 1234


def of(system: str, seconds: float, **more: Any) -> dict[str, Any]:
    usual = {"matrix": "mine", "environment": GPU, "nnz": ENTRIES}
    return record(**{**usual, **more}, system=system, seconds=seconds)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("mine", "PubMed"):
        write_npz(tmp_path / f"{name}.npz", csr_of(random_matrix(400, 300, 0.01)))
    return tmp_path


def test_only_what_auto_could_have_taken_on_an_h200_is_collected():
    product = choices.Product("mine", "identity", "float32", 128, False, ENTRIES, "file")
    ours, best = choices.collect([
        of("csr", 3e-6),
        of("csr", 9e-6, suite="all"),
        of("acc", 4e-6),
        of("acc", 1e-6, config={"ablation": "order"}),
        of("acc", 1e-6, reduce="mean"),
        of("acc", 1e-6, environment=environment()),
        of("acc", 1e-6, n=64),
        failed(matrix="mine", system="dense", environment=GPU),
        of("cusparse-csr1", 8e-6),
        of("cusparse-csr3", 6e-6),
        of("cusparse-csr3", 5e-6, suite="all"),
        of("pyg", 1e-6),
    ])  # fmt: skip
    assert ours == {product: {"csr": 3e-6, "acc": 4e-6}}, "the first record of a system counts"
    assert best == {product: 6e-6}, "of the first run"


def test_a_loss_is_the_time_of_the_taken_over_that_of_the_fastest(folder, monkeypatch):
    told = {"csr": 2e-6, "acc": 5e-6}
    monkeypatch.setattr(choices, "predict_systems", lambda request, able: told)
    ours, best = choices.collect([of("csr", 6e-6), of("acc", 4e-6), of("cusparse-csr1", 9e-6)])
    (found,) = choices.choices(ours, best, folder)
    assert (found.taken, found.loss) == ("csr", pytest.approx(1.5))
    (row,) = choices.rows([found])
    assert row == [
        "others", "float32", "identity", "128", "acc, csr", "1", "50.0 %", "1.50 mine", "csr 1",
        "1.50",
    ]  # fmt: skip
    acc, csr = choices.accuracy([found])
    assert acc == ["acc", "float32", "others", "1", "1.25", "1.25", "1.25", "1.25"]
    assert csr[4:] == ["0.33", "3.00", "0.33", "0.33"]


def test_orders_types_and_widths_are_predicted_as_they_were_measured(folder, monkeypatch):
    asked = []

    def predict(request, able):
        asked.append((request.n, request.dtype, request.permutation.name))
        assert request.machine is H200, "whatever this machine is"
        assert (request.csr.values is None) == (request.n == 32)
        return dict.fromkeys(able, 1e-6)

    monkeypatch.setattr(choices, "predict_systems", predict)
    kinds = [
        {"n": 32, "dtype": "float16"},
        {"n": 64, "weighted": True},
        {"n": 96, "weighted": True, "reorder": "affinity", "config": {"reorder": "affinity"}},
    ]
    ours, best = choices.collect(
        of(name, 1e-6, **kind) for kind in kinds for name in ("csr", "acc")
    )
    found = list(choices.choices(ours, best, folder))
    assert [(n, str(dtype), order) for n, dtype, order in asked] == [
        (32, "torch.float16", "identity"),
        (64, "torch.float32", "identity"),
        (96, "torch.float32", "affinity"),
    ]
    assert all(math.isnan(choice.cusparse) for choice in found)
    assert choices.rows(found)[0][-3:] == ["none", "csr 1", ""]


def test_the_models_own_predictions_make_the_table(folder, capsys):
    records = [
        of(name, seconds, matrix=matrix, suite=suite)
        for matrix, suite in (("PubMed", "core"), ("mine", "all"))
        for name, seconds in (("csr", 3e-6), ("acc", 7e-6), ("cusparse-csr2", 6e-6))
    ]
    file = folder / "records.jsonl"
    for made in records:
        append_record(file, made)
    environment(COLUMNS="200")
    with tf32(False):
        choices.main([str(file), "--data", str(folder)])
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["core", "float32", "identity", "128", "acc,", "csr", "1", "0.0", "%", "none", "csr",
            "1", "2.00"] in lines  # fmt: skip
    (csr,) = [line for line in lines if line[:3] == ["csr", "float32", "others"]]
    assert H200.launch / 2 / 3e-6 < float(csr[4]) < 1.5


def test_a_stand_in_is_generated_and_stands_apart(folder):
    kind = {"matrix": "ppi-like?scale=0.01", "source": "stand-in"}
    ours, best = choices.collect([of("csr", 5e-6, **kind), of("acc", 9e-6, **kind)])
    (found,) = choices.choices(ours, best, folder)
    assert found.product.part == "stand-ins" and 2e-6 < found.predicted["csr"] < 6e-6


@pytest.mark.parametrize(
    "kind",
    [{"matrix": "reddit-like", "source": "stand-in", "nnz": 10**8},
     {"matrix": "nnz-1e6", "source": "generated"}],
)  # fmt: skip
def test_a_large_or_nameless_matrix_is_left_out_and_named(folder, capsys, kind):
    ours, best = choices.collect([of("csr", 1e-6, **kind), of("acc", 1e-6, **kind)])
    assert list(choices.choices(ours, best, folder)) == []
    said = f"choices: {kind['matrix']} is left out, too large or no matrix of its own\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("wrong", ["records", "data"])
def test_what_is_not_there_is_said_in_one_line(folder, capsys, wrong):
    file = folder / "records.jsonl"
    for made in (of("csr", 3e-6), of("acc", 7e-6)):
        append_record(file, made)
    words = {"records": str(file), "data": str(folder)} | {wrong: str(folder / "nowhere")}
    with tf32(False), pytest.raises(SystemExit) as ended:
        choices.main([words["records"], "--data", words["data"]])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "nowhere" in said and said.count("\n") == 1
