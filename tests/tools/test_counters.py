"""The table of NVIDIA's profiler: kernels by product, and what the tool asks for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tools import counters

TABLE = """==PROF== Connected to process 7
"ID","Kernel Name","gpu__time_duration.sum","lts__t_sector_hit_rate.pct"
"","","ns","%"
"0","void at::cuda::(anonymous namespace)::spin_kernel(long)","900","1"
"1","spmm_bmat","1,500.5","61.25"
"2","redo_bmat(Params)","200","99"
"3","void at::cuda::(anonymous namespace)::spin_kernel(long)","900","1"
"4","void cusparse::csrmm_alg2_kernel<float>(int)","2000","n/a"
"""
NAMES = {"seconds": "gpu__time_duration.sum", "l2_hits": "lts__t_sector_hit_rate.pct"}


def test_kernels_belong_to_the_product_after_each_separator():
    first, second = counters.kernels_of(TABLE, NAMES)
    assert [kernel["kernel"] for kernel in first] == ["spmm_bmat", "redo_bmat"]
    assert counters.summary(first) == {
        "kernel": "spmm_bmat", "seconds": pytest.approx(1700.5e-9), "l2_hits": 61.25, "kernels": 2,
    }  # fmt: skip
    assert counters.summary(second)["kernel"] == "void cusparse::csrmm_alg2_kernel<float>"
    assert counters.summary(second)["l2_hits"] is None
    assert list(counters.kernels_of("==ERROR== no permission", NAMES)) == []


def test_counters_are_those_that_this_profiler_knows(monkeypatch):
    listed = "gpu__time_duration  Counter\nlts__t_sector_hit_rate  Ratio\n"
    listed += "sm__inst_executed_pipe_tensor  Counter\n"
    done = subprocess.CompletedProcess([], 0, stdout=listed, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = counters.known_counters("ncu")
    assert found == {
        **NAMES, "registers": "launch__registers_per_thread",
        "tensor_cycles": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    }  # fmt: skip


def test_the_record_has_every_product_of_every_matrix():
    record = json.loads((counters.ROOT / "results" / "h200" / "counters.json").read_text())
    found = {(e["matrix"], e["product"]) for e in record["products"] if "counters" in e}
    wanted = {(m, p.name) for m in counters.MATRICES for p in counters.PRODUCTS}
    assert found == wanted
    assert all(set(e["counters"]) >= set(counters.COUNTERS) for e in record["products"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests a machine without a GPU")
def test_a_machine_without_a_gpu_is_refused(tmp_path: Path, capsys):
    words = ["--data", str(tmp_path), "--out", str(tmp_path / "counters.json")]
    assert counters.main(words) == 2
    assert "verify: machine must be one with a CUDA GPU" in capsys.readouterr().err
    assert counters.main(words[:2]) == 2
    assert "counters: --out must be a file, got nothing" in capsys.readouterr().err
