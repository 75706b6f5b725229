"""Rows of A on CUDA cores: for ``csr``, and for the rows that other systems leave to them."""
