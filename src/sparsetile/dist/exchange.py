"""The exchange of B's rows and its adjoint, in steps that overlap with products.

``start`` packs and sends, ``finish`` waits. In autograd they are two operators around the local
product: the engine runs what was recorded last first, so a backward pass computes the halo's
gradient, starts to send it back (``_Finish.backward``), computes the local product's gradient, and
only then waits (``_Start.backward``).

Additions have a fixed order. Returned rows are summed by a product with a pattern matrix
(all-to-all) or by rank (all-gather), never by atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.dist.group import Pending, Ranks
from sparsetile.dist.halo import Halo
from sparsetile.intake.csr import CSR, offsets
from sparsetile.launch.gather import gather_rows, gathers
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import plan

__all__ = ["Exchange", "finish_rows", "start_rows"]

_Shape = tuple[int, ...]


class Exchange:
    """Sends rows of B to the ranks that need them, and their gradients back.

    Operands are [..., rows, N] or [rows, N]. On the wire a row is contiguous with its batches:
    [rows, batches, N].
    """

    def __init__(self, ranks: Ranks, halo: Halo, own_rows: int, n: int) -> None:
        self.ranks = ranks
        self.halo = halo
        self.own_rows = own_rows
        self._n = n
        self._buffers: tuple[Any, Tensor, Tensor] | None = None
        self._sum_plans: dict[torch.dtype, Plan] = {}
        self._numbers: Tensor | None = None

    @property
    def active(self) -> bool:
        """Whether any rank needs a row of another."""
        return self.halo.collective != "none"

    @property
    def sent_rows(self) -> int:
        """Rows in the buffer that is sent."""
        gathers = self.halo.collective == "all_gather"
        return self.halo.padded if gathers else self.halo.send_ids.numel()

    @property
    def received(self) -> int:
        """Rows in the buffer that is received."""
        return self.halo.remote.shape[1]

    # -- forward --------------------------------------------------------------------------------

    def _make(self, B: Tensor) -> tuple[Tensor, Tensor]:
        tail = (B.shape[:-2].numel(), B.shape[-1])
        sent = B.new_empty((self.sent_rows, *tail))
        if self.halo.collective == "all_gather":
            sent[self.own_rows :].zero_()  # pads the share; a dense system would read it
        return sent, B.new_empty((self.received, *tail))

    def _buffers_for(self, B: Tensor) -> tuple[Tensor, Tensor]:
        """One set of buffers, reallocated when the operand's shape or type changes."""
        key = (B.shape[:-2].numel(), B.shape[-1], B.dtype)
        if self._buffers is None or self._buffers[0] != key:
            with torch.inference_mode(False):  # later products may run outside of it
                self._buffers = (key, *self._make(B))
        return self._buffers[1], self._buffers[2]

    def _pack(self, B: Tensor, sent: Tensor) -> None:
        rows = B.reshape(sent.shape[1], B.shape[-2], B.shape[-1]).transpose(0, 1)
        if self.halo.collective == "all_gather":
            sent[: self.own_rows].copy_(rows)
            return
        if self.halo.collective == "fewest":  # the caller has made them
            sent.copy_(rows)
            return
        if B.is_cuda and sent.shape[1] == 1 and gathers(rows[:, 0], sent[:, 0]):
            gather_rows(rows[:, 0], self._send_numbers(), sent[:, 0])
        else:
            torch.index_select(rows, 0, self.halo.send_ids, out=sent)

    def prepare(self) -> None:
        """Make the tensors for packing in advance (for CUDA graphs)."""
        if self.halo.collective == "all_to_all" and self.halo.send_ids.is_cuda:
            self._send_numbers()

    def _send_numbers(self) -> Tensor:
        """The numbers of the sent rows, in the kernel's type."""
        if self._numbers is None:
            with torch.inference_mode(False):
                self._numbers = self.halo.send_ids.to(torch.int32).contiguous()
        return self._numbers

    def start(self, B: Tensor, *, keep: bool) -> tuple[Tensor, Pending]:
        """Pack and send; return the buffer that is being received.

        ``keep``: the caller keeps the buffer (autograd). Otherwise the next product reuses it.
        """
        B = B.detach()
        sent, received = self._make(B) if keep else self._buffers_for(B)
        if B.is_cuda:
            return received, self._start_on_side_stream(B, sent, received)
        self._pack(B, sent)
        return received, self._send(sent, received)

    def _start_on_side_stream(self, B: Tensor, sent: Tensor, received: Tensor) -> Pending:
        side = self.ranks.side_stream(B.device)
        side.wait_stream(torch.cuda.current_stream(B.device))
        with torch.cuda.stream(side):
            for tensor in (B, sent, received):
                tensor.record_stream(side)
            self._pack(B, sent)
            return self._send(sent, received)

    def _send(self, sent: Tensor, received: Tensor) -> Pending:
        if self.halo.collective == "all_gather":
            return self.ranks.start_all_gather(received, sent, "run")
        return self.ranks.start_all_to_all(
            received, self.halo.receive_rows, sent, self.halo.send_rows, "run"
        )

    # -- adjoint --------------------------------------------------------------------------------

    def start_back(self, G: Tensor) -> tuple[Tensor, Pending]:
        """Send the gradients of received rows, [rows, batches, N], back to their owners."""
        G = G.contiguous()
        back = G.new_empty((self._back_rows, *G.shape[1:]))
        if self.halo.collective == "all_gather":
            each = (self.halo.padded,) * self.ranks.size
            return back, self.ranks.start_all_to_all(back, each, G, each, "backward")
        halo = self.halo
        return back, self.ranks.start_all_to_all(
            back, halo.send_rows, G, halo.receive_rows, "backward"
        )

    @property
    def _back_rows(self) -> int:
        gathers = self.halo.collective == "all_gather"
        return self.ranks.size * self.halo.padded if gathers else self.halo.send_ids.numel()

    def sum_back(self, back: Tensor, lead: _Shape) -> Tensor:
        """Sum the returned rows over the ranks, in rank order; return [*lead, own rows, N]."""
        tail = back.shape[1:]
        if self.halo.collective == "all_gather":
            by_rank = back.reshape(self.ranks.size, self.halo.padded, *tail)[:, : self.own_rows]
            wide = torch.promote_types(back.dtype, torch.float32)
            total = by_rank[0].to(wide)
            for other in by_rank[1:]:
                total = total + other
            summed = total.to(back.dtype).transpose(0, 1)
        elif self.halo.collective == "fewest":
            summed = back.transpose(0, 1)
        else:
            summed = self._sum_plan(back.dtype).run(back.transpose(0, 1))
        return summed.reshape(*lead, self.own_rows, tail[-1])

    def _sum_plan(self, dtype: torch.dtype) -> Plan:
        """The matrix that sums returned rows: a row per own row of B, an entry per row sent."""
        if dtype not in self._sum_plans:
            sent = self.halo.send_ids
            order = torch.argsort(sent, stable=True)
            indptr = offsets(torch.bincount(sent, minlength=self.own_rows))
            pattern = CSR(indptr, order.to(torch.int32), None, (self.own_rows, sent.numel()))
            self._sum_plans[dtype] = plan(pattern, self._n, dtype=dtype, deterministic=True)
        return self._sum_plans[dtype]


