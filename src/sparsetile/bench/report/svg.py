"""A small SVG canvas with linear and logarithmic axes.

Colours are CSS classes of the page (``s0`` … ``s9`` for series, ``axis``, ``grid``, ``tick``), so
charts follow the light and dark themes without being drawn twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["Axis", "Chart", "Raw", "log_ticks", "short"]


class Raw(str):
    """Text that a template inserts as it is, without escaping it."""

    def __html__(self) -> str:
        return str(self)


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def short(value: float) -> str:
    """Return a number as an axis or a table shows it: ``0.5``, ``12``, ``3.4k``, ``2M``.

    >>> [short(v) for v in (0.25, 3.0, 12.0, 3400.0, 2e6)]
    ['0.25', '3', '12', '3.4k', '2M']
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def power(exponent: int) -> str:
    """Return a power of ten in print: ``10³``."""
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def log_ticks(low: float, high: float) -> list[float]:
    """Return readable ticks of a logarithmic axis: 1-2-5 over few decades, else powers of ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    stride = max(1, (last - first) // 6) if len(steps) == 1 else 1
    found = [step * 10.0**e for e in range(first, last + 1, stride) for step in steps]
    return [tick for tick in found if low * 0.999 <= tick <= high * 1.001]


@dataclass(frozen=True)
class Axis:
    """One direction of a chart: data range to pixels."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value, kept within the axis."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, 1e-300))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.stop - self.start)

    @staticmethod
    def fitted(
        values: Sequence[float], start: float, stop: float, *, log: bool, include: float = math.nan
    ) -> Axis:
        """Return an axis that holds the values, with some air at both ends."""
        held = [*values, *([] if math.isnan(include) else [include])]
        low, high = min(held), max(held)
        if log:
            low, high = low / 1.18, high * 1.18
        else:
            low, high = min(0.0, low), high * 1.05 or 1.0
        return Axis(low, high, start, stop, log)


@dataclass
class Chart:
    """Collects SVG elements; ``render`` closes them into one picture with a text for readers."""

    width: int
    height: int
    label: str
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, classes: str, tip: str = "") -> None:
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{classes}">'
            f"{title}</line>"
        )

    def text(self, x: float, y: float, content: str, classes: str, anchor: str = "middle") -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" text-anchor="{anchor}">'
            f"{escape(content)}</text>"
        )

    def dot(self, x: float, y: float, classes: str, tip: str, radius: float = 3.2) -> None:
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{classes}" '
            f'data-tip="{escape(tip, quote=True)}"/>'
        )

    def rect(
        self, x: float, y: float, width: float, height: float, classes: str, tip: str = ""
    ) -> None:
        shown = f' data-tip="{escape(tip, quote=True)}"' if tip else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" '
            f'height="{max(height, 0.5):.1f}" rx="2" class="{classes}"{shown}/>'
        )

    def path(self, points: Sequence[tuple[float, float]], classes: str) -> None:
        if points:
            body = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            self.parts.append(f'<path d="M{body}" class="{classes}"/>')

    def frame(self, x: Axis, y: Axis, *, x_title: str, y_title: str, powers: bool = False) -> None:
        """Draw grid, ticks and titles of both axes."""
        for tick in log_ticks(y.low, y.high) if y.log else _linear_ticks(y):
            at = y.at(tick)
            self.line(x.start, at, x.stop, at, "grid")
            self.text(x.start - 6, at + 3.5, short(tick), "tick", "end")
        ticks = log_ticks(x.low, x.high) if x.log else _linear_ticks(x)
        whole = powers and all(math.log10(tick) == round(math.log10(tick)) for tick in ticks)
        for tick in ticks:
            at = x.at(tick)
            self.line(at, y.start, at, y.start + 4, "axis")
            shown = power(round(math.log10(tick))) if whole else short(tick)
            self.text(at, y.start + 17, shown, "tick")
        self.line(x.start, y.start, x.stop, y.start, "axis")
        self.text((x.start + x.stop) / 2, y.start + 34, x_title, "axis-title")
        self.text(2, y.stop - 12, y_title, "axis-title", "start")

    def render(self) -> str:
        body = "".join(self.parts)
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.label, quote=True)}">{body}</svg>'
        )


def _linear_ticks(axis: Axis) -> list[float]:
    span = axis.high - axis.low
    if span <= 0:
        return [axis.low]
    step = 10.0 ** math.floor(math.log10(span / 4))
    for multiple in (1, 2, 5, 10):
        if span / (step * multiple) <= 5:
            step *= multiple
            break
    first = math.ceil(axis.low / step)
    return [k * step for k in range(first, math.floor(axis.high / step) + 1)]
