"""What everything else stands on: errors, argument checks, settings, device facts, numba."""
