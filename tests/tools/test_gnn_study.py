"""tools.gnn_study: the same losses by every path, records that resume, clear errors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tools.gnn_records import geometric_means, gnn_rows
from tools.gnn_study import main
from tools.gnn_training import DEFAULT_PATHS, PATHS, SETTINGS, Prepared, Setting, train
from torch import Tensor

from sparsetile.bench.record import read_records
from sparsetile.core.epoch import epoch
from sparsetile.core.errors import DataError
from sparsetile.data import generators
from sparsetile.nn.gcn import gcn_matrix
from tests.captures import FakeGraph
from tools import gnn_records as gnn
from tools import gnn_training as training

pytest.importorskip("torch_geometric")
GRAPH = "gen:power_law?rows=120&nnz=900&seed=1"
HOST_PATHS = ("pyg-sparse", "pyg-edges", "torch-sparse", "sparsetile", "sparsetile-fused")


@pytest.fixture(scope="module")
def matrix():
    graph = generators.power_law(120, 900, seed=1)
    return gcn_matrix(torch.stack([graph.indices.long(), graph.row_ids()]), 120)


@pytest.fixture(autouse=True)
def _small(monkeypatch, constants):
    constants(training, FEATURES=8)
    monkeypatch.setitem(SETTINGS, "gcn2-128", Setting(2, 16, "BRP-SpMM"))


def select(**more):
    given = {"device": "cpu", "epochs": 5, "graphs": (GRAPH,), "settings": ("gcn2-128",), **more}
    return gnn.Selection(**given)


def test_the_settings_are_the_papers():
    found = {name: (s.layers, s.hidden) for name, s in SETTINGS.items() if name != "gcn2-128"}
    assert found == {"gcn2-256": (2, 256), "gcn6-64": (6, 64), "gcn6-256": (6, 256)}


@pytest.mark.parametrize("setting", [Setting(2, 16, ""), Setting(6, 12, "")])
def test_every_path_trains_the_same_network(matrix, setting):
    runs = {name: train(PATHS[name], setting, matrix, 6) for name in HOST_PATHS}
    expected = runs["pyg-sparse"].losses
    assert len(expected) == 6 and expected[-1] < expected[0]
    for name, run in runs.items():
        assert run.losses == pytest.approx(expected, rel=1e-5), name
        assert run.train_seconds > 0 and run.step.median > 0 and run.host.median > 0
        assert run.peak_bytes is None and run.graph_bytes is None  # of a GPU alone
    assert runs["sparsetile"].choices["system"] in ("cpu", "dense")


def test_replayed_epochs_announce_that_parameters_were_written(torch_cuda):
    graph = FakeGraph.put_into(torch_cuda)
    clock = training._Clock(torch.device("cpu"), 5)
    replay = training._captured(lambda: torch.tensor(2.0), torch.zeros(5), clock)
    for number in range(2):
        assert replay() == 2.0 and graph.epochs[number] < epoch()


def test_the_network_is_pyg_s_gcn(matrix):
    from torch_geometric.nn import GCNConv

    setting = Setting(2, 16, "")
    net = training.Network(setting, PATHS["sparsetile"].prepare(matrix, 16, "auto").product)
    graph = generators.power_law(120, 900, seed=1)
    edge_index = torch.stack([graph.indices.long(), graph.row_ids()])
    x = torch.randn(120, training.FEATURES)
    theirs = x
    for number, (linear, bias) in enumerate(zip(net.maps, net.biases, strict=True)):
        layer = GCNConv(linear.in_features, linear.out_features)
        layer.load_state_dict({"lin.weight": linear.weight, "bias": bias})
        theirs = layer(theirs, edge_index)
        theirs = theirs.relu() if number == 0 else theirs
    torch.testing.assert_close(net(x), theirs, rtol=1e-4, atol=1e-5)


def test_bias_and_relu_are_in_the_product_or_apart(matrix):
    x, bias = torch.randn(120, 16), torch.randn(16)
    products = [PATHS[name].prepare(matrix, 16, "auto").product for name in HOST_PATHS]
    for relu in (False, True):
        results = [product(x, bias, relu) for product in products]
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-5)


def test_differences_of_losses_are_found():
    assert gnn.loss_differences([1.0, 2.0], [1.0, 2.0]) == [0, 0]
    assert gnn.loss_differences([1.0, 2.2], [1.0, 2.0]) == pytest.approx([0, 0.1])
    assert gnn.loss_differences([1.0], [1.0, 2.0]) == [float("inf")]
    assert gnn.loss_differences([float("nan")], [1.0]) == [float("inf")]
    assert gnn.loss_bound("cpu", "float32") < gnn.loss_bound("cuda", "float32")


def judged(losses, reference=(1.0,) * 300):
    """The verdict on losses beside those of PyG's sparse tensor, in float32 on a GPU."""
    entry = {
        "matrix": "a", "setting": "gcn2-128", "dtype": "float32", "reorder": "auto",
        "device": "cuda", "epochs": 300, "labels": "teacher", "status": "ok",
    }  # fmt: skip
    other = entry | {"path": "pyg-sparse", "kind": "baseline", "losses": list(reference)}
    mine = entry | {"path": "sparsetile", "kind": "system", "losses": list(losses)}
    return gnn._compared(mine, {gnn._key(other): other})


