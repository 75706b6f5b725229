"""Judges a fuzz case by float64 arithmetic over A's entries, within the error bound.

Non-finite elements must be those of that arithmetic: NaN where it gives NaN, an infinity of its
sign where it gives one or exceeds C's type.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparsetile as st
from sparsetile import CSR, Plan
from sparsetile.check.bound import error_bound
from sparsetile.check.reference import reference
from sparsetile.core.errors import DataError, PlanFileError, UnsupportedError
from sparsetile.systems import SYSTEMS
from tools.fuzz_cases import Case
from tools.fuzz_inputs import Matrix, dense, laid_out, make_matrix, torch_dtype

# Systems that apply the epilogue with torch operations, each of which rounds a 16-bit result. The
# unknown choice of spmm may be such a system.
STEPWISE = ("auto", "cpu", "cusparse", "dense")
STEPS = 3
# Products of entries with columns of B up to which the reference runs on the CPU. On the GPU it
# waits several times, and other processes of the fuzzer share the GPU.
HOST_WORK = 2**21


TYPES = (ValueError, TypeError, UnsupportedError, DataError, PlanFileError, FileNotFoundError)
_SENTENCE = re.compile(r"[\w.]+: .+ must .+, got .*\. .+", re.DOTALL)


class Wrong(AssertionError):
    """A result that is not what it must be."""


@dataclass
class Run:
    """A case while it runs: its operands, its plan, and the generator that both come from."""

    case: Case
    rng: np.random.Generator
    folder: Path
    system: str = "none"
    leaf: Tensor | None = None
    plan: Plan = field(init=False)
    matrix: Matrix = field(init=False)

    def make(self, tracked: bool = False) -> Plan:
        """Plan A as the case says; ``tracked`` if its own values may require grad."""
        case = self.case
        self.matrix = make_matrix(case, self.rng, self.folder)
        kinds = case.container in ("csr", "csr tuple", "edge tuple"), case.weighted, case.pick % 2
        if tracked and all(kinds) and case.values_dtype == case.dtype:
            A = self.matrix.A
            values: Any = A.values if isinstance(A, CSR) else A[2] if len(A) == 4 else A[1]
            self.leaf = values.requires_grad_()
        order: Any = case.order
        if order == "given":
            order = torch.from_numpy(self.rng.permutation(case.rows))
        self.plan = st.plan(
            self.matrix.A, case.n, dtype=self._asked_dtype(), system=case.system, reorder=order,
            reorder_columns=case.reorder_columns, deterministic=case.deterministic,
            tune="measure" if case.tune == "measure" else "model", device=case.device,
        )  # fmt: skip
        self.system = self.plan.system
        if case.pick % 8 == 0:
            text = self.plan.explain()
            if self.system not in text or json.loads(json.dumps(self.plan.info)) != self.plan.info:
                raise Wrong("info is no plain data, or explain does not name the system")
        return self.plan

    def _asked_dtype(self) -> torch.dtype | None:
        case, natural = self.case, "float32"
        if case.weighted and case.values_dtype != "int32":
            natural = "float64" if case.container == "mtx" else case.values_dtype
        return None if natural == case.dtype and not case.dtype_given else torch_dtype(case.dtype)

    def operand(self, width: int, **how: str) -> Tensor:
        case = self.case
        return dense(case, (*case.lead, case.cols, width), self.rng, **how)

    def permuted(self, B: Tensor) -> Tensor:
        """B in the plan's column order, in the layout of the case even if it is copied."""
        if not self.case.reorder_columns:
            return B
        layout = "" if "expanded" in self.case.layout else self.case.layout
        return laid_out(self.plan.permute(B), layout)

    def same_bits(self, first: Tensor, second: Tensor, what: str, reduce: str = "sum") -> None:
        """Compare bits if the system is deterministic; a maximum always is."""
        repeatable = SYSTEMS[self.system].deterministic or reduce in ("max", "min")
        if repeatable and not equal_bits(first, second):
            raise Wrong(f"{what} gave other bits")

    def judge(self, B: Tensor, C: Tensor, what: str, **how: Any) -> None:
        """Compare C with the expected product; ``how`` are the arguments of :func:`expected`."""
        csr = how.pop("csr", self.matrix.truth)
        lead = B.shape[:-2]
        wanted = (*lead, csr.shape[0], B.shape[-1])
        if tuple(C.shape) != wanted:
            raise Wrong(f"{what}: shape {tuple(C.shape)} instead of {wanted}")
        dtype = how.pop("out_dtype", B.dtype)
        if C.dtype is not dtype:
            raise Wrong(f"{what}: {C.dtype} instead of {dtype}")
        small = csr.nnz * B.numel() <= HOST_WORK * max(csr.shape[1], 1)
        place = torch.device("cpu") if small else C.device
        if how.get("before") is not None:
            how["before"] = _columns(how["before"].detach().to(place))
        if how.get("bias") is not None:
            copies = 1 if how.get("along_rows") else math.prod(lead)
            how["bias"] = how["bias"].detach().to(place).repeat(copies)
        B, C = (_columns(dense.detach().to(place)) for dense in (B, C))
        result, bound = self.expected(csr.to(place), B, dtype, **how)
        compare(C, result, bound, what)

    def expected(
        self,
        csr: CSR,
        B: Tensor,
        stored: torch.dtype,
        *,
        reduce: str = "sum",
        alpha: float = 1.0,
        beta: float = 0.0,
        bias: Tensor | None = None,
        relu: bool = False,
        before: Tensor | None = None,
        along_rows: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return relu(alpha · A·B + beta · before + bias) in float64, and its bound."""
        result, magnitude = reference(csr, B, reduce)
        extremum = reduce in ("max", "min")
        lengths = csr.row_lengths().unsqueeze(1)
        terms = (torch.ones_like(lengths) if extremum else lengths) + 3
        steps = [magnitude if not extremum else result.abs()]
        if alpha != 1.0:
            result, magnitude = alpha * result, abs(alpha) * magnitude
            steps.append(result.abs())
        if beta != 0.0 and before is not None:
            result = result + beta * before.double()
            magnitude = magnitude + abs(beta) * before.double().abs()
            steps += [result.abs(), (beta * before.double()).abs()]
        if bias is not None:
            added = bias.double().unsqueeze(1) if along_rows else bias.double()
            result, magnitude = result + added, magnitude + added.abs()
            steps.append(result.abs())
        tf32 = self.case.device == "cuda" and self.case.tf32
        bound = error_bound(
            result, magnitude, terms, dtype=B.dtype, out_dtype=stored, tf32=tf32, worst_case=True
        )
        plain = len(steps) == 1 and not relu and reduce == "sum"
        if not plain and (self.system in STEPWISE or extremum):
            number, scale = torch.finfo(stored), max(abs(alpha), 1.0)
            largest = torch.stack(torch.broadcast_tensors(*steps)).amax(0).nan_to_num(posinf=0.0)
            bound = bound + STEPS * number.eps / 2 * scale * (largest + number.tiny)
        return (torch.relu(result) if relu else result), bound


def _columns(dense: Tensor) -> Tensor:
    """A batch [..., rows, N] as one matrix, its members side by side."""
    *lead, rows, width = dense.shape
    if not lead:
        return dense
    count = math.prod(lead)
    return dense.reshape(count, rows, width).transpose(0, 1).reshape(rows, count * width)


def compare(found: Tensor, result: Tensor, bound: Tensor, what: str) -> None:
    """Raise :class:`Wrong` naming the first element that is not right."""
    if found.numel() == 0:
        return
    seen, most = found.detach().to(result.device).double(), torch.finfo(found.dtype).max
    finite = seen.isfinite() & result.isfinite()
    near = finite & ((seen - result).abs() <= bound)
    beyond = seen.isinf() & (result * seen.sign() + bound.nan_to_num(nan=torch.inf) >= most)
    right = near | beyond | (seen.isnan() & result.isnan())
    if bool(right.all()):
        return
    at = tuple(int(i) for i in (~right).nonzero()[0])
    raise Wrong(
        f"{what}: {int((~right).sum())} of {found.numel()} elements wrong, first {at}: "
        f"{float(seen[at]):.9g} instead of {float(result[at]):.9g} ± {float(bound[at]):.3g}"
    )


def equal_bits(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    if first.numel() == 0:
        return True
    first, second = first.resolve_neg().contiguous(), second.resolve_neg().contiguous()
    return torch.equal(first.view(word), second.view(word))


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
