"""The time of one product: CUDA-graph replay and events on a GPU, ``perf_counter`` on the host.

``time_product`` is for results that are kept. On a GPU it captures the product several times into
one graph, to spread the launch cost and the gap between replays over many products, and times whole
replays with events. A product that cannot be captured is timed with plain events, and the samples
record that. Sampling stops after a few milliseconds of work, whatever the product's size.

``measure`` is the median of a few calls, with no graph. A call on a GPU includes its launch.

``measure_queued`` is for choices made while planning: it finds the GPU's own time within a few
milliseconds. The calls are queued behind a waiting kernel, so that the host has launched all of
them before the first begins. Without that, 9 us of cuBLAS in three launches looked slower (96 us of
host time) than 14 us of one launch (48 us).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["Samples", "measure", "measure_queued", "one_product", "percentiles", "time_product"]

# One replay should last about this long: 100 times the couple of microseconds between events.
_REPLAY_SECONDS = 400e-6
_MAX_LAUNCHES = 32
_WARM_SECONDS = 3e-3
# Calls between two events if products are short: an event itself takes a microsecond or two.
_QUEUED_CALLS, _SHORT_SECONDS = 4, 200e-6
# Approximate clock of a GPU in Hz. The queue is blocked for this multiple of the host's time, and
# for this many seconds at most.
_CYCLES, _BLOCKED, _BLOCKED_SECONDS = 2e9, 1.5, 0.01


@dataclass
class Samples:
    """Seconds per product, sample by sample, and how they were taken."""

    seconds: list[float]
    method: str  # "graph", "events" or "clock"
    launches: int  # products per sample

    @property
    def median(self) -> float:
        return percentiles(self.seconds)[1]

    def summary(self) -> dict[str, Any]:
        """Return the record's ``time`` object."""
        low, middle, high = percentiles(self.seconds)
        return {
            "p20": low, "p50": middle, "p80": high, "method": self.method,
            "launches": self.launches, "samples": len(self.seconds),
        }  # fmt: skip

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


def measure(run: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Return the median seconds of one call of ``run``, after two calls to warm up."""
    if device.type != "cuda":
        run()
        run()
        return percentiles(_clock_seconds(run, repeats))[1]
    with torch.cuda.device(device):
        run()
        run()
        # One sample at a time: a caller waits for the launch of each call, too.
        return percentiles([_event_seconds(run, 1)[0] for _ in range(repeats)])[1]


def measure_queued(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the median seconds that a GPU takes for one call of ``run``, without its launch.

    On a host it is ``measure``. A call that waits for the GPU itself is timed with its launch.
    """
    if device.type != "cuda":
        return measure(run, device, repeats)
    with torch.cuda.device(device):
        run()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        host = time.perf_counter() - begun
        torch.cuda.synchronize()
        calls = _QUEUED_CALLS if time.perf_counter() - begun < _SHORT_SECONDS + host else 1
        seconds: list[float] = []
        for _ in range(2):
            waited = torch.cuda.Event()
            wait = min(_BLOCKED * host * calls * repeats, _BLOCKED_SECONDS)
            torch.cuda._sleep(int(_CYCLES * wait))
            waited.record()
            begun = time.perf_counter()
            pairs = _queue_events(run, repeats, calls)
            behind = not waited.query()
            host = (time.perf_counter() - begun) / (calls * repeats)
            torch.cuda.synchronize()
            seconds = [start.elapsed_time(stop) * 1e-3 / calls for start, stop in pairs]
            if behind:
                break  # the host had queued all calls before the first began
        return percentiles(seconds)[1]


def one_product(run: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock seconds of one product, including the wait for its result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def time_product(
    run: Callable[[], object], device: torch.device, *, budget: float = 0.008,
    samples: int | None = None,
) -> Samples:  # fmt: skip
    """Time ``run``, one product on torch's current stream, on a device after warming up.

    ``budget`` is the target for the seconds of measured work; ``samples``, if given, are exactly as
    many, whatever they cost.
    """

    def count(seconds: float, spent: float = budget) -> int:
        # At least 5 (3 when one takes over 0.1 s), at most 50.
        fitting = max(3 if seconds > 0.1 else 5, min(50, int(spent / max(seconds, 1e-9))))
        return fitting if samples is None else samples

    if device.type == "cuda":
        return _time_cuda(run, device, count)
    run()
    one = _clock_seconds(run, 1)[0]
    return Samples(_clock_seconds(run, count(one, max(budget, 0.05))), "clock", 1)


def _clock_seconds(work: Callable[[], object], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return seconds


def _event_seconds(work: Callable[[], object], count: int) -> list[float]:
    """Time ``count`` calls by events on the current stream; one synchronisation at the end."""
    pairs = _queue_events(work, count)
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e-3 for start, stop in pairs]


def _queue_events(
    work: Callable[[], object], count: int, calls: int = 1
) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    """Queue ``calls`` calls of ``work`` between two events, ``count`` times."""
    pairs = []
    for _ in range(count):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        stop.record()
        pairs.append((start, stop))
    return pairs


_streams: dict[int, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device for warm-up, capture and replay; capture needs a stream of its own."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(index)
    return _streams[index]


def _capture(run: Callable[[], object], launches: int) -> torch.cuda.CUDAGraph | None:
    """Capture ``launches`` products on the current stream; None if the product refuses."""
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


def _launch_count(seconds: float) -> int:
    """Products of ``seconds`` each that make one replay long enough."""
    return max(1, min(_MAX_LAUNCHES, int(_REPLAY_SECONDS / max(seconds, 1e-9))))


def _time_cuda(
    run: Callable[[], object], device: torch.device, samples: Callable[[float], int]
) -> Samples:
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
        one = min(_event_seconds(run, 3))
        launches = _launch_count(one)
        graph = _capture(run, launches)
        if graph is None:
            run()
            return Samples(_event_seconds(run, samples(one)), "events", 1)
        one = min(one, *(each / launches for each in _event_seconds(graph.replay, 3)))
        if _launch_count(one) > launches:
            # The host needs longer per call than the GPU: with too few products in the graph, the
            # gap between replays would be counted as theirs.
            longer = _capture(run, _launch_count(one))
            if longer is not None:
                graph, launches = longer, _launch_count(one)
        # An idle GPU needs a moment of work to reach its clocks.
        for _ in range(max(1, min(10, int(_WARM_SECONDS / (one * launches))))):
            graph.replay()
        taken = _event_seconds(graph.replay, samples(one * launches))
        seconds = [each / launches for each in taken]
    return Samples(seconds, "graph", launches)
