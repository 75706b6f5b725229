"""The CPU's own kernels, compiled by numba."""
