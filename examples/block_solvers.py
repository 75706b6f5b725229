"""Block solvers over a plan: conjugate gradients and LOBPCG, with times beside SciPy's.

    python examples/block_solvers.py [rows] [columns]

All right-hand sides, or all eigenvectors, are multiplied by A in one product of a plan. The solvers
below are written with torch, so they run where the plan does. The last lines give SciPy's solvers a
plan: ``plan.as_linear_operator()``.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.linalg import cg, lobpcg

import sparsetile as st


def laplacian(side: int) -> scipy.sparse.csr_array:
    """Return the five-point Laplacian of a square grid, plus a little on its diagonal."""
    line = scipy.sparse.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(side, side))
    eye = scipy.sparse.identity(side)
    grid = scipy.sparse.kron(line, eye) + scipy.sparse.kron(eye, line)
    return scipy.sparse.csr_array(grid + 0.05 * scipy.sparse.identity(side * side))


def block_cg(plan: st.Plan, B: torch.Tensor, tolerance: float = 1e-6) -> tuple[torch.Tensor, int]:
    """Solve A·X = B for all columns at once; return X and the number of products."""
    X, R = torch.zeros_like(B), B.clone()
    P, squares = R.clone(), R.square().sum(0)
    goal = tolerance**2 * B.square().sum(0)
    for steps in range(1, 1000):
        AP = plan @ P
        active = squares > goal  # a column that is solved stays as it is
        alpha = torch.where(active, squares / (P * AP).sum(0), 0.0)
        X += alpha * P
        R -= alpha * AP
        before, squares = squares, R.square().sum(0)
        if not (squares > goal).any():
            return X, steps
        P = R + torch.where(active, squares / before, 0.0) * P
    return X, steps


def block_lobpcg(
    plan: st.Plan, X: torch.Tensor, tolerance: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the largest eigenvalues of a symmetric A, their vectors, and the products."""
    k = X.shape[1]
    X = torch.linalg.qr(X).Q
    AX, P = plan @ X, X[:, :0]
    for steps in range(1, 500):
        values = (X * AX).sum(0)
        residual = AX - X * values
        if bool((residual.norm(dim=0) <= tolerance * values.abs()).all()):
            return values, X, steps
        # Rayleigh-Ritz in the span of vectors, residuals and last directions.
        basis = torch.linalg.qr(torch.cat([X, residual, P], dim=1)).Q
        product = plan @ basis
        ritz = torch.linalg.eigh(basis.T @ product)
        chosen = ritz.eigenvectors[:, -k:].flip(1)
        P = basis @ chosen - X @ (X.T @ (basis @ chosen))
        X, AX = basis @ chosen, product @ chosen
    return values, X, steps


def seconds(call):
    """Return what a call returns, and the seconds of its second run."""
    call()
    begun = time.perf_counter()
    found = call()
    return found, time.perf_counter() - begun


def main(rows: int = 40_000, columns: int = 16) -> None:
    A = laplacian(round(rows**0.5))
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((A.shape[0], columns))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    B = torch.from_numpy(dense).to(device)
    plan = st.plan(A, n=columns, device=device)
    print(f"{A.shape[0]} rows, {A.nnz} entries, {columns} columns, {plan.dtype}, {device}")

    (X, steps), ours = seconds(lambda: block_cg(plan, B))
    theirs, slow = seconds(
        lambda: np.stack([cg(A, dense[:, j], rtol=1e-6)[0] for j in range(columns)], axis=1)
    )
    worst = float((plan @ X - B).norm() / B.norm())
    print(f"CG: {steps} products, residual {worst:.0e}, {ours:.3f} s; scipy, column by column,")
    print(f"    {slow:.3f} s; difference {np.abs(X.cpu().numpy() - theirs).max():.0e}")

    start = dense[:, :4].copy()
    (values, _, steps), ours = seconds(lambda: block_lobpcg(plan, torch.from_numpy(start).to(B)))
    (reference, _), slow = seconds(
        lambda: lobpcg(A, start.copy(), largest=True, tol=1e-5, maxiter=500)
    )
    (mixed, _), between = seconds(
        lambda: lobpcg(plan.as_linear_operator(), start.copy(), largest=True, tol=1e-5, maxiter=500)
    )
    print(
        f"LOBPCG: {steps} products, {ours:.3f} s; scipy {slow:.3f} s, with the plan {between:.3f} s"
    )
    print(*(f"{float(value):.4f}" for value in values))
    for found in (reference, mixed):
        assert np.allclose(np.sort(found)[::-1], values.cpu().numpy(), rtol=1e-3)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
