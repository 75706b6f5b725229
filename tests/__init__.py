"""Tests of everything that runs without a GPU, and of what needs one."""

import os

# Read when torch is loaded, by this process and those that tests start. Several of them share the
# cores: a thread of torch that waits must not spin where another process could work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
