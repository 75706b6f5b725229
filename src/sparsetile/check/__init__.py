"""Checks of products: the float64 reference, the error bound, comparisons, pictures."""
