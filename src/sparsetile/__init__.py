"""sparsetile: sparse × dense matrix products, on Tensor Cores if they are faster.

>>> import torch
>>> import sparsetile as st
>>> A = torch.eye(4).to_sparse_csr()
>>> plan = st.plan(A, n=2)
>>> plan @ torch.ones(4, 2)
tensor([[1., 1.],
        [1., 1.],
        [1., 1.],
        [1., 1.]])

Importing the package does not initialise CUDA. Kernels are compiled when a plan first needs them.
"""

from __future__ import annotations

from sparsetile._version import __version__
from sparsetile.cache.spmm import clear_plan_cache, spmm
from sparsetile.core.epoch import changed
from sparsetile.core.errors import CompileError, DataError, PlanFileError, UnsupportedError
from sparsetile.intake import CSR
from sparsetile.launch.faults import synchronize
from sparsetile.plan.load import load_plan
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import plan
from sparsetile.systems.table import systems

__all__ = [
    "CSR",
    "CompileError",
    "DataError",
    "Plan",
    "PlanFileError",
    "UnsupportedError",
    "__version__",
    "changed",
    "clear_plan_cache",
    "load_plan",
    "plan",
    "spmm",
    "synchronize",
    "systems",
]
