"""Wrong calls for ``tools.fuzz``, and the form of their errors.

Every wrong call must raise one of the package's error types, in its one sentence pattern
(``core.errors``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sparsetile as st
from sparsetile import Plan
from sparsetile.core.errors import DataError, PlanFileError, UnsupportedError
from tools.fuzz_cases import Case

TYPES = (ValueError, TypeError, UnsupportedError, DataError, PlanFileError, FileNotFoundError)
_SENTENCE = re.compile(r"[\w.]+: .+ must .+, got .*\. .+", re.DOTALL)


def is_refusal(error: BaseException) -> bool:
    """Whether an error is of one of the package's types and in its pattern."""
    return type(error) in TYPES and _SENTENCE.fullmatch(str(error)) is not None


def grouped(error: BaseException, system: str = "") -> str:
    """The error's text without what differs between cases, to count refusals by reason."""
    text = str(error)
    if isinstance(error, UnsupportedError):
        lines = [line.strip() for line in text.splitlines()[1:]]
        text = next((line for line in lines if line.startswith(f"{system}:")), lines[0])
    text = text.partition(", got ")[0] if " must " in text else text
    return f"{type(error).__name__}: {re.sub(r'[0-9][0-9.]*', '#', ' '.join(text.split()))}"[:160]


_spmm: Any = st.spmm


class _Calls:
    """The plan under test and valid operands; each call makes one of them wrong."""

    def __init__(self, case: Case, plan: Plan, folder: Path) -> None:
        self.plan: Any = plan  # its methods are called wrongly on purpose
        self.case, self.folder = case, folder
        self.rows, self.cols = plan.shape
        self.device, self.dtype = plan.device, plan.dtype
        self.other = torch.float64 if plan.dtype is not torch.float64 else torch.float32

    def B(self, rows: int | None = None, n: int = 4, dtype: torch.dtype | None = None) -> Any:
        rows = self.cols if rows is None else rows
        return torch.ones(rows, n, dtype=dtype or self.dtype, device=self.device)

    def out(self, n: int = 4, dtype: torch.dtype | None = None) -> Any:
        return self.B(self.rows, n, dtype)

    def replan(self, A: Any = None, n: Any = 4, **options: Any) -> Any:
        small = (torch.tensor([0, 1, 2]), torch.tensor([0, 1]), None, (2, 2))
        return st.plan(small if A is None else A, n, **{"device": self.device, **options})

    def run(self, **options: Any) -> Any:
        return self.plan.run(self.B(), **options)

    def entries(self) -> int:
        entry_map = self.plan._csr.entry_map
        return int(self.plan.nnz if entry_map is None else entry_map.numel())

    def file(self, damage: Callable[[bytes], bytes]) -> Any:
        path = self.folder / f"damaged-{self.case.seed}-{self.case.number}"
        self.plan.save(path)
        path.write_bytes(damage(path.read_bytes()))
        return st.load_plan(path)

    def saved(self, **options: Any) -> Any:
        path = self.folder / f"saved-{self.case.seed}-{self.case.number}"
        self.plan.save(path)
        return st.load_plan(path, **options)


def _csr(indptr: Any, indices: Any, values: Any, shape: Any) -> Any:
    def on_device(part: Any) -> Any:
        return torch.tensor(part) if isinstance(part, list) else part

    return on_device(indptr), on_device(indices), on_device(values), shape


def _edges(edges: list[list[int]], shape: Any) -> Any:
    return torch.tensor(edges), None, shape


def _flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


