"""One process that measures entries of one system.

It sends ``ready`` with its environment, then a reply to each request: ``load`` reads a matrix, so
that all workers can do so at once; ``measure`` prepares, checks and times an entry; ``again`` takes
more samples of it. After an unrecoverable CUDA error it exits, and the driver starts another.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from sparsetile.bench.environment import describe_environment
from sparsetile.bench.operands import Operands, Prepared
from sparsetile.bench.products import Workbench, prepare, traffic_bytes
from sparsetile.check.judge import Verdict, check_product, check_sddmm
from sparsetile.core.errors import UnsupportedError
from sparsetile.core.timer import one_product, time_product

__all__ = ["Worker", "judge", "serve"]

# Device memory the allocator may keep between entries: other workers need theirs.
_KEEP_BYTES = 2 * 2**30


class Worker:
    """Measures entries on one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.bench = Workbench(self.device)
        self._last: tuple[Operands, Prepared, float] | None = None

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
            "matrix_hash": self.bench.hash, "rows": csr.shape[0], "cols": csr.shape[1],
            "nnz": csr.nnz, "weighted": csr.values is not None,
        }  # fmt: skip
        try:
            ready = prepare(entry, operands, self.bench)
            result = torch.as_tensor(ready.run())
        except UnsupportedError as error:
            return {**fields, "status": "skipped", "reason": _one_line(error)}
        except NotImplementedError as error:
            if entry["kind"] == "system":
                raise
            return {**fields, "status": "skipped", "reason": _one_line(error)}  # torch's message
        error_found = judge(operands, result, tf32=ready.uses_tf32).as_record()
        del result
        fields |= {
            "reorder": ready.reorder, "chosen": ready.chosen, "choices": dict(ready.choices),
            "planning": ready.planning, "format_bytes": ready.format_bytes, "error": error_found,
            "tf32": ready.uses_tf32,
        }  # fmt: skip
        if error_found["worst"] > 1:
            why = error_found.get("why") or f"error is {error_found['worst']:.3g} times the bound"
            return {**fields, "status": "wrong", "reason": why}
        slow = self._too_slow(entry, ready)
        if slow is not None:
            return {**fields, "status": "skipped", "reason": slow}
        budget = float(entry.get("budget", 0.008))
        samples = time_product(ready.run, self.device, budget=budget)
        fields["samples"] = samples.as_dict()
        # The same for every system, so the driver passes on the first result.
        floor = entry.get("floor") or self.bench.floor(operands, entry["weights"])
        fields |= {
            "flops": 2 * csr.nnz * int(entry["n"]),
            "traffic_bytes": traffic_bytes(operands),
            "floor_seconds": None if floor is None else floor[0],
            "floor_term": None if floor is None else floor[1],
        }
        if entry.get("rounds", 1) > 1:
            self._last = (operands, ready, budget)
        return {**fields, "status": "ok"}

    def _too_slow(self, entry: Mapping[str, Any], ready: Prepared) -> str | None:
        """Why a product is not timed: one run takes longer than the suite allows a baseline."""
        limit = entry.get("slowest")
        if limit is None:
            return None
        seconds = one_product(ready.run, self.device)
        return f"one product takes {seconds:.3g} s, over {limit:g} s" if seconds > limit else None

    def again(self) -> dict[str, Any]:
        """Take more samples of the entry measured last."""
        if self._last is None:
            raise RuntimeError("again: an entry must be measured first")
        _, ready, budget = self._last
        samples = time_product(ready.run, self.device, budget=budget)
        return {"status": "ok", "samples": samples.as_dict()}

    def _release(self) -> None:
        """Drop the last product; free cached device memory if it is much."""
        self._last = None
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
        traceback.print_exc()
        return {"status": "error", "reason": f"{type(error).__name__}: {_one_line(error)}"}


def serve(device: str, connection: Connection) -> None:
    """Answer requests until None comes."""
    try:
        environment = describe_environment(device)
        worker = Worker(device)
    except Exception as error:  # reported to the driver, which names it at the end
        connection.send({"failed": f"{type(error).__name__}: {_one_line(error)}"})
        return
    connection.send({"ready": environment})
    fatal = False
    with torch.no_grad():
        while not fatal and (request := connection.recv()) is not None:
            reply = _answer(worker, request)
            fatal = reply["status"] == "error" and worker.poisoned()
            connection.send({**reply, "fatal": fatal})
