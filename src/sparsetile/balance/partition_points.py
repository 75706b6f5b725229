"""Split points of a flattened C between persistent workers: Algorithm 1 of Voltrix-SpMM.

C is flattened to tasks: windows one after the other, each with ``width`` units of columns. A split
point is a task number; a worker has the tasks from its point to the next one's. Splits inside a
window share it between two workers along N, so that no partial sums are needed.

Decisions that the paper leaves open: the average in Algorithm 1 is that of the remaining tasks, so
that snapping does not shift all excess to the last share; a point is at the unit nearest to the
average, not past it; the penalty P of Equation 2 is ``PENALTY`` times the share of the split points
inside a window.
"""

from __future__ import annotations

import numpy as np

__all__ = ["greedy_points", "points_at", "refined_points", "share_costs"]

# Points within this part of a window's ends move there (Algorithm 1).
SNAP = 8
PENALTY = 0.002
# One generation: mutants, survivors, and their children.
MUTANTS, PARENTS, CHILDREN = 64, 16, 64


def _snapped(column: np.ndarray, width: int) -> np.ndarray:
    """Move columns that are near a window's ends to them (Algorithm 1, lines 5 to 10)."""
    column = np.where(column < width / SNAP, 0, column)
    return np.where(column > width - width / SNAP, width, column)


def _cost_at(points: np.ndarray, prefix: np.ndarray, width: int) -> np.ndarray:
    """Cost of all tasks before each point."""
    window = np.minimum(points // width, len(prefix) - 2)
    part = (points - window * width) / width
    return prefix[window] + part * (prefix[window + 1] - prefix[window])


def points_at(costs: np.ndarray, prefix: np.ndarray, width: int) -> np.ndarray:
    """Return the split points, int64, next to ascending costs, with both ends."""
    windows = len(prefix) - 1
    if not windows:
        return np.zeros(len(costs) + 2, dtype=np.int64)
    window = np.clip(np.searchsorted(prefix, costs, side="right") - 1, 0, windows - 1)
    cost = np.maximum(prefix[window + 1] - prefix[window], 1e-300)
    column = np.clip(np.rint((costs - prefix[window]) / cost * width), 0, width)
    inner = window * width + _snapped(column, width).astype(np.int64)
    return np.maximum.accumulate(np.concatenate([[0], inner, [windows * width]]))


def greedy_points(prefix: np.ndarray, width: int, workers: int) -> np.ndarray:
    """Return the split points, int64 [workers + 1], by Algorithm 1.

    ``prefix`` is the cost of all windows before each, over all columns; ascending.
    """
    windows = len(prefix) - 1
    points = np.zeros(workers + 1, dtype=np.int64)
    points[-1] = windows * width
    if not windows:
        return points
    spent = 0.0
    for i in range(1, workers):
        target = spent + (prefix[-1] - spent) / (workers - i + 1)
        window = min(int(np.searchsorted(prefix, target, side="right")) - 1, windows - 1)
        cost = prefix[window + 1] - prefix[window]
        column = np.rint((target - prefix[window]) / cost * width) if cost > 0 else 0.0
        column = int(_snapped(np.array(min(column, width)), width))
        points[i] = max(window * width + column, points[i - 1])
        spent = float(_cost_at(points[i : i + 1], prefix, width)[0])
    return points


def share_costs(points: np.ndarray, prefix: np.ndarray, width: int) -> np.ndarray:
    """Return the cost of each worker's tasks, [..., workers], for points [..., workers + 1]."""
    if len(prefix) < 2:
        return np.zeros((*points.shape[:-1], points.shape[-1] - 1))
    return np.diff(_cost_at(points, prefix, width), axis=-1)


def _objective(points: np.ndarray, prefix: np.ndarray, width: int) -> np.ndarray:
    """Equation 2: the largest share of the cost over the mean, plus the penalty."""
    largest = share_costs(points, prefix, width).max(axis=-1) / prefix[-1] * (points.shape[-1] - 1)
    inside = (points[..., 1:-1] % width != 0).mean(axis=-1)
    return largest + PENALTY * inside


def refined_points(points: np.ndarray, prefix: np.ndarray, width: int, seed: int = 0) -> np.ndarray:
    """Return the points after one generation of a genetic search; never worse than before.

    Mutants move points beside large shares by a few units, to shrink those. The best become
    parents; their children take each point from one of two parents. Seeded, so deterministic.
    """
    workers = len(points) - 1
    if workers < 2 or len(prefix) < 2 or prefix[-1] <= 0:
        return points
    random = np.random.default_rng(seed)

    def valid(candidates: np.ndarray) -> np.ndarray:
        inner = np.clip(candidates, 0, points[-1])
        inner = inner // width * width + _snapped(inner % width, width).astype(np.int64)
        inner[..., 0], inner[..., -1] = 0, points[-1]
        return np.maximum.accumulate(np.minimum(inner, points[-1]), axis=-1)

    def mutated(base: np.ndarray) -> np.ndarray:
        """Move points beside large shares; each mutant has its own limit."""
        shares = share_costs(base, prefix, width)
        mean = prefix[-1] / workers
        limit = mean + (shares.max(axis=-1) - mean) * random.random(len(base))
        large = shares >= limit[:, None]
        towards = np.zeros(base.shape, dtype=np.int64)
        towards[:, 1:-1] = np.where(
            large[:, 1:] | large[:, :-1], np.sign(shares[:, 1:] - shares[:, :-1]), 0
        )
        reach = random.integers(0, max(width // 4, 1) + 1, base.shape)
        return valid(base + towards * reach)

    mutants = np.concatenate([points[None], mutated(np.repeat(points[None], MUTANTS, axis=0))])
    parents = mutants[np.argsort(_objective(mutants, prefix, width), kind="stable")[:PARENTS]]
    pairs = random.integers(0, len(parents), (CHILDREN, 2))
    takes = random.random((CHILDREN, workers + 1)) < 0.5
    children = mutated(valid(np.where(takes, parents[pairs[:, 0]], parents[pairs[:, 1]])))
    everyone = np.concatenate([points[None], parents, children])
    return everyone[int(np.argmin(_objective(everyone, prefix, width)))]
