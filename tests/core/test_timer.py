"""Timing: percentiles, adaptive repeats, and graphs where the product can be captured."""

from __future__ import annotations

import time

import pytest
import torch

from sparsetile.core.timer import (
    Samples,
    measure,
    measure_queued,
    one_product,
    percentiles,
    time_product,
)


def test_percentiles_interpolate() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == pytest.approx((1.4, 2.0, 2.6))
    assert percentiles([5.0]) == (5.0, 5.0, 5.0)


def test_the_host_is_timed_call_by_call() -> None:
    calls = []

    def run() -> None:
        calls.append(1)
        time.sleep(0.002)

    found = time_product(run, torch.device("cpu"), budget=0.01)
    assert found.method == "clock" and found.launches == 1
    assert len(calls) == len(found.seconds) + 2  # two warm-up calls
    assert min(found.seconds) >= 0.002


def test_slow_products_are_timed_few_times() -> None:
    found = time_product(lambda: time.sleep(0.11), torch.device("cpu"))
    assert len(found.seconds) == 3


def test_a_summary_names_the_method() -> None:
    found = Samples([2.0, 1.0, 3.0], "graph", 7).summary()
    assert (found["p50"], found["method"], found["launches"], found["samples"]) == (
        2.0, "graph", 7, 3,
    )  # fmt: skip


def test_as_many_samples_are_taken_as_asked_for() -> None:
    found = time_product(lambda: time.sleep(0.001), torch.device("cpu"), samples=7)
    assert len(found.seconds) == 7 and found.median >= 0.001


def test_measure_gives_the_median_of_the_calls_after_two_to_warm_up() -> None:
    pauses = iter([0.05, 0.05, 0.001, 0.3, 0.002])
    found = measure(lambda: time.sleep(next(pauses)), torch.device("cpu"), repeats=3)
    assert 0.002 <= found < 0.3
    assert next(pauses, None) is None


def test_queued_calls_on_a_host_are_measured_one_by_one() -> None:
    pauses = iter([0.05, 0.05, 0.001, 0.3, 0.002])
    found = measure_queued(lambda: time.sleep(next(pauses)), torch.device("cpu"), repeats=3)
    assert 0.002 <= found < 0.3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
class TestOnGpu:
    def test_calls_that_are_queued_do_not_count_the_host(self) -> None:
        A = torch.randn(64, 64, device="cuda")

        def run() -> None:
            end = time.perf_counter() + 2e-4
            torch.mm(A, A)
            while time.perf_counter() < end:
                pass

        assert measure(run, A.device) > 5e-6  # what the test would be worth nothing without
        assert 5e-7 < measure_queued(run, A.device) < 4e-5

    def test_queued_calls_give_what_replays_of_a_graph_give(self) -> None:
        A = torch.randn(2048, 2048, device="cuda")
        queued, replayed = (
            measure_queued(lambda: A @ A, A.device),
            time_product(lambda: A @ A, A.device),
        )
        assert queued == pytest.approx(replayed.median, rel=0.3)

    def test_what_waits_for_the_gpu_is_still_measured(self) -> None:
        A = torch.randn(512, 512, device="cuda")
        assert 1e-6 < measure_queued(lambda: float((A @ A).sum()), A.device) < 1e-1

    def test_a_product_is_captured_and_replayed(self) -> None:
        A = torch.randn(512, 512, device="cuda")
        found = time_product(lambda: A @ A, A.device)
        assert found.method == "graph" and found.launches > 1
        assert all(1e-7 < seconds < 1e-2 for seconds in found.seconds)

    def test_what_synchronises_is_timed_by_events(self) -> None:
        A = torch.randn(512, 512, device="cuda")
        found = time_product(lambda: float((A @ A).sum()), A.device)
        assert found.method == "events"
        assert time_product(lambda: A @ A, A.device).method == "graph"  # nothing was left broken

    def test_a_slow_host_does_not_count_as_time_of_the_gpu(self) -> None:
        A = torch.randn(64, 64, device="cuda")

        def run() -> torch.Tensor:
            time.sleep(0.001)
            return A @ A

        found = time_product(run, A.device)
        assert found.method == "graph" and found.launches > 8
        assert found.median < 5e-5

    def test_a_single_call_takes_longer_than_one_of_a_graph(self) -> None:
        A = torch.randn(64, 64, device="cuda")
        assert measure(lambda: A @ A, A.device) > time_product(lambda: A @ A, A.device).median


def test_one_product_is_timed_by_the_clock() -> None:
    assert 0.01 <= one_product(lambda: time.sleep(0.01), torch.device("cpu")) < 1