def test_single_epochs_count_at_first_and_the_median_of_them_later():
    first = gnn.COMPARED_EPOCHS
    same = [1.0] * 300
    assert judged(same)["status"] == "ok"
    early, late = list(same), list(same)
    early[first - 1] = late[first] = 1.5
    assert judged(early)["status"] == "wrong" and judged(late)["status"] == "ok"
    assert judged(early)["loss_difference"] == pytest.approx(0.5)
    drifted = [1.0] * first + [1.03] * (300 - first)
    assert judged(drifted)["status"] == "wrong"
    assert judged(drifted)["later_difference"] == pytest.approx(0.03)
    for lost in (float("nan"), float("inf"), gnn.NOT_FINITE):
        assert judged([*same[:-1], lost])["status"] == "wrong"
    assert judged(same[:-1])["status"] == "wrong"
    alone = {"path": "sparsetile", "kind": "system", "losses": same, "status": "wrong"}
    entry = judged(same) | alone
    assert gnn._compared(entry, {})["status"] == "wrong"  # the verdict stays


def test_losses_may_differ_by_twice_what_rounding_does():
    first = gnn.COMPARED_EPOCHS
    same = [1.0] * 300
    entry = judged(same)
    reference = entry | {"path": "pyg-sparse", "kind": "baseline", "losses": same}
    rounded = [1.0] * (first - 1) + [1.02] + [1.01] * (300 - first)
    control = entry | {"path": "pyg-rounded", "kind": "control", "losses": rounded}
    known = {gnn._key(each): each for each in (reference, control)}
    assert gnn._compared(control, known)["status"] == "ok"  # a finding, not a fault
    assert gnn._compared(control, known)["loss_difference"] == pytest.approx(0.02)

    def status(early: float, late: float) -> str:
        losses = [1.0] * (first - 1) + [early] + [late] * (300 - first)
        return gnn._compared(entry | {"losses": losses}, known)["status"]

    assert status(1.039, 1.019) == "ok"
    assert status(1.041, 1.0) == status(1.0, 1.03) == "wrong"


