"""What was made of callers' matrices and graphs, found again; ``spmm``."""