class _Ticket:
    """State shared by the two operators of one exchange."""

    pending: Pending | None = None
    back: tuple[Tensor, Pending] | None = None


class _Start(torch.autograd.Function):
    """[..., own rows, N] -> the received rows [rows, batches, N], which have not arrived yet."""

    @staticmethod
    def forward(ctx: Any, B: Tensor, exchange: Exchange, ticket: _Ticket) -> Tensor:
        ctx.exchange, ctx.ticket, ctx.lead = exchange, ticket, B.shape[:-2]
        received, ticket.pending = exchange.start(B, keep=True)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if ctx.ticket.back is None:  # with create_graph=True nothing was sent ahead
            return _SendBack.apply(grad, ctx.exchange, ctx.lead), None, None
        back, pending = ctx.ticket.back
        ctx.ticket.back = None
        pending.wait()
        return ctx.exchange.sum_back(back, ctx.lead), None, None


class _Finish(torch.autograd.Function):
    """Waits for the rows that :class:`_Start` requested."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, exchange: Exchange, ticket: _Ticket) -> Tensor:
        ctx.exchange, ctx.ticket = exchange, ticket
        assert ticket.pending is not None
        ticket.pending.wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if not torch.is_grad_enabled():
            ctx.ticket.back = ctx.exchange.start_back(grad)
        return grad, None, None


class _SendBack(torch.autograd.Function):
    """The adjoint as one operator, for second derivatives. Its own adjoint is the exchange."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, exchange: Exchange, lead: _Shape) -> Tensor:
        ctx.exchange = exchange
        back, pending = exchange.start_back(grad)
        pending.wait()
        return exchange.sum_back(back, lead)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ticket = _Ticket()
        pending = _Start.apply(grad, ctx.exchange, ticket)
        return _Finish.apply(pending, ctx.exchange, ticket), None, None


def start_rows(exchange: Exchange, B: Tensor) -> tuple[Tensor, _Ticket]:
    """Start a differentiable exchange; pass the result to :func:`finish_rows`."""
    ticket = _Ticket()
    return _Start.apply(B, exchange, ticket), ticket


def finish_rows(exchange: Exchange, received: Tensor, ticket: _Ticket) -> Tensor:
    """Wait for the received rows and return them, [rows, batches, N]."""
    return _Finish.apply(received, exchange, ticket)
