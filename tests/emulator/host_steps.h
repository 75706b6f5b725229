// Steps of a kernel that is compiled to count them (build.py): linked to each such kernel by
// itself, and not compiled to count.
#include "host_cuda.h"

// Called at each basic block of the kernel, thread by thread.
extern "C" {
unsigned long long counted_steps[1024] = {};
void __sanitizer_cov_trace_pc() { ++counted_steps[threadIdx.x]; }
}