REFUSALS: dict[str, Callable[[_Calls], Any]] = {
    "B of other rows": lambda c: c.plan @ c.B(c.cols + 1),
    "B of no dimension": lambda c: c.plan @ torch.ones((), dtype=c.B().dtype),
    "B of another type": lambda c: c.plan @ c.B(dtype=c.other),
    "B of whole numbers": lambda c: c.plan @ c.B(dtype=torch.int64),
    "B of lists": lambda c: c.plan @ np.ones((c.cols, 3)).tolist(),
    "B sparse": lambda c: c.plan @ c.B().to_sparse(),
    "B on meta": lambda c: c.plan @ c.B().to("meta"),
    "B None": lambda c: c.plan.run(None),
    "unknown reduce": lambda c: c.plan.run(c.B(), reduce="median"),
    "reduce None": lambda c: c.plan.run(c.B(), reduce=None),
    "beta without out": lambda c: c.plan.run(c.B(), beta=1.0),
    "out of other shape": lambda c: c.plan.run(c.B(), out=c.out(5)),
    "out of another type": lambda c: c.plan.run(c.B(), out=c.out(dtype=c.other)),
    "out of numpy": lambda c: c.plan.run(c.B(), out=np.ones((c.rows, 4))),
    "out and max": lambda c: c.plan.run(c.B(), out=c.out(), reduce="max"),
    "out and gradients": lambda c: c.plan.run(c.B().requires_grad_(), out=c.out()),
    "bias of other length": lambda c: c.plan.run(c.B(), bias=c.B(1, 5)[0]),
    "bias and out": lambda c: c.plan.run(c.B(), bias=c.B()[0, :], out=c.out())
    if c.cols else c.plan.run(c.B(), relu=True, out=c.out()),
    "relu and min": lambda c: c.plan.run(c.B(), relu=True, reduce="min"),
    "result of whole numbers": lambda c: c.plan.run(c.B(), out_dtype=torch.int32),
    "values of other length": lambda c: c.plan.update_values(torch.ones(c.entries() + 1)),
    "values of two dimensions": lambda c: c.plan.update_values(torch.ones(c.entries(), 1)),
    "values in a list": lambda c: c.plan.update_values([1.0]),
    "whole values": lambda c: c.plan.update_values(
        torch.ones(c.entries(), dtype=torch.int64, device=c.device)
    ),
    "values= of other length": lambda c: c.plan.run(c.B(), values=torch.ones(c.entries() + 2)),
    "X of other length": lambda c: c.plan.linear(c.B(2, c.cols + 1)),
    "X of numpy": lambda c: c.plan.linear(np.ones((2, c.cols))),
    "X of another type": lambda c: c.plan.linear(c.B(2, c.cols, c.other)),
    "X of no dimension": lambda c: c.plan.linear(torch.tensor(1.0, device=c.device)),
    "layer's bias of other length": lambda c: c.plan.linear(
        c.B(2, c.cols), bias=c.B(c.rows + 1, 1)[:, 0]
    ),
    "permute of other rows": lambda c: c.plan.permute(c.B(c.cols + 1)),
    "n negative": lambda c: c.replan(n=-1),
    "n a fraction": lambda c: c.replan(n=2.5),
    "n text": lambda c: c.replan(n="8"),
    "n a list": lambda c: c.replan(n=[]),
    "n NaN": lambda c: c.replan(n=float("nan")),
    "n infinite": lambda c: c.replan(n=float("inf")),
    "n too large": lambda c: c.replan(n=2**31),
    "unknown system": lambda c: c.replan(system="fastest"),
    "system None": lambda c: c.replan(system=None),
    "unknown order": lambda c: c.replan(reorder="best"),
    "order None": lambda c: c.replan(reorder=None),
    "order with a row twice": lambda c: c.replan(reorder=torch.tensor([0, 0])),
    "order too short": lambda c: c.replan(reorder=torch.tensor([0])),
    "order too large": lambda c: c.replan(reorder=torch.tensor([0, 2])),
    "order of floats": lambda c: c.replan(reorder=torch.tensor([0.0, 1.0])),
    "order of two dimensions": lambda c: c.replan(reorder=torch.tensor([[0, 1]])),
    "order of complex numbers": lambda c: c.replan(reorder=torch.tensor([0j, 1])),
    "unknown tune": lambda c: c.replan(tune="guess"),
    "type of whole numbers": lambda c: c.replan(dtype=torch.int32),
    "type as text": lambda c: c.replan(dtype="float32"),
    "unknown device": lambda c: c.replan(device="abacus"),
    "device meta": lambda c: c.replan(device="meta"),
    "device a fraction": lambda c: c.replan(device=1.5),
    "columns by name": lambda c: c.replan(reorder_columns="yes"),
    "A dense": lambda c: c.replan(c.B()),
    "A None": lambda c: st.plan(None, 4),
    "A a number": lambda c: c.replan(3),
    "A of two parts": lambda c: c.replan((torch.zeros(3), torch.zeros(2))),
    "A a missing file": lambda c: c.replan("missing.mtx"),
    "A a file of unknown kind": lambda c: c.replan("matrix.png"),
    "A an array": lambda c: c.replan(np.eye(3)),
    "index too large": lambda c: c.replan(_csr([0, 1, 2], [0, 2], None, (2, 2))),
    "index negative": lambda c: c.replan(_csr([0, 1, 2], [0, -1], None, (2, 2))),
    "indptr falls": lambda c: c.replan(_csr([0, 2, 1], [0, 1], None, (2, 2))),
    "indptr too short": lambda c: c.replan(_csr([0, 2], [0, 1], None, (2, 2))),
    "indptr empty": lambda c: c.replan(
        _csr(torch.zeros(0, dtype=torch.int64), [0, 1], None, (2, 2))
    ),
    "indptr of floats": lambda c: c.replan(_csr([0.0, 1.0, 2.0], [0, 1], None, (2, 2))),
    "indptr ends early": lambda c: c.replan(_csr([0, 1, 1], [0, 1], None, (2, 2))),
    "indptr None": lambda c: c.replan(_csr(None, [0, 1], None, (2, 2))),
    "too few values": lambda c: c.replan(_csr([0, 1, 2], [0, 1], [1.0], (2, 2))),
    "complex values": lambda c: c.replan(_csr([0, 1, 2], [0, 1], [1j, 2], (2, 2))),
    "shape of three": lambda c: c.replan(_csr([0, 1, 2], [0, 1], None, (2, 2, 2))),
    "shape None": lambda c: c.replan(_csr([0, 1, 2], [0, 1], None, None)),
    "shape of text": lambda c: c.replan(_csr([0, 1, 2], [0, 1], None, ("2", "2"))),
    "shape negative": lambda c: c.replan(_csr([0, 1, 2], [0, 1], None, (2, -2))),
    "edges transposed": lambda c: c.replan(_edges([[0, 1], [1, 0], [1, 1]], (2, 2))),
    "edge too large": lambda c: c.replan(_edges([[0, 1], [1, 2]], (2, 2))),
    "plan file missing": lambda c: st.load_plan(c.folder / "no such plan"),
    "plan file cut": lambda c: c.file(lambda content: content[: len(content) // 2]),
    "plan file empty": lambda c: c.file(lambda content: b""),
    "plan file changed": lambda c: c.file(_flip),
    "plan file of text": lambda c: c.file(lambda content: b"not a plan at all, but text"),
    "plan for another device": lambda c: c.saved(device="meta"),
    "plan for an unknown device": lambda c: c.saved(device="abacus"),
    "spmm with B of numpy": lambda c: _spmm(_edges([[0], [0]], (1, 1)), np.ones((1, 1))),
    "spmm with B of other rows": lambda c: _spmm(_edges([[0], [0]], (1, 1)), torch.ones(2, 1)),
    "spmm with B of no dimension": lambda c: _spmm(
        _edges([[0], [0]], (1, 1)), torch.tensor(1.0)
    ),
    "spmm with B of whole numbers": lambda c: _spmm(
        _edges([[0], [0]], (1, 1)), torch.ones(1, 1, dtype=torch.int32)
    ),
    "spmm of unknown reduce": lambda c: _spmm(
        _edges([[0], [0]], (1, 1)), torch.ones(1, 1), reduce="prod"
    ),
    "spmm of a dense A": lambda c: _spmm(torch.ones(2, 2), torch.ones(2, 1)),
    "spmm of None": lambda c: _spmm(None, torch.ones(2, 1)),
    "type of result as text": lambda c: c.plan.run(c.B(), out_dtype="float32"),
    "bias in a list": lambda c: c.run(bias=[1.0] * 4),
    "complex bias": lambda c: c.run(bias=torch.ones(4, dtype=torch.complex64, device=c.device)),
    "relu as text": lambda c: c.run(relu="yes"),
    "alpha text": lambda c: c.run(alpha="two"),
    "alpha None": lambda c: c.run(alpha=None),
    "alpha that requires grad": lambda c: c.run(alpha=torch.ones((), requires_grad=True)),
    "beta text": lambda c: c.run(out=c.out(), beta="two"),
    "layer's alpha as text": lambda c: c.plan.linear(c.B(2, c.cols), alpha="two"),
    "a plan on the right": lambda c: c.B(4, c.rows) @ c.plan,
    "out a negative view": lambda c: c.run(out=torch._neg_view(c.out())),
}  # fmt: skip


def picked(case: Case) -> str:
    """The wrong call of a case, by name."""
    return list(REFUSALS)[case.pick % len(REFUSALS)]


def check_refusal(case: Case, plan: Plan, folder: Path, name: str = "") -> str:
    """Make a wrong call, the one that the case picks if none is named.

    Returns what is wrong with its error, or ''.
    """
    name = name or picked(case)
    try:
        REFUSALS[name](_Calls(case, plan, folder))
    except Exception as error:
        if is_refusal(error):
            return ""
        text = " ".join(str(error).split())[:200]
        return f"{name}: refused by {type(error).__name__}: {text}"
    return f"{name}: not refused"
