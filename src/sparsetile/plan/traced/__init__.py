"""Products as torch traces, exports and differentiates them: operators over flat tensors."""
