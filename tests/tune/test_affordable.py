"""Systems that are compared, by what comparing costs and might save."""

from __future__ import annotations

import pytest
import torch

from sparsetile.core.device import H200
from sparsetile.engines.request import Request
from sparsetile.reorder import Permutation
from sparsetile.tune import affordable
from tests.contracts.cases import csr_of, random_matrix

ABLE = ["acc", "csr", "cusparse", "rsh"]


def request(n: int) -> Request:
    csr = csr_of(random_matrix(3000, 3000, 0.01))
    return Request(csr, n, torch.float32, Permutation("identity", None), ceilings=H200)


def test_systems_with_tiles_are_compared_only_if_that_may_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Request, "device", torch.device("cuda"))
    for n, runs, all_of_them in ((128, 100, False), (128, 10**5, True), (8192, 10**4, True)):
        names, rejected = affordable(request(n), ABLE, runs)
        assert names == (ABLE if all_of_them else ["csr", "cusparse"])
        assert sorted(rejected) == ([] if all_of_them else ["acc", "rsh"])
    names, rejected = affordable(request(128), ABLE, 100)
    assert rejected["rsh"][0].startswith("not compared: 100 products might save 0.")


def test_nothing_is_left_out_on_a_host_or_without_another_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert affordable(request(128), ABLE, 1) == (ABLE, {})
    monkeypatch.setattr(Request, "device", torch.device("cuda"))
    assert affordable(request(128), ["rsh"], 1) == (["rsh"], {})
