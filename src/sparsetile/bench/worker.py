"""One process that measures entries of one system, asked line by line in JSON.

    python -m sparsetile.bench.worker cuda

It answers ``ready`` with its environment, then one line per request: ``load`` reads a matrix, so
that all workers can do so at once; ``measure`` prepares, checks and times an entry; ``again`` takes
more samples of it. Its stdout belongs to the protocol
alone: whatever libraries print goes to stderr. A CUDA error that poisons the process is reported,
then the process ends, and the driver starts another.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

import torch

from sparsetile.bench.environment import describe_environment
from sparsetile.bench.operands import Operands, Prepared
from sparsetile.bench.products import Workbench, prepare, traffic_bytes
from sparsetile.check.judge import Verdict, check_product, check_sddmm
from sparsetile.core.errors import UnsupportedError
from sparsetile.core.timer import one_product, time_product

__all__ = ["Worker", "judge", "main"]

# Device memory the allocator may keep between entries: other workers need theirs.
_KEEP_BYTES = 2 * 2**30


class Worker:
    """Measures entries on one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.bench = Workbench(self.device)
        self._held: tuple[Operands, Prepared, float] | None = None

    def load(self, path: str, weights: str) -> dict[str, Any]:
        """Read a matrix and bring it to the device."""
        self._release()
        self.bench.matrix(path, weights, False)
        return {"status": "ok"}

    def measure(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare, check and time one entry; return the fields of its record."""
        self._release()
        torch.backends.cuda.matmul.allow_tf32 = bool(entry["tf32"])
        try:
            operands = self.bench.operands(entry)
        except UnsupportedError as error:  # B and C are too large for this device
            return {"status": "skipped", "reason": _one_line(error)}
        csr = operands.csr
        fields: dict[str, Any] = {
            "matrix_hash": self.bench.hash,
            "rows": csr.shape[0],
            "cols": csr.shape[1],
            "nnz": csr.nnz,
            "weighted": csr.values is not None,
        }
        try:
            ready = prepare(entry, operands, self.bench)
            result = _as_tensor(ready.run())
        except UnsupportedError as error:
            return {**fields, "status": "skipped", "reason": _one_line(error)}
        except NotImplementedError as error:
            if entry["kind"] == "system":
                raise
            return {**fields, "status": "skipped", "reason": _one_line(error)}  # torch's own word
        error_found = judge(operands, result, tf32=ready.uses_tf32).as_record()
        del result
        fields |= {
            "reorder": ready.reorder,
            "chosen": ready.chosen,
            "choices": dict(ready.choices),
            "planning": ready.planning,
            "format_bytes": ready.format_bytes,
            "error": error_found,
            "tf32": ready.uses_tf32,
        }
        if error_found["worst"] > 1:
            why = error_found.get("why") or f"error is {error_found['worst']:.3g} times the bound"
            return {**fields, "status": "wrong", "reason": why}
        slow = self._too_slow(entry, ready)
        if slow is not None:
            return {**fields, "status": "skipped", "reason": slow}
        budget = float(entry.get("budget", 0.008))
        samples = time_product(ready.run, self.device, budget=budget)
        fields["samples"] = samples.as_dict()
        if entry.get("cold") and self.device.type == "cuda":
            cold = time_product(ready.run, self.device, budget=budget, cold=True)
            fields["cold"] = cold.summary()
        # The same for every system, so the driver passes on what the first of them found.
        floor = entry.get("floor") or self.bench.floor(operands, entry["weights"])
        fields |= {
            "flops": 2 * csr.nnz * int(entry["n"]),
            "traffic_bytes": traffic_bytes(operands),
            "floor_seconds": None if floor is None else floor[0],
            "floor_term": None if floor is None else floor[1],
        }
        if entry.get("rounds", 1) > 1:
            self._held = (operands, ready, budget)
        return {**fields, "status": "ok"}

    def _too_slow(self, entry: Mapping[str, Any], ready: Prepared) -> str | None:
        """Why a product is not timed: once takes longer than the suite grants a baseline."""
        limit = entry.get("slowest")
        if limit is None:
            return None
        seconds = one_product(ready.run, self.device)
        return f"one product takes {seconds:.3g} s, over {limit:g} s" if seconds > limit else None

    def again(self) -> dict[str, Any]:
        """Take more samples of the entry measured last."""
        if self._held is None:
            raise RuntimeError("again: an entry must be measured first")
        _, ready, budget = self._held
        samples = time_product(ready.run, self.device, budget=budget)
        return {"status": "ok", "samples": samples.as_dict()}

    def _release(self) -> None:
        """Drop the last product; give device memory back when much is kept."""
        self._held = None
        if self.device.type == "cuda" and torch.cuda.memory_reserved() > _KEEP_BYTES:
            gc.collect()
            torch.cuda.empty_cache()

    def poisoned(self) -> bool:
        """True when the CUDA context can no longer be used."""
        if self.device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False


def judge(operands: Operands, result: torch.Tensor, *, tf32: bool = False) -> Verdict:
    """Compare a result with the float64 product of its operands."""
    csr, B = operands.csr, operands.B
    if operands.G is not None:
        return check_sddmm(csr, operands.G, B, result, tf32=tf32)
    return check_product(
        csr, B, result, reduce=operands.reduce, tf32=tf32, out_dtype=operands.result_dtype
    )


def _as_tensor(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else torch.as_tensor(result)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:400] or type(error).__name__


def _answer(worker: Worker, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if request["cmd"] == "again":
            return worker.again()
        if request["cmd"] == "load":
            return worker.load(request["path"], request["weights"])
        return worker.measure(request["entry"])
    except torch.OutOfMemoryError:
        return {"status": "error", "reason": "out of device memory"}
    except Exception as error:  # one entry's failure must not end the others
        traceback.print_exc(file=sys.stderr)
        return {"status": "error", "reason": f"{type(error).__name__}: {_one_line(error)}"}


def main(arguments: list[str]) -> int:
    """Serve requests from stdin until it ends."""
    channel: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(body: Mapping[str, Any]) -> None:
        channel.write(json.dumps(body) + "\n")
        channel.flush()

    device = arguments[0] if arguments else "cpu"
    try:
        environment = describe_environment(device)
        worker = Worker(device)
    except Exception as error:  # reported to the driver, which names it at the end
        send({"failed": f"{type(error).__name__}: {_one_line(error)}"})
        return 1
    send({"ready": environment})
    with torch.no_grad():
        for line in sys.stdin:
            reply = _answer(worker, json.loads(line))
            if reply["status"] == "error" and worker.poisoned():
                send({**reply, "fatal": True})
                return 3
            send(reply)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
