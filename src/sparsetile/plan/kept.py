"""A plan in a bounded cache: what read it, and that its memory outlives those reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sparsetile.jit.loader import current_stream_handle
from sparsetile.plan.plan import Plan

__all__ = ["KeptPlan"]


@dataclass
class KeptPlan:
    """A plan, and the streams on which products with it were launched, by their handles."""

    plan: Plan
    streams: dict[int, torch.cuda.Stream] = field(default_factory=dict)

    def note_stream(self) -> None:
        """Remember the current stream."""
        if self.plan.device.type == "cuda":
            handle = current_stream_handle(self.plan.device.index)
            if handle not in self.streams:
                self.streams[handle] = torch.cuda.current_stream(self.plan.device)

    def drop(self) -> None:
        """Keep the plan's memory from others until the work that reads it is done."""
        for stream in self.streams.values():
            self.plan.record_stream(stream)
