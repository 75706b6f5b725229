"""The ranks of a process group: collectives on rows, and one error on every rank.

A rank that raises while the others wait in a collective leaves them waiting until the group's
timeout. So a rank first sends the errors that it finds by itself to the others
(:meth:`Ranks.together`), and then every rank raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsetile.core.errors import value_error

__all__ = ["Pending", "Ranks"]

_Found = TypeVar("_Found")

# torch 2.13 renames all_gather_into_tensor; earlier releases have the old name only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A started collective; :meth:`wait` orders the current stream after it."""

    def __init__(self, work: Any, kept: tuple[Tensor, ...], function: str) -> None:
        self._work = work
        self._kept = kept  # the collective still reads them
        self._function = function

    def wait(self) -> None:
        """Wait: on a CPU the host waits, on a GPU only the current stream."""
        if self._work is None:
            return
        with _broken(self._function):
            self._work.wait()
        self._work = None
        for tensor in self._kept:
            if tensor.is_cuda:  # its memory was made on another stream
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self._kept = ()


class _OnSideStream:
    """A collective on a GPU's side stream, with the interface that :class:`Pending` expects."""

    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done, self._device = done, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


@contextmanager
def _broken(function: str) -> Iterator[None]:
    """Turn the backend's error about a lost rank into one that says what happened."""
    try:
        yield
    except NotImplementedError:
        raise
    except (RuntimeError, TimeoutError) as error:
        text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise RuntimeError(
            f"{function}: every rank must take part in the exchange, got an error from "
            f"torch.distributed: {text}. A rank has died or did not call within the group's "
            "timeout: look for its own error, and start the job again."
        ) from error


class Ranks:
    """The processes of a group that share a matrix, seen from one of them."""

    def __init__(self, group: Any, function: str) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise value_error(
                function, "group", "an initialised process group", "none",
                "Call torch.distributed.init_process_group first, and launch with torchrun",
            )  # fmt: skip
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        if self.rank < 0:
            raise value_error(
                function, "group", "a group that this process belongs to", "another",
                "Call it only on the ranks of the group",
            )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Return this object: copies of a layer belong to the same process group."""
        return self

    # -- agreement ------------------------------------------------------------------------------

    def objects(self, mine: Any, function: str) -> list[Any]:
        """Return every rank's object, by rank. Blocks; for planning only."""
        found: list[Any] = [None] * self.size
        with _broken(function):
            dist.all_gather_object(found, mine, group=self.group)
        return found

    def together(
        self,
        function: str,
        argument: str,
        call: Callable[[], _Found],
        facts: Callable[[_Found], dict[str, Any]] | None = None,
    ) -> _Found:
        """Return ``call()``, or raise on every rank if it raised on one.

        The rank that failed raises its own error. The others name that rank and quote it. ``facts``
        returns what must be the same on every rank, by name, from the result of ``call``. If a fact
        differs, every rank raises the same error.
        """
        error: Exception | None = None
        found: Any = None
        mine: dict[str, str] = {}
        try:
            found = call()
            if facts is not None:
                mine = {name: str(value) for name, value in facts(found).items()}
        except Exception as caught:
            error = caught
        text = None if error is None else f"{type(error).__name__}: {error}"
        answers = self.objects((text, mine), function)
        if error is not None:
            raise error
        for rank, (text, _) in enumerate(answers):
            if text is not None:
                raise value_error(
                    function, argument, "valid on every rank",
                    f"an error on rank {rank} ({text.rstrip('.')})", f"Correct it on rank {rank}",
                )  # fmt: skip
        for name in mine:
            self.same(function, name, [others[name] for _, others in answers])
        return found

    def same(self, function: str, name: str, texts: Sequence[str]) -> None:
        """Raise unless all texts, one per rank, are the same."""
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise value_error(
                    function, name, "the same on every rank",
                    f"{texts[0]} on rank 0 and {text} on rank {rank}",
                    "Call it with the same arguments on every rank",
                )  # fmt: skip

    def numbers(self, mine: Sequence[int], device: torch.device, function: str) -> Tensor:
        """Return every rank's whole numbers, int64 [size, len(mine)], on the CPU. Waits."""
        given = torch.tensor(list(mine), dtype=torch.int64, device=device)
        found = torch.empty(self.size * given.numel(), dtype=torch.int64, device=device)
        with _broken(function):
            _all_gather(found, given, group=self.group)
        return found.reshape(self.size, -1).cpu()

    # -- rows -----------------------------------------------------------------------------------

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the GPU stream for exchanges, which overlap with products.

        It has high priority. Otherwise a product that was queued first fills the GPU, and the
        exchange starts only after its last wave.
        """
        if device not in self._side:
            self._side[device] = torch.cuda.Stream(device, priority=-1)
        return self._side[device]

    def _start(
        self, call: Callable[..., Any], tensors: tuple[Tensor, ...], function: str
    ) -> Pending:
        """Start a collective. On a GPU it runs on the side stream, not on the backend's own.

        With ``async_op=False`` NCCL uses the current stream (since torch 2.8). The host never
        waits.
        """
        device = tensors[0].device
        with _broken(function):
            if device.type != "cuda":
                return Pending(call(async_op=True), tensors, function)
            side, current = self.side_stream(device), torch.cuda.current_stream(device)
            if side != current:
                side.wait_stream(current)
            with torch.cuda.stream(side):
                for tensor in tensors:
                    tensor.record_stream(side)
                call(async_op=False)
                done = torch.cuda.Event()
                done.record(side)
            return Pending(_OnSideStream(done, device), tensors, function)

    def start_all_to_all(
        self,
        received: Tensor,
        receive_rows: Sequence[int],
        sent: Tensor,
        send_rows: Sequence[int],
        function: str,
    ) -> Pending:
        """Start sending ranges of rows, one per rank in rank order; both tensors are contiguous.

        Bytes are exchanged, not numbers: every dtype passes, bit for bit.
        """
        size = sent.element_size() * _row_elements(sent)
        call = functools.partial(
            dist.all_to_all_single,
            _bytes(received),
            _bytes(sent),
            [rows * size for rows in receive_rows],
            [rows * size for rows in send_rows],
            group=self.group,
        )
        return self._start(call, (sent, received), function)

    def start_all_gather(self, received: Tensor, mine: Tensor, function: str) -> Pending:
        """Start gathering every rank's rows, the same number from each."""
        call = functools.partial(_all_gather, _bytes(received), _bytes(mine), group=self.group)
        return self._start(call, (mine, received), function)

    def all_reduce(self, summed: Tensor, function: str) -> None:
        """Replace a contiguous tensor by its sum over the ranks. Orders the current stream."""
        with _broken(function):
            dist.all_reduce(summed, group=self.group)

    def exchange(
        self, sent: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int], function: str
    ) -> Tensor:
        """Return the rows that every rank sends here, in rank order. Waits."""
        shape = (sum(receive_rows), *sent.shape[1:])
        received = torch.empty(shape, dtype=sent.dtype, device=sent.device)
        pending = self.start_all_to_all(
            received, receive_rows, sent.contiguous(), send_rows, function
        )
        pending.wait()
        return received


def _row_elements(rows: Tensor) -> int:
    return rows.shape[1:].numel() if rows.dim() > 1 else 1


def _bytes(rows: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    flat = rows.reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
