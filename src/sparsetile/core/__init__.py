"""The base of all other packages: errors, argument checks, settings, device facts, numba."""
