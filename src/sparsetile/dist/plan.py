"""DistributedPlan: a plan with the rows of A, B and C distributed over the ranks of a group.

A product has two parts: A's local columns times the rank's own rows of B, during the exchange of
the halo, and A's other columns times the received rows. The second adds to the first in its
epilogue (``beta = 1``), so bias and ReLU are applied once. This is CAGNET's 1-D scheme, but only
the rows that are needed are exchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.dist.agreement import Agreement
from sparsetile.dist.checkpoint import load_values, state_of
from sparsetile.dist.dtensor import is_dtensor, unwrap, wrap
from sparsetile.dist.exchange import Exchange, finish_rows, start_rows
from sparsetile.dist.explain import explain, report
from sparsetile.dist.group import Ranks
from sparsetile.dist.halo import Halo, join_extrema
from sparsetile.dist.operands import check_rows, facts_of
from sparsetile.dist.shares import Found
from sparsetile.dist.sums import Sums, remote_values
from sparsetile.launch.interface import Epilogue
from sparsetile.plan.operands import check_values
from sparsetile.plan.plan import Plan
from sparsetile.plan.traced.flat import FlatPlan
from sparsetile.plan.traced.operators import row_major

__all__ = ["DistributedPlan"]

_Parts = tuple[Tensor | None, Tensor | None, Tensor | None]


class DistributedPlan:
    """A sparse matrix distributed over the ranks of a group. Made by :func:`sparsetile.dist.plan`.

    Every rank must call :meth:`run`, and its backward pass, in the same order.

    Attributes
    ----------
    shape : (M, K)
        Of the whole A.
    local_shape : (int, int)
        Rows of C that this rank computes, and rows of B that it owns.
    n, dtype, device, system
        As in a :class:`sparsetile.Plan`.
    rank, world_size : int
    nnz, local_nnz : int
        Entries of the whole A, and of this rank's rows.
    rows, columns : Tensor of int64
        Global indices of this rank's rows of C and of B. On the CPU.
    exchange : {"none", "all_to_all", "all_gather", "fewest"}
        How rows of B are exchanged.
    halo_dtype : torch.dtype or None
        Type in which they are sent, if it is not that of B.
    halo_rows : int
        Number of distinct rows of B that this rank needs from others.
    """

    def __init__(
        self,
        ranks: Ranks,
        found: Found,
        halo: Halo,
        local: Plan,
        remote: Plan,
        nnz: int,
        *,
        check: str,
        busiest_bytes: dict[str, int] | None = None,
        sums: tuple[Sums, Plan] | None = None,
        halo_dtype: torch.dtype | None = None,
    ) -> None:
        partition = found.partition
        self.shape = found.shape
        self.local_shape = (found.csr.shape[0], local.shape[1])
        self.n = local.n
        self.dtype = local.dtype
        self.device = local.device
        self.system = local.system
        self.rank, self.world_size = ranks.rank, ranks.size
        self.nnz, self.local_nnz = nnz, found.csr.nnz
        self.rows = partition.ids(ranks.rank)
        self.columns = partition.ids(ranks.rank, of_columns=True)
        self.exchange: str = halo.collective
        self.halo_rows = halo.rows
        self.partition = partition
        self.source = found.source
        self._csr = found.csr.with_values(None)
        self._ranks = ranks
        self._halo = halo
        self._busiest_bytes = busiest_bytes or {}
        self._local, self._remote = local, remote
        self.halo_dtype = halo_dtype
        self._sums: Sums | None = None if sums is None else sums[0]
        self._sent: Plan | None = None if sums is None else sums[1]
        # Values of the entries that other ranks multiply.
        self._pushed: Tensor | None = None
        if self._sums is not None and found.csr.values is not None:
            self._pushed = found.csr.values.detach()[self._sums.pushed].to(self.dtype)
        sent_rows = self.local_shape[1] if self._sums is None else self._sums.sent.shape[0]
        self._exchange = Exchange(ranks, halo, sent_rows, self.n)
        self._exchange.prepare()
        self._follow = found.follow
        self._given: Tensor | None = None  # trained values that the plan follows
        self._check = check
        self._agreement = Agreement(ranks, "run", free=("alpha",))
        self._flat = FlatPlan(remote.flat[1])
        self._remote_tensors = self._flat.forward_tensors(remote.flat[0])
        lengths = found.csr.row_lengths()
        self._lengths = torch.clamp(lengths, min=1)
        both = (halo.local, halo.remote)
        self._present = [(part.row_lengths() > 0).unsqueeze(-1) for part in both]

    # -- layout ---------------------------------------------------------------------------------

    @property
    def group(self) -> Any:
        """The process group."""
        return self._ranks.group

    def shard(self, B: Tensor) -> Tensor:
        """Return this rank's rows of a whole B [..., K, N], on the plan's device."""
        if not isinstance(B, Tensor) or B.dim() < 2 or B.shape[-2] != self.shape[1]:
            raise value_error(
                "shard", "B", f"a tensor of shape [..., {self.shape[1]}, N]",
                tuple(B.shape) if isinstance(B, Tensor) else type(B).__name__,
                "Pass the whole B, one row per column of A",
            )  # fmt: skip
        return B.index_select(-2, self.columns.to(B.device)).to(self.device)

    def gather(self, C: Tensor) -> Tensor:
        """Return the whole C [..., M, N], in A's order, from every rank's rows. Blocks.

        For evaluation and tests: every rank gets all of C. Not differentiable.
        """

        def check() -> None:
            if not isinstance(C, Tensor) or C.dim() < 2 or C.shape[-2] != self.local_shape[0]:
                raise value_error(
                    "gather", "C", f"a tensor of shape [..., {self.local_shape[0]}, N]",
                    tuple(C.shape) if isinstance(C, Tensor) else type(C).__name__,
                    "Pass what run returned",
                )  # fmt: skip
            if C.device != self.device or C.layout is not torch.strided:
                raise value_error(
                    "gather", "C", f"a dense tensor on {self.device} like the plan",
                    f"{C.layout} on {C.device}", f"Move it with C.to({str(self.device)!r})",
                )  # fmt: skip

        self._ranks.together(
            "gather", "C", check,
            lambda _: {
                "the dtype of C": C.dtype,
                "the width of C": C.shape[-1],
                "the batches of C": tuple(C.shape[:-2]),
            },
        )  # fmt: skip
        first = C.detach().movedim(-2, 0).contiguous()
        rows = self.partition.rows
        counts = [rows[part + 1] - rows[part] for part in range(self.world_size)]
        most = max(counts)
        padded = first.new_zeros((most, *first.shape[1:]))
        padded[: counts[self.rank]] = first
        found = first.new_empty((self.world_size * most, *first.shape[1:]))
        self._ranks.start_all_gather(found, padded, "gather").wait()
        whole = torch.cat(
            [found[part * most : part * most + count] for part, count in enumerate(counts)]
        )
        if self.partition.order is not None:
            restored = torch.empty_like(whole)
            restored[self.partition.order.to(whole.device)] = whole
            whole = restored
        return whole.movedim(0, -2)

    def permute(self, B: Tensor) -> Tensor:
        """Return B unchanged: :meth:`shard` already permutes it."""
        return B

    # -- values ---------------------------------------------------------------------------------

    @property
    def values(self) -> Tensor | None:
        """A's values on this rank, by rows, then columns in the partition's numbering."""
        if self._follow is not None:
            return self._follow()
        if self._local.values is None or self._remote.values is None:
            return None
        values = self._local.values.new_empty(self.local_nnz)
        values[self._halo.local_entries] = self._local.values
        here = self._halo.remote_entries >= 0
        values[self._halo.remote_entries[here]] = self._remote.values[here]
        if self._sums is not None and self._pushed is not None:
            values[self._sums.pushed] = self._pushed
        return values

    def update_values(self, values: Tensor) -> DistributedPlan:
        """Replace this rank's values of A.

        A rank may call it alone; the others keep their values. With ``exchange="fewest"`` every
        rank must call it, and products send new values to the ranks that multiply them.

        Parameters
        ----------
        values : Tensor [entries]
            One per entry of this rank's rows, in the order of :attr:`values`; of a
            :class:`sparsetile.dist.Share` in that matrix's own order. If it requires grad, later
            products follow it and gradients flow into it. They stay on this rank.
        """
        check_values("update_values", self._csr, self.dtype, values)
        self._given = values if values.requires_grad else None
        if values.requires_grad:
            csr = self._csr
            self._follow = lambda: csr.canonical_values(values)
        elif self._sums is not None:
            kept = self._csr.canonical_values(values.clone())
            self._follow = lambda: kept
        else:
            self._follow = None
            canonical = self._csr.canonical_values(values)
            self._local.update_values(canonical[self._halo.local_entries])
            self._remote.update_values(canonical[self._halo.remote_entries])
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return A's values for ``torch.distributed.checkpoint``; every rank must call it.

        A checkpoint may be loaded on another number of ranks. Plan there, load into that plan's
        ``state_dict()``, and pass the result to :meth:`load_state_dict`.
        """
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the values of a state that was loaded; every rank must call it.

        Trained values that were given to :meth:`update_values` are written in place.

        Raises
        ------
        ValueError
            The state is of another matrix, or of another order of its rows.
        """
        values = load_values(self, state)
        if values is None:
            return
        entries = self._csr.entry_map
        if entries is not None:  # in the order of the share's own entries
            if entries.numel() != values.numel():
                raise value_error(
                    "load_state_dict", "A", "without several entries of one place",
                    f"{entries.numel()} entries at {values.numel()} places", "Add them up first",
                )  # fmt: skip
            values = values[entries]
        if self._given is not None:
            with torch.no_grad():
                self._given.copy_(values)
        else:
            self.update_values(values)

    def _values(self, given: Tensor | None) -> Tensor | None:
        """Values of this rank's rows for one product; None for the plan's own."""
        if given is not None:
            check_values("run", self._csr, self.dtype, given)
            given = self._csr.canonical_values(given)
        elif self._follow is not None:
            given = self._follow()
        return given

    def _parts(self, given: Tensor | None) -> _Parts:
        """Values of the local and the remote part, and of what is sent; None for the plans' own."""
        if given is None:
            return None, None, None
        local = given[self._halo.local_entries]
        if self._sums is None:
            return local, given[self._halo.remote_entries], None
        given = given.to(self.dtype)
        sent = self._sums.sent_values(self._ranks, given)
        return local, remote_values(self._halo, given), sent

    def _to_send(self, B: Tensor, sent: Tensor | None) -> Tensor:
        """What the exchange takes: B, or rows of B and partial sums; in the type that is sent."""
        if self._sent is not None:
            B = self._sent.run(B, values=sent)
        return B if self.halo_dtype is None else B.to(self.halo_dtype)

    # -- products -------------------------------------------------------------------------------

    def run(
        self,
        B: Tensor,
        *,
        alpha: float = 1.0,
        reduce: str = "sum",
        values: Tensor | None = None,
        bias: Tensor | None = None,
        relu: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return this rank's rows of C = relu(alpha · A·B + bias). Every rank must call it.

        Parameters
        ----------
        B : Tensor [..., own rows, N]
            This rank's rows of B (:meth:`shard`), or a ``DTensor`` sharded on its rows over the
            plan's group; C is one then too.
        alpha, reduce, bias, relu, out_dtype
            As in :meth:`sparsetile.Plan.run`; the same on every rank.
        values : Tensor [entries], optional
            Values of this rank's rows for this product, in the order of :meth:`update_values`.
        """
        if self.world_size == 1 and values is None and self._follow is None and type(B) is Tensor:
            # One rank has all of A and B: use the plain plan's product and errors.
            return self._local.run(
                B, alpha=alpha, reduce=reduce, bias=bias, relu=relu, out_dtype=out_dtype
            )
        mesh, own, facts = None, None, None
        error: Exception | None = None
        try:
            if type(B) is not Tensor and is_dtensor(B):
                mesh, B = unwrap(self, B)
            B, alpha, reduce = check_rows(self, B, alpha, reduce, bias, relu, out_dtype)
            own = self._values(values)
            more = {} if self._sums is None else self._sum_facts(reduce, own)
            facts = facts_of(B, alpha, reduce, bias, relu, out_dtype) | more
        except Exception as caught:  # whatever it is, the others must not wait
            error = caught
        # On a GPU a comparison waits for the device, so only new operands are compared.
        self._agreement.reach(facts, error, first=self._check == "first")
        parts = self._parts(own)
        if self._needs_grad(B, parts, bias) or reduce != "sum":
            C = self._differentiable(B, parts, alpha, reduce, bias, relu, out_dtype)
        else:
            C = self._fused(B, parts, alpha, bias, relu, out_dtype).to(out_dtype or B.dtype)
        return C if mesh is None else wrap(self, C, mesh)

    def _sum_facts(self, reduce: str, values: Tensor | None) -> dict[str, Any]:
        """What ranks that exchange partial sums must agree on besides."""
        if reduce in ("max", "min"):
            raise value_error(
                "run", "reduce", "'sum' or 'mean' with exchange='fewest'", repr(reduce),
                "Plan with another exchange",
            )  # fmt: skip
        grad = values is not None and values.requires_grad and torch.is_grad_enabled()
        return {"whether A has new values": values is not None, "whether they require grad": grad}

    def __matmul__(self, B: Tensor) -> Tensor:
        return self.run(B)

    __array_ufunc__ = None  # leaves `plan @ ndarray` to __matmul__, whose error says what to do

    def _needs_grad(self, B: Tensor, parts: tuple[Tensor | None, ...], bias: Tensor | None) -> bool:
        tensors = (B, *parts, bias)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def _wide(self, dtype: torch.dtype, out_dtype: torch.dtype | None) -> torch.dtype | None:
        """The type in which both products are added: 16-bit sums are rounded once, at the end."""
        return torch.float32 if dtype.itemsize == 2 else out_dtype

    def _fused(
        self,
        B: Tensor,
        parts: _Parts,
        alpha: float,
        bias: Tensor | None,
        relu: bool,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        """Without gradients: one set of buffers, the epilogue in the second product's kernel.

        C is in the type in which both products are added.
        """
        if not self._exchange.active:
            return self._local.run(
                B, alpha=alpha, values=parts[0], bias=bias, relu=relu, out_dtype=out_dtype
            )
        received, pending = self._exchange.start(self._to_send(B, parts[2]), keep=False)
        if self._remote.nnz == 0:  # nothing to add: the local product is the whole
            C = self._local.run(
                B, alpha=alpha, values=parts[0], bias=bias, relu=relu, out_dtype=out_dtype
            )
            pending.wait()  # the buffers are free again
            return C
        lead = B.shape[:-2]
        flat = B if len(lead) < 2 else B.flatten(0, -3)
        wide = self._wide(B.dtype, out_dtype)
        C = row_major(self._local.run(flat, alpha=alpha, values=parts[0], out_dtype=wide))
        pending.wait()
        received = received.to(B.dtype)
        H = received.transpose(0, 1) if flat.dim() == 3 else received[:, 0]
        values, packed = self._remote.operand_values(B.dtype, parts[1])
        if bias is not None:
            bias = bias.to(torch.promote_types(B.dtype, torch.float32)).contiguous()
        self._flat.forward.spmm(
            self._remote_tensors,
            None if values is None else values.contiguous(),
            packed,
            row_major(H),
            C,
            Epilogue(alpha=float(alpha), beta=1.0, bias=bias, relu=relu),
        )
        return C.reshape(*lead, *C.shape[-2:])

    def _differentiable(
        self,
        B: Tensor,
        parts: _Parts,
        alpha: float,
        reduce: str,
        bias: Tensor | None,
        relu: bool,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        """The same with autograd operators; also means, maxima and minima."""
        lead = B.shape[:-2]
        extremum = reduce in ("max", "min")
        wide = None if extremum else self._wide(B.dtype, out_dtype)
        how = reduce if extremum else "sum"
        if self._exchange.active:
            pending, ticket = start_rows(self._exchange, self._to_send(B, parts[2]))
        C = self._local.run(B, alpha=1.0 if extremum else alpha, values=parts[0], reduce=how,
                            out_dtype=wide)  # fmt: skip
        if self._exchange.active:
            rows = finish_rows(self._exchange, pending, ticket).to(B.dtype)
            H = rows.transpose(0, 1).reshape(*lead, rows.shape[0], rows.shape[-1])
            other = self._remote.run(H, alpha=1.0 if extremum else alpha, values=parts[1],
                                     reduce=how, out_dtype=wide)  # fmt: skip
            C = join_extrema((C, other), self._present, reduce) if extremum else C + other
        if extremum:
            return C if alpha == 1.0 else C * alpha
        if reduce == "mean":
            C = C * self._lengths.to(C.dtype).reciprocal().unsqueeze(-1)
        if bias is not None:
            C = C + bias.to(C.dtype)
        return (torch.relu(C) if relu else C).to(out_dtype or B.dtype)

    # -- reports --------------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """What was planned, as plain data: shares, halo, bytes of an exchange, both plans."""
        return report(self)

    def explain(self) -> str:
        """Return the shares, the halo, the exchange and why, and both products, as text."""
        return explain(repr(self), self.info, self._local.explain(), self._remote.explain())

    def __repr__(self) -> str:
        rows, cols = self.shape
        return (
            f"DistributedPlan({rows}x{cols}, {self.nnz} entries, rank {self.rank} of "
            f"{self.world_size}, {self.local_shape[0]} rows, {self.local_nnz} entries here, "
            f"n={self.n}, {str(self.dtype).removeprefix('torch.')}, {self.device})"
        )
