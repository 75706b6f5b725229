"""A worker that answers without torch: what it does depends on the matrix's name."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

SAMPLES = {"seconds": [1e-3, 1.1e-3, 1.2e-3], "method": "clock", "launches": 1}


def answer(entry: dict[str, Any]) -> dict[str, Any]:
    name = entry["matrix"]
    size = {"rows": 2, "cols": 2, "nnz": 2, "weighted": False}
    if name == "crash" and entry["system"] == "cpu":
        os.write(2, b"segment broken\n")
        os.kill(os.getpid(), 11)
    if name == "hang" and entry["system"] == "cpu":
        time.sleep(60)
    if name == "slow":
        time.sleep(0.7)
    if name.startswith("rounded") and entry["system"] == "scipy":
        worst = 12.0 if name == "rounded" else 7.0
        return {**size, "status": "wrong", "reason": "too far", "error": {"worst": worst}}
    if name == "wrong" and entry["system"] == "cpu":
        return {**size, "status": "wrong", "reason": "error is 7 times the bound"}
    if name == "skip":
        return {**size, "status": "skipped", "reason": "takes no such matrix"}
    return {
        **size,
        "status": "ok",
        "pid": os.getpid(),
        "error": {"worst": 0.1},
        "flops": 1000,
        "traffic_bytes": 1000,
        "planning": {"build": 0.001, "total": 0.001},
        "samples": SAMPLES,
        "given_floor": entry["floor"],
        "given_slowest": entry["slowest"],
        "floor_seconds": 1e-4 if name == "floor" else None,
        "floor_term": "launch",
    }


def serve(connection: Connection) -> None:
    loaded: list[str] = []
    connection.send({"ready": {"device": "cpu", "device_name": "Fake CPU"}})
    while (request := connection.recv()) is not None:
        if request["cmd"] == "load":
            loaded.append(request["path"])
            reply = {"status": "ok"}
        elif request["cmd"] == "again":
            reply = {"status": "ok", "samples": SAMPLES}
        else:
            reply = answer(request["entry"])
            reply["loaded"] = list(loaded)
        connection.send(reply)


def absent(connection: Connection) -> None:
    os.write(2, b"ImportError: no such library\n")
    sys.exit(1)
