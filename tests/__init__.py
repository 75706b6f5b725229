"""Tests of everything that runs without a GPU, and of what needs one."""

import os

# Read when torch is loaded, by this process and those that tests start. Several of them share the
# cores. One thread each: two that wait for each other while another process has the core take twice
# the time. Tests of several threads ask torch for them. A thread that waits must not spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
