"""tools.dist_nccl_check: its checks run and compare results, here on gloo."""

from __future__ import annotations

import json
import time

import torch

from tools import dist_nccl_check as script


def lines(group, seconds: float) -> list[str]:
    found = script.checks(group, torch.device("cpu"), script.SMALL, time.monotonic() + seconds)
    return [json.dumps(script.rounded(line)) for line in found]


def test_every_check_runs_and_is_right(workers):
    found = [json.loads(line) for line in workers.run(lines, 1, seconds=30.0)[0]]
    names = ["world_of_one", "layer", "packing", "halo_to_itself"]
    assert list(dict.fromkeys(line["check"] for line in found)) == names
    for line in found:
        assert line.get("right") is True, line
    for line in found[:2]:
        assert line["ratio"] > 0 and {"ratio_met", "added_met", "added_us"} <= set(line)
    assert sum("hidden_us" in line for line in found) == 2
    assert all(line["pack_bytes_per_s"] > 0 for line in found if line["check"] == "packing")


def test_nothing_begins_after_the_last_start(workers):
    found = [json.loads(line) for line in workers.run(lines, 1, seconds=-1.0)[0]]
    assert len(found) == 4 and all(line["skipped"] == "no time left" for line in found)


def broken(group) -> list[dict]:
    def fails(*_):
        raise RuntimeError("a kernel\n failed")
        yield {}

    script.CHECKS = (fails,)
    return list(script.checks(group, torch.device("cpu"), script.SMALL, time.monotonic() + 9))


def test_a_check_that_raises_is_a_line(workers):
    assert workers.run(broken, 1)[0] == [
        {"check": "fails", "error": "RuntimeError: a kernel failed"}
    ]