def test_the_control_rounds_both_operands_and_gradients_to_tf32():
    matrix = gcn_matrix(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]), 3, dtype=torch.float32)
    product = PATHS["pyg-rounded"].prepare(matrix, 4, "auto").product
    x, bias = torch.rand(3, 4).requires_grad_(), torch.zeros(4)
    A = torch.sparse_csr_tensor(matrix.indptr, matrix.indices, matrix.values, matrix.shape)

    def tf32(x: Tensor) -> Tensor:  # ten bits of fraction
        fraction, exponent = torch.frexp(x.detach().double())
        return torch.ldexp(torch.round(fraction * 2**11) / 2**11, exponent)

    out = product(x, bias, False)
    rounded = tf32(A.to_dense())
    torch.testing.assert_close(out.double(), rounded @ tf32(x), rtol=1e-6, atol=1e-7)
    grad = torch.rand(3, 4)
    (d_x,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(d_x.double(), rounded.t() @ tf32(grad), rtol=1e-6, atol=1e-7)
    half = matrix.with_values(matrix.values.bfloat16())
    assert PATHS["pyg-rounded"].missing(half, 4) == "TF32 is a precision of float32"


def test_a_record_is_judged_again_when_it_is_read(tmp_path):
    out = tmp_path / "gnn.jsonl"
    gnn.run_gnn(select(paths=("pyg-sparse", "sparsetile")), out=out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    lines[2]["status"] = "wrong"  # after the run and the first record
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = gnn.run_gnn(select(paths=("pyg-sparse", "sparsetile")), out=out, retry=True)
    assert again.measured == 0 and [r["status"] for r in again.records] == ["ok", "ok"]


def test_records_are_written_and_resumed(tmp_path):
    out, said = tmp_path / "gnn.jsonl", []
    outcome = gnn.run_gnn(select(), out=out, say=said.append)
    assert outcome.measured == len(DEFAULT_PATHS) and outcome.resumed == 0
    by_path = {record["path"]: record for record in outcome.records}
    for name in set(HOST_PATHS) & set(by_path):
        record = by_path[name]
        assert record["status"] == "ok" and len(record["losses"]) == 5
        assert record["total_seconds"] == record["prepare_seconds"] + record["train_seconds"]
        assert record["environment"]["device"] == "cpu" and record["rows"] == 120
    assert by_path["sparsetile"]["reference"] == "pyg-sparse"
    assert by_path["sparsetile"]["loss_difference"] <= 1e-3
    assert by_path["pyg-sparse"]["reference"] is None
    assert by_path["sparsetile-cudagraph"]["status"] == "skipped"
    assert by_path["no-product"]["status"] == "ok" and by_path["no-product"]["reference"] is None
    assert by_path["no-product"]["losses"] != by_path["pyg-sparse"]["losses"]
    assert len(read_records(out, gnn.validate_training)[0]) == len(DEFAULT_PATHS)

    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:3]) + lines[3][:40])  # a run killed while it wrote
    again = gnn.run_gnn(select(), out=out)
    assert (again.resumed, again.measured) == (2, len(DEFAULT_PATHS) - 2)
    assert [record["key"] for record in again.records] == [r["key"] for r in outcome.records]
    longer = gnn.run_gnn(select(epochs=6, paths=("sparsetile",)), out=out)
    assert longer.measured == 1 and longer.records[0]["reference"] is None


def test_each_paper_s_system_trains_the_same_network(tmp_path):
    """On the host they are only named: a record says why, and torch's product is the reference."""
    systems = {"csr", "acc", "rsh", "brp", "brp-1x4", "voltrix", "wcsr"}
    assert {f"sparsetile-{name}" for name in systems} == set(training.BACKENDS)
    paths = ("torch-sparse", "sparsetile", *training.BACKENDS)
    outcome = gnn.run_gnn(select(paths=paths), out=tmp_path / "gnn.jsonl")
    by_path = {record["path"]: record for record in outcome.records}
    assert by_path["sparsetile"]["reference"] == "torch-sparse"
    assert by_path["sparsetile"]["status"] == "ok"
    for name in training.BACKENDS:
        assert by_path[name]["reason"] == "this system needs a GPU"
    rows = {row["path"]: row for row in gnn_rows(outcome.records)}
    assert rows["sparsetile"]["step_over_sparse"] > 0


def test_a_backend_plans_its_own_system(matrix, monkeypatch):
    planned = []

    def planning(*args, **more):
        planned.append((more["system"], more["ablation"]))
        raise RuntimeError("planned")

    monkeypatch.setattr(training, "build_plan", planning)
    for path in training.BACKENDS.values():
        with pytest.raises(RuntimeError, match="planned"):
            path.prepare(matrix, 16, "auto")
    assert ("brp", "1x4") in planned and ("voltrix", None) in planned


def test_a_product_that_is_wrong_is_recorded_as_wrong(tmp_path, monkeypatch, capsys):
    right = PATHS["sparsetile"]

    def doubled(matrix, width, reorder):
        product = right.prepare(matrix, width, reorder).product
        return Prepared(lambda x, bias, relu: 2 * product(x, bias, relu))

    monkeypatch.setitem(PATHS, "sparsetile", replace(right, prepare=doubled))
    out = tmp_path / "gnn.jsonl"
    words = ["--device", "cpu", "--matrices", GRAPH, "--settings", "gcn2-128"]
    words += ["--epochs", "3", "--systems", "pyg-sparse,sparsetile", "--out", str(out)]
    assert main(words) == 1
    assert "sparsetile: wrong, losses differ by" in capsys.readouterr().err
    monkeypatch.setitem(PATHS, "sparsetile", right)
    assert main([*words, "--retry"]) == 0
    assert "1 measured, 1 already in" in capsys.readouterr().err


