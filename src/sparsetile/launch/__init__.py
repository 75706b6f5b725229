"""Launches of products: what a kernel has to know of B and C, prepared once for each kind of B."""
