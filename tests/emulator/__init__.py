"""Device code on the host: kernels compiled by g++ and run with one thread for each GPU thread.

What it shows: indices, layouts of fragments, rings, joins, the exact redo and epilogues are right.
What it cannot show: memory ordering between warps, speed, what the GPU's compiler makes of it.
"""
