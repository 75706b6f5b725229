"""``dist.plan()``: a rank's share of A, its halo, and the plans of both products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from sparsetile.core.checks import dimension, one_of
from sparsetile.core.errors import type_error, value_error
from sparsetile.dist.group import Ranks
from sparsetile.dist.halo import Collective, find_halo, wire_rows
from sparsetile.dist.partition import PARTITIONS
from sparsetile.dist.plan import DistributedPlan
from sparsetile.dist.shares import Share, check_entries
from sparsetile.dist.sources import read_source
from sparsetile.dist.sums import find_sums, remote_values
from sparsetile.intake import CSR
from sparsetile.intake.csr import VALUE_DTYPES
from sparsetile.plan.planner import plan as plan_here
from sparsetile.systems import SYSTEMS

__all__ = ["plan"]


def plan(
    A: Any,
    n: int,
    group: Any = None,
    partition: str | Tensor = "auto",
    *,
    columns: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    system: str = "auto",
    deterministic: bool | None = None,
    tune: Literal["model", "measure"] = "model",
    device: torch.device | str | None = None,
    exchange: str = "auto",
    halo_dtype: torch.dtype | None = None,
    check: str = "auto",
) -> DistributedPlan:
    """Plan products of A with its rows distributed over the ranks. Every rank must call it.

    Parameters
    ----------
    A : sparse matrix [M, K], path, Share or None
        One of: the whole matrix on every rank (anything that :func:`sparsetile.plan` accepts;
        from an ``.npz`` each rank reads its own rows); the matrix on one rank and None on the
        others, which receive their rows; a :class:`sparsetile.dist.Share` on each rank; a folder
        written by ``sparsetile partition``, from which each rank reads its own parts. The whole
        matrix may have more than 2^31 entries, a share may not.
    n : int
        Columns of B. Products of other widths work.
    group : ProcessGroup, optional
        The default group when None.
    partition : str or Tensor
        ``auto``: contiguous shares of equal predicted time. A row order (``affinity``, ``rcm``,
        ...): the same after reordering rows and columns, so that communities stay together.
        ``metis``: METIS's parts, if pymetis is installed.
        ``even``: shares of equal size, as in a DTensor. A tensor: first rows [ranks + 1], or the
        rank of each row [M], such as a graph partitioner finds.
    columns : sequence of int [ranks + 1], optional
        First row of B of each rank. When None: the same as the rows of A if A is square, else even.
    dtype, system, deterministic, tune
        As in :func:`sparsetile.plan`.
    device : torch.device, optional
        Where this rank computes. A's own device when None. A matrix that is read from files or
        received goes to this process's GPU if the group uses NCCL.
    exchange : {"auto", "all_to_all", "all_gather", "fewest"}
        How rows of B are exchanged; ``auto`` chooses one of the first two by bytes. ``fewest``: for
        each pair of ranks rows of B or partial sums of C, whichever are fewer: the rank that owns
        the rows of B multiplies the entries that need many of them. Sums and means only; 16-bit
        partial sums are rounded once more.
    halo_dtype : torch.dtype, optional
        ``torch.float16`` or ``torch.bfloat16``: rows of B, partial sums and their gradients are
        rounded to 16 bits to be sent. When None, they are sent as they are.
    check : {"auto", "always", "first"}
        When ranks compare their arguments before an exchange. ``always``: at every product, which
        waits for a GPU. ``first``: if a rank sees a new width, dtype, batch or epilogue; once ranks
        have agreed, a rank with a wrong argument raises alone, and the others wait for it until
        the group's timeout. ``auto``: ``always`` on a CPU and ``first`` on a GPU.

    Returns
    -------
    DistributedPlan
    """
    ranks = Ranks(group, "plan")

    def arguments() -> torch.device:
        dimension("plan", "n", n)
        one_of("plan", "system", system, ["auto", *SYSTEMS])
        one_of("plan", "tune", tune, ["model", "measure"])
        one_of("plan", "exchange", exchange, ["auto", *get_args(Collective)[1:]])
        one_of("plan", "check", check, ["auto", "always", "first"])
        if halo_dtype not in (None, torch.float16, torch.bfloat16):
            raise type_error(
                "plan", "halo_dtype", "torch.float16, torch.bfloat16 or None", halo_dtype,
                "Omit it to send rows as they are",
            )  # fmt: skip
        if not isinstance(partition, Tensor):
            one_of("plan", "partition", partition, PARTITIONS)
        if dtype is not None and dtype not in VALUE_DTYPES:
            names = ", ".join(str(kind) for kind in VALUE_DTYPES)
            raise type_error("plan", "dtype", f"one of {names}", dtype, "Choose one of those")
        return _device(ranks, A, device)

    exact = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    target = ranks.together(
        "plan", "the arguments", arguments,
        lambda found: {
            "n": n,
            "dtype": dtype,
            "system": system,
            "deterministic": exact,
            "partition": partition.tolist() if isinstance(partition, Tensor) else partition,
            "columns": None if columns is None else [int(first) for first in columns],
            "exchange": exchange,
            "halo_dtype": halo_dtype,
            "check": check,
            "the kind of device": found.type,
        },
    )  # fmt: skip
    itemsize = 4 if dtype is None else dtype.itemsize
    found = read_source(ranks, A, partition, columns, n, itemsize, target)
    csr = found.csr
    kind = dtype or (torch.get_default_dtype() if csr.values is None else csr.values.dtype)
    ranks.together(
        "plan", "A", lambda: check_entries("plan", csr.nnz),
        lambda _: {"dtype": kind, "whether A has values": csr.values is not None},
    )  # fmt: skip
    collective = None if exchange == "auto" else cast(Collective, exchange)
    if collective == "fewest":
        halo, sums, nnz = find_sums(ranks, csr, found.partition, "plan")
        rows = sums.rows
    else:
        halo, nnz = find_halo(ranks, csr, found.partition, "plan", collective)
        rows, sums = wire_rows(halo.needed, found.partition.columns), None
    row = n * (halo_dtype or kind).itemsize
    most = {name: count * row for name, count in rows.items()}

    values = None if csr.values is None else csr.values.detach()
    moved = None if sums is None or values is None else sums.sent_values(ranks, values)

    def planned(part: CSR, weights: Tensor | None) -> Any:
        matrix = CSR(part.indptr, part.indices, weights, part.shape)
        # No timing unless asked for: results must not change from run to run.
        return plan_here(
            matrix, n, dtype=kind, system=system, deterministic=exact, tune=tune, expected_runs=1
        )

    def all_parts() -> list[Any]:
        local = None if values is None else values[halo.local_entries]
        remote = None if values is None else remote_values(halo, values)
        made = [planned(halo.local, local), planned(halo.remote, remote)]
        return made if sums is None else [*made, planned(sums.sent, moved)]

    local, remote, *sent = ranks.together("plan", "A", all_parts)
    when = check if check != "auto" else "first" if target.type == "cuda" else "always"
    return DistributedPlan(
        ranks, found, halo, local, remote, nnz, check=when, busiest_bytes=most,
        sums=None if sums is None else (sums, sent[0]), halo_dtype=halo_dtype,
    )  # fmt: skip


def _device(ranks: Ranks, A: Any, device: torch.device | str | None) -> torch.device:
    """Return this rank's device, which the group's backend must support."""
    backend = str(dist.get_backend(ranks.group))
    if device is None:
        matrix = A.matrix if isinstance(A, Share) else A
        own = getattr(matrix, "device", None)
        if isinstance(matrix, (tuple, list)) and matrix and isinstance(matrix[0], Tensor):
            own = matrix[0].device
        if isinstance(own, torch.device):
            target = own
        else:
            has_gpu = torch.cuda.is_available() and "nccl" in backend
            target = torch.device("cuda" if has_gpu else "cpu")
    else:
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError):
            raise value_error(
                "plan", "device", "a device such as cpu or cuda:0", repr(device),
                "Name one of those",
            ) from None  # fmt: skip
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    needs = {"nccl": "cuda", "gloo": "cpu"}.get(backend)
    if needs is not None and target.type != needs:
        raise value_error(
            "plan", "device", f"{needs} with the backend {backend}", target,
            "Move A there, pass device=, or make the group with backend='cpu:gloo,cuda:nccl'",
        )  # fmt: skip
    return target
