"""The choice of a system: predictions for each able one, or measurements of each."""

from __future__ import annotations

import pytest
import torch

from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, Request
from sparsetile.tune import measure, measure_systems, predict_systems
from tests.contracts.cases import assert_close, csr_of, random_matrix

CPU = torch.device("cpu")


def request(density: float = 0.05, n: int = 16, **kwargs) -> Request:
    csr = csr_of(random_matrix(300, 200, density), **kwargs)
    return Request(csr, n, torch.float32, Permutation("identity", None))


def test_every_system_has_a_prediction():
    found = predict_systems(request(), list(SYSTEMS))
    assert found.keys() == SYSTEMS.keys()
    assert all(seconds > 0 for seconds in found.values())


def test_only_the_able_are_predicted():
    assert list(predict_systems(request(), ["cpu", "dense"])) == ["cpu", "dense"]


def test_a_sparser_matrix_is_predicted_to_be_cheaper_and_a_dense_one_to_prefer_dense():
    sparse, full = (predict_systems(request(density), ["cpu", "dense"]) for density in (0.001, 1.0))
    assert sparse["cpu"] < full["cpu"] and sparse["dense"] == full["dense"]
    assert min(sparse, key=sparse.__getitem__) == "cpu"
    assert min(full, key=full.__getitem__) == "dense"


def test_a_wider_product_is_predicted_to_cost_more():
    able = list(SYSTEMS)
    narrow, wide = predict_systems(request(n=8), able), predict_systems(request(n=800), able)
    assert all(narrow[name] < wide[name] for name in able)


def test_measuring_warms_up_and_takes_the_median():
    calls = []
    seconds = measure(lambda: calls.append(1), CPU, repeats=5)
    assert len(calls) == 7 and 0 <= seconds < 1


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
def test_measured_systems_come_with_stages_that_can_be_run(pattern):
    from sparsetile.systems import runner

    wanted = request(pattern=pattern)
    seconds, stages = measure_systems(wanted, ["cpu", "dense"])
    assert seconds.keys() == stages.keys() == {"cpu", "dense"}
    assert all(value > 0 for value in seconds.values())
    B, out = torch.randn(200, 16), torch.empty(300, 16)
    for name, stage in stages.items():
        runner(stage.recipe).spmm(stage.parts, wanted.csr.values, None, B, out)
        assert stage.system == name
        assert_close(out, wanted.csr, B)