def test_a_run_that_fails_costs_its_own_record(tmp_path, monkeypatch):
    def broken(matrix, width, reorder) -> Prepared:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setitem(PATHS, "pyg-edges", replace(PATHS["pyg-edges"], prepare=broken))
    outcome = gnn.run_gnn(select(paths=("pyg-edges", "sparsetile")), out=tmp_path / "gnn.jsonl")
    assert [record["status"] for record in outcome.records] == ["error", "ok"]
    assert outcome.records[0]["reason"] == "CUDA out of memory"


def test_no_run_begins_after_the_time_limit(tmp_path):
    outcome = gnn.run_gnn(select(), out=tmp_path / "gnn.jsonl", time_limit=1e-9)
    assert outcome.measured == 0 and outcome.not_run == len(DEFAULT_PATHS) and not outcome.records


def test_graphs_that_are_absent_are_named_and_stand_ins_take_their_place(tmp_path):
    graphs = ("NoSuchGraph", f"NoSuchGraph|{GRAPH}")
    selection = select(graphs=graphs, paths=("sparsetile",), epochs=1)
    outcome = gnn.run_gnn(selection, data=tmp_path, out=tmp_path / "gnn.jsonl")
    assert len(outcome.absent) == 1 and "NoSuchGraph" in outcome.absent[0]
    assert [record["matrix"] for record in outcome.records] == [GRAPH]


def test_ratios_and_their_means():
    def record(matrix, path, step, total, kind="baseline"):
        return {
            "matrix": matrix, "setting": "gcn2-256", "dtype": "float32", "path": path,
            "reorder": "auto", "status": "ok", "kind": kind, "device": "cuda", "epochs": 500,
            "features": 128, "time": {"p50": step}, "host": {"p50": step},
            "prepare_seconds": 0.1, "total_seconds": total, "peak_bytes": int(step * 100),
        }  # fmt: skip

    records = []
    for matrix, ours in (("a", 1.0), ("b", 4.0)):
        records += [
            record(matrix, "pyg-sparse", 8.0, 80.0),
            record(matrix, "pyg-edges", 16.0, 160.0),
            record(matrix, "sparsetile", ours, 40.0, "system"),
        ]
    rows = gnn_rows(records)
    assert [row["step_over_sparse"] for row in rows] == [1.0, 0.5, 8.0, 1.0, 0.5, 2.0]
    assert rows[2]["total_over_sparse"] == 2.0 and rows[2]["step_over_edges"] == 16.0
    assert rows[2]["memory_over_sparse"] == pytest.approx(1 / 8)
    (mean,) = geometric_means(rows)
    assert mean["step_over_sparse"] == pytest.approx(4.0) and mean["graphs"] == 2
    assert mean["least_step_over_sparse"] == 2.0 and mean["total_over_sparse"] == pytest.approx(2)


@pytest.mark.parametrize("change", [{"schema": 9}, {"suite": "llm"}, {"status": "error"}])
def test_damaged_records_are_refused(tmp_path, change):
    out = tmp_path / "gnn.jsonl"
    (record,) = gnn.run_gnn(select(paths=("sparsetile",)), out=out).records
    assert gnn.validate_training(record) is record
    del record["key"]
    for damaged in (record, record | {"key": "a"} | change):
        with pytest.raises(DataError, match="line must be a whole gnn record"):
            gnn.validate_training(damaged)


def test_the_command_prints_a_table_or_json(tmp_path, capsys):
    words = ["--device", "cpu", "--matrices", GRAPH, "--settings", "gcn2-128"]
    words += ["--epochs", "2", "--systems", "pyg-sparse,sparsetile", "--reorder", "auto,rcm"]
    words += ["--out", str(tmp_path / "gnn.jsonl")]
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "over pyg-sparse" in table and "geometric mean over 1 graphs" in table
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [row["path"] for row in found["rows"]] == ["pyg-sparse", "sparsetile", "sparsetile"]
    assert [row["reorder"] for row in found["rows"]] == ["auto", "auto", "rcm"]
    assert len(found["means"]) == 2 and "0 measured, 3 already in" in captured.err


def test_bad_usage_is_one_line_and_exit_two(tmp_path, capsys):
    for words, text in (
        (["--epochs", "0"], "--epochs must be 1 or more"),
        (["--settings", "big"], "--settings must be one of"),
        (["--systems", "csr"], "--systems must be one of"),
        (["--dtype", "float64"], "--dtype must be one of"),
        (["--reorder", "up"], "--reorder must be one of"),
        (["--out", str(tmp_path)], "--out must be a file"),
    ):
        assert main(["--device", "cpu", *words]) == 2
        error = capsys.readouterr().err
        assert text in error and "Traceback" not in error, error
