"""Products without a plan: block-sparse layers, graph attention, sampled edges, normalisation."""
