"""Condensed tiles on Tensor Cores: windows of rows, alone or beside rows on CUDA cores."""
