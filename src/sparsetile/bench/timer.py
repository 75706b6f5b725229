"""Time of one product: CUDA-graph replay and events on a GPU, ``perf_counter`` on the host.

On a GPU the product is captured several times into one graph, so that launch cost and the gap
between replays are spread over many products; events on the stream time whole replays. What
cannot be captured is timed with plain events, and the record says so. Repeats adapt to the
product: a few milliseconds per entry, whatever its size.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["Samples", "one_product", "percentiles", "time_product"]

# One replay should last about this long: 100 times the couple of microseconds between events.
_REPLAY_SECONDS = 400e-6
_MAX_LAUNCHES = 32
_WARM_SECONDS = 3e-3
# Bytes written between cold runs: more than the L2 of any GPU (the H200 has 60 MB).
_FLUSH_BYTES = 256 * 2**20


@dataclass
class Samples:
    """Seconds per product, sample by sample, and how they were taken."""

    seconds: list[float]
    method: str  # "graph", "events" or "clock"
    launches: int  # products per sample

    def summary(self) -> dict[str, Any]:
        """Return the record's ``time`` object."""
        low, middle, high = percentiles(self.seconds)
        return {
            "p20": low,
            "p50": middle,
            "p80": high,
            "method": self.method,
            "launches": self.launches,
            "samples": len(self.seconds),
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return p20, p50, p80 by linear interpolation.

    >>> percentiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (2.0, 3.5, 5.0)
    """
    ordered = sorted(seconds)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    return at(0.2), at(0.5), at(0.8)


def _sample_count(seconds: float, budget: float) -> int:
    """Samples that fit the budget: at least 5 (3 when one takes over 0.1 s), at most 50."""
    return max(3 if seconds > 0.1 else 5, min(50, int(budget / max(seconds, 1e-9))))


def one_product(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one product by the clock, waiting included: enough to tell slow from hopeless."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def time_product(
    run: Callable[[], object],
    device: torch.device,
    *,
    budget: float = 0.008,
    cold: bool = False,
) -> Samples:
    """Time ``run`` on a device after warming up.

    Parameters
    ----------
    run : callable
        One product. On a GPU it launches on torch's current stream.
    device : torch.device
    budget : float
        Seconds of measured work aimed at.
    cold : bool
        On a GPU: flush the L2 before each sample, one product a sample.
    """
    if device.type == "cuda":
        return _time_cold(run, device, budget) if cold else _time_cuda(run, device, budget)
    return _time_host(run, budget)


def _time_host(run: Callable[[], object], budget: float) -> Samples:
    run()
    begun = time.perf_counter()
    run()
    one = time.perf_counter() - begun
    seconds = []
    for _ in range(_sample_count(one, max(budget, 0.05))):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return Samples(seconds, "clock", 1)


_streams: dict[int, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device for warm-up, capture and replay; capture needs a stream of its own."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(index)
    return _streams[index]


def _event_seconds(work: Callable[[], object], count: int) -> list[float]:
    """Time ``count`` calls by events on the current stream; one synchronisation at the end."""
    pairs = []
    for _ in range(count):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e-3 for start, stop in pairs]


def _capture(run: Callable[[], object], launches: int) -> torch.cuda.CUDAGraph | None:
    """Capture ``launches`` products on the current stream; None when the product refuses."""
    graph = torch.cuda.CUDAGraph()
    try:
        # capture_begin instead of torch.cuda.graph(): the latter empties the allocator's cache.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(launches):
                run()
        finally:
            graph.capture_end()
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        return None
    return graph


def _time_cuda(run: Callable[[], object], device: torch.device, budget: float) -> Samples:
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
        one = min(_event_seconds(run, 3))
        launches = max(1, min(_MAX_LAUNCHES, int(_REPLAY_SECONDS / max(one, 1e-9))))
        graph = _capture(run, launches)
        if graph is None:
            run()
            count = _sample_count(one, budget)
            return Samples(_event_seconds(run, count), "events", 1)
        # A GPU that idled between entries needs a moment at work to reach its clocks.
        for _ in range(max(1, min(10, int(_WARM_SECONDS / (one * launches))))):
            graph.replay()
        count = _sample_count(one * launches, budget)
        seconds = [taken / launches for taken in _event_seconds(graph.replay, count)]
    return Samples(seconds, "graph", launches)


def _time_cold(run: Callable[[], object], device: torch.device, budget: float) -> Samples:
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    with torch.cuda.stream(stream):
        run()
        graph = _capture(run, 1)
        work = run if graph is None else graph.replay
        one = min(_event_seconds(work, 2))
        seconds = []
        for _ in range(min(_sample_count(one, budget), 20)):
            flush.fill_(1)
            seconds += _event_seconds(work, 1)
    return Samples(seconds, "events" if graph is None else "graph", 1)
