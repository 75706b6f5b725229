"""The mutations as data: a fragment of one line, its replacement, what breaks.

Each is another kind of fault, or the same one in code that shares nothing with the first. Every
suite has at least three, every file of device code one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """GPU tests that run against a mutation."""

    tests: tuple[str, ...]  # files, those first that fail fastest
    systems: tuple[str, ...] = ()  # tests that every system runs, run for these; all when empty
    leave_out: str = ""  # regular expression of tests that are slow and add nothing
    kernel: str = ""  # the kernel that ``--compile`` tries first
    constant: str = ""  # of its configurations only those in which this is true
    first: str = ""  # test that runs first if no record says which one notices a mutation


@dataclass(frozen=True)
class Mutation:
    """One change of one token."""

    file: str  # path from the device tree on
    before: str  # a fragment that the file holds exactly once
    after: str  # what replaces it
    breaks: str  # what is wrong then
    suite: str  # key of ``SUITES``

    @property
    def name(self) -> str:
        return f"{self.file}: {self.before} -> {self.after}"


_SYSTEMS = "tests/contracts/test_systems.py"
_RUNTIME = "tests/contracts/test_gpu_runtime.py"
_VARIANTS = "tests/contracts/test_gpu_variants.py"
# Last: tests of single headers may notice what whole products do not.
_PRIMITIVES = tuple(
    f"tests/kernels/device/{folder}/test_gpu_{folder}.py"
    for folder in ("mma", "pipeline", "epilogue", "rows", "windows")
)
# Tests of tracing, planning, other packages or sizes, which run no further device code.
_SLOW = "opcheck|graph_breaks|autocast|gradients_flow|very_many|large_offset|cupy|saved_plan"

SUITES = {
    "csr": Suite(
        (_SYSTEMS, _VARIANTS, _RUNTIME, *_PRIMITIVES),
        ("csr",),
        f"{_SLOW}|sixteen_rows",
        "spmm_csr",
    ),
    "narrow": Suite(("tests/contracts/test_gpu_narrow.py",), kernel="spmm_csr", constant="kParts"),
    "direct": Suite(("tests/cache/test_gpu_fresh.py",), kernel="spmm_direct"),
    "dense": Suite(("tests/contracts/test_gpu_dense.py",), kernel="finish_dense"),
    "acc": Suite(
        (_SYSTEMS, _VARIANTS, _RUNTIME, *_PRIMITIVES),
        ("acc",),
        rf"{_SLOW}|slabs_first|\bearly\b",
        "spmm_bittcf",
    ),
    "half": Suite(
        ("tests/contracts/test_gpu_half.py", _SYSTEMS),
        ("half",),
        _SLOW,
        "spmm_half",
    ),
    "rsh": Suite(
        (_SYSTEMS, "tests/contracts/test_gpu_shared_windows.py", _RUNTIME),
        ("rsh",),
        _SLOW,
        "spmm_rstile",
    ),
    "brp": Suite(
        (_SYSTEMS, "tests/contracts/test_gpu_shared_windows.py"),
        ("brp",),
        _SLOW,
        "spmm_brp",
    ),
    "brp atomics": Suite(
        ("tests/contracts/test_gpu_shared_windows.py", _SYSTEMS),
        ("brp",),
        rf"{_SLOW}|mixed|\dx\d",
        "spmm_brp",
        "kAtomic",
    ),
    "few": Suite(("tests/nn/test_gpu_sparse_linear.py",), (), _SLOW, "linear_few"),
    "mma": Suite(
        ("tests/nn/test_gpu_sparse_linear.py",),
        (),
        rf"{_SLOW}|test_few|test_blocks|\b(few|blocks|dense)\b",
        "linear_blocks",
    ),
    "entries": Suite(("tests/nn/test_gpu_masked_linear.py",), (), _SLOW, "linear_entries"),
    "pack": Suite(("tests/nn/test_gpu_masked_linear.py",), (), _SLOW, "pack_entries"),
    "spread": Suite(("tests/nn/test_gpu_masked_linear.py",), (), _SLOW, "spread_masked"),
    "kept": Suite(("tests/nn/test_gpu_masked_linear.py",), (), _SLOW, "linear_masked"),
    "gat": Suite(("tests/nn/test_gpu_gat.py",), (), "autocast|compiled|memory|stored", "spmm_gat"),
    "edges": Suite(
        tuple(f"tests/nn/test_gpu_{layer}.py" for layer in ("gatv2", "transformer", "gine")),
        leave_out="stores",
        kernel="edge_scores",
    ),
    "bcsr": Suite(
        ("tests/contracts/test_gpu_blocks.py", _SYSTEMS, *_PRIMITIVES),
        ("bcsr",),
        _SLOW,
        "spmm_bcsr",
    ),
    "wcsr": Suite(
        ("tests/contracts/test_gpu_windows.py", _SYSTEMS, *_PRIMITIVES),
        ("wcsr",),
        _SLOW,
        "spmm_wcsr",
    ),
    "voltrix": Suite(
        ("tests/contracts/test_gpu_bmat.py", _SYSTEMS),
        ("voltrix",),
        _SLOW.replace("very_many|", ""),  # a block with more than four items
        "spmm_bmat",
    ),
    "won": Suite(("tests/plan/test_gpu_extrema.py",), leave_out="bytes", kernel="spmm_won"),
    "gather": Suite(("tests/launch/test_gather.py",), kernel="gather_rows"),
    "columns": Suite(("tests/launch/test_columns.py",), kernel="epilogue_gradient"),
    "cells": Suite(("tests/formats/test_device_cells.py",), kernel="pack_cells"),
    "merging": Suite(("tests/reorder/test_device_merging.py",), kernel="merge_rows"),
    "groups": Suite(("tests/systems/test_brp_windows.py",), kernel="pack_groups"),
    "intake": Suite(("tests/plan/test_gpu_direct.py",), kernel="check_rows"),
    "row lists": Suite(("tests/formats/test_device_rows.py",), kernel="list_rows"),
    "bundles": Suite(("tests/formats/test_device_rows.py",), kernel="pack_bundles"),
    "grouped": Suite(
        ("tests/nn/test_gpu_fresh.py",),
        kernel="group_entries",
        first="tests/nn/test_gpu_fresh.py::test_long_rows_are_cut_and_their_pieces_do_not_meet",
    ),
    "normalised values": Suite(("tests/layers/test_normalise.py",), kernel="normalise"),
}


# A heading names the file below the device tree and the suite; each line under it is one mutation:
# a fragment that the file holds exactly once => its replacement  # what is wrong then.
_LIST = """
[ptx/ptx.cuh, csr]
static_cast<u32>(bits) << 16 => static_cast<u32>(bits) << 15  # widens bfloat16 wrongly
@q fma.rn.f32 %3, %4, %8, %3;} => @q fma.rn.f32 %3, %4, %7, %3;}  # takes a neighbour
[ptx/ptx.cuh, acc]
"n"(kPending) => "n"(kPending + 1)  # does not wait for the tile's own copies
[ptx/ptx.cuh, rsh]
m8n8.x4.trans.shared => m8n8.x4.shared  # rows of B are not transposed
[ptx/element.cuh, csr]
word & 0xffff0000u => word & 0xff000000u  # cuts the upper bfloat16 of a word
[rows/accumulator.cuh, csr]
? -ptx::infinity<Acc>() => ? ptx::infinity<Acc>()  # begins a maximum at infinity
candidate > sum[0][q][v] => candidate < sum[0][q][v]  # names the wrong winner
[rows/row_items.cuh, csr]
1u << (kColumnBits + r) => 1u << kColumnBits  # one row's bit for a whole bundle
if (begin + lane < length) => if (begin + lane + 1 < length)  # misses the last entry
[rows/row_items.cuh, half]
is_wide(value, scale) ? Acc(0) : value * scale => value * scale  # adds wide rows twice
size >= 1.17549435e-38f => size >= 0.0f  # rounds weights that are subnormal
value != Acc(0) && !normal => false && !normal  # keeps weights that are infinite
[rows/row_items.cuh, won]
winner < 0 ? -1 : winner => winner < 0 ? 0 : winner  # the first entry of empty rows wins
const i64 first = __ldg(p.indptr + row); => const i64 first = 0;  # entries of A, not places
[rows/spmm_won.cu, won]
any || winner[u].element[v] == number[u] => any || winner[u].element[0] == number[u]  # reads less
if (winner[u].element[v] == number[u]) sum => sum  # adds what others won
if (p.values != nullptr) entry.weight => if (false) entry.weight  # all weights are 1
sum.add(other); => sum = other;  # keeps one group's part of a long row
constexpr int kNoEntry = -2 => constexpr int kNoEntry = -1  # past the end, empty rows have won
[rows/spmm_half.cu, half]
using V = F32 => using V = F16  # reads values as float16
[pack/half_rows.cu, half]
kBias - kTop + e => kBias - kTop - e  # takes another power back than it gave
scaled < kSmallest => scaled < 0.0f  # keeps elements that float16 cannot hold
wide ? u16(0) : => false ? u16(0) :  # keeps Inf and NaN in the copy
[pack/gather_rows.cu, gather]
first + lane < p.count ? => first + lane + 1 < p.count ?  # takes row 0 for the last
from + j * kGroups); => from + j);  # takes a neighbour's row
&& at < p.count => && at <= p.count  # writes a row too many
[rows/spmm_csr.cu, bcsr]
__ldcg(p.args) == 0 => __ldcg(p.args) != 0  # never repairs C
[rows/row_items.cuh, narrow]
at + (kUnroll - 1) * step < item.z => at < item.z  # adds entries of the next row
(work.first + lane) / kColumnLanes => lane / kColumnLanes  # groups add the same
join_lanes<1, kColumnLanes, kLanes> => join_lanes<1, 2 * kColumnLanes, kLanes>  # half
lane % kColumnLanes * kVec => lane / kParts * kVec  # lanes add each other's columns
[rows/sampled_items.cuh, csr]
lane / kUnroll == j / kUnroll => lane / kUnroll == j  # loses all but one batch
[rows/sddmm_csr.cu, csr]
threadIdx.x % kLanes => threadIdx.x % 32  # takes another group's columns
[rows/direct.cuh, direct]
V::narrow(typename V::Acc(1)) => V::narrow(typename V::Acc(0))  # a pattern of zeros
column == static_cast<int>(column) ? => true ?  # cuts a column of 64 bits
entries.y > entries.x ? scale / Acc => false ? scale / Acc  # a mean that is a sum
if (here) report => if (false) report  # is silent about a wrong column
column = 0; => column = 1 << 30;  # reads far outside of B
[rows/direct_items.cuh, direct]
(length + p.segment - 1) / p.segment => length / p.segment  # too few pieces
pieces > 1 ? slot + i : -1 => -1  # pieces overwrite each other
if (row >= p.rows || is_long) => if (row >= p.rows)  # adds up long rows twice
= node + i / kFanIn => = node  # one parent for all
slot + count + g, 0) => slot + count, 0)  # the wrong place above
p.counts[i] = 0 => p.counts[i] = 1  # leaves counters behind for the next launch
if (end < begin) report => if (false) report  # is silent about row pointers
[rows/spmm_direct.cu, direct]
slab = blockIdx.y => slab = 0  # the first slab again
[rows/sddmm_direct.cu, direct]
threadIdx.x % kLanes => threadIdx.x % 32  # takes another group's columns
[rows/segment.cuh, csr]
block >= block_end[s] => block > block_end[s]  # off by one between sections
arrived != children - 1 => arrived != children  # nobody completes a node
[rows/tree.cuh, csr]
place(info.x + number) => place(info.x)  # adds the first child only
[windows/windows.cuh, acc]
left > 0 ? __ldg(offsets + window + 1) => left > 0 ? __ldg(offsets + window)  # ends early
[epilogue/epilogue.cuh, csr]
__ldg(p.indptr + row + 1) => __ldg(p.indptr + row)  # no mean
[epilogue/epilogue.cuh, acc]
p.c + blockIdx.z * p.c_batch_stride => p.c + 0 * p.c_batch_stride  # one batch for all
[epilogue/epilogue.cuh, wcsr]
if (position >= p.rows) => if (position > p.rows)  # writes a row past C
[mma/exact.cuh, acc]
return all != 0.0f => return all == 1.0f  # never sees that sums are not finite
[windows/exact_tiles.cuh, acc]
if (entry && => if (  # zeros of a tile meet what is not finite
[mma/exact.cuh, wcsr]
return all != 0.0f => return all > 0.0f  # NaN is not greater than 0
[windows/exact_strips.cuh, wcsr]
if (entry && !( => if (!(  # zeros of a tile meet what is not finite
[windows/exact_strips.cuh, voltrix]
if (i > 0 && first + i >= end) break; =>  # the last tile of a window several times
[mma/bittcf.cuh, acc]
values += begin & 1 => values += 0  # values that begin in the middle of a word
[mma/mma.cuh, acc]
0x5410 => 0x5432  # takes the upper half of a row of B
[mma/mma.cuh, rsh]
m16n8k16.row.col.f32.bf16.bf16.f32 => m16n8k16.row.col.f32.f16.f16.f32  # another type
[mma/mma.cuh, bcsr]
cvt.rn.tf32.f32 => cvt.rz.tf32.f32  # truncates instead of rounding
[pipeline/copy_ring.cuh, acc]
(stage, 2 * t + r, column) => (stage, 2 * t, column)  # reads one row of B twice
[windows/spmm_bittcf.cu, acc]
(column & 1) * 2 + row => row * 2 + (column & 1)  # rows for columns in the sums
if (!all_finite(tally)) { => if (false) {  # pieces of windows are not made exact
[windows/fragment_items.cuh, rsh]
other < kThreads / 32 => other < kThreads / 32 - 1  # forgets the last warp's part
(warp + 1) * steps / kWarps => (warp + 1) * (steps / kWarps)  # steps that nobody does
all_finite(tally)) exact_sums(p, slab, part => true) exact_sums(p, slab, part  # not exact
i * kStep / kSize < left => i * kStep < left  # leaves columns out
[windows/window_sums.cuh, rsh]
four.pair[w] = odd ? theirs : first => four.pair[w] = first  # one pair of columns twice
[mma/stored_fragments.cuh, rsh]
i64(tile + k / 8) * 2 => i64(tile) * 2  # bits of a step's first tile alone
[mma/step.cuh, brp]
kDepth = kHalf ? 2 : 1 => kDepth = kHalf ? 4 : 1  # steps of twice the tiles, 16 bits
[windows/hybrid.cuh, rsh]
p.shared_item_count + item, slab => item, slab  # shared windows again, no others
[windows/spmm_rstile.cu, rsh]
hybrid_block(p); => ;  # computes nothing
[mma/fixed_slots.cuh, brp]
i64(tile) * (8 * kFixed) => i64(tile) * 8  # slots of other tiles
[windows/direct_groups.cuh, brp]
high == g + 8 ? w : 0 => high == g ? w : 0  # half of the rows
4 * at.g < at.left) { => 4 * at.g <= at.left) {  # a vector past the last column
[windows/window_rest.cuh, brp]
+ (group + 1) * count => + (group + 1) * (count - 1)  # leaves an entry out
if (its_row < 0) continue; => continue;  # forgets rows that groups of lanes share
[windows/spmm_brp.cu, brp]
kRest = true => kRest = false  # entries outside groups
[windows/window_adds.cuh, brp atomics]
scale_sums(terms, sum); => ;  # forgets alpha and the mean
if (offset < at.left) => if (true)  # adds past the last column
[windows/fragment_items.cuh, brp atomics]
item.y; tile < item.z; => item.y; tile + kDepth < item.z;  # a piece's last step
[ptx/ptx.cuh, brp atomics]
(address), "f"(sum[0]), "f"(sum[1]) => (address), "f"(sum[0]), "f"(sum[0])  # one of two sums
[block_sparse/linear_few.cu, few]
16 * strip + 8 * lower => 16 * strip  # rows g twice
upper.z, lower.z, upper.w, lower.w => upper.z, lower.z, upper.w, lower.z  # one row twice
int w = 1; w < kGroup => int w = 1; w < kGroup - 1  # forgets the last warp's sums
warp / kGroup * p.pair_block_rows => 0  # the gate in place of up
if (token >= p.n || row < 0) continue; => if (row < 0) continue;  # tokens past the last
[block_sparse/linear_entries.cu, entries]
even = odd - second => even = odd  # gaps of odd entries too early
part < kParts; ++part) total => part < kParts - 1; ++part) total  # forgets the last warp's sums
column += (odd >> 24) + 8 => column += odd >> 24  # the next step's columns
k < p.cols + p.zeros => k < p.cols  # what fills a row up meets anything
found < s_counts[token] => false  # forgets dropped weights times Inf
if (k + 1 < p.cols) => if (false)  # second columns of pairs that are not aligned
[block_sparse/pack_entries.cu, pack]
(next - previous - 1) / kGap => 0  # no entries between far ones
(four | four >> 4) => four  # gaps of odd entries are those of even ones
kept_upto = sum_upto(mine_kept, lane) => kept_upto = mine_kept  # the first weights for all lanes
part * 32] = previous => part * 32] = next  # a part begins too late
[block_sparse/spread_masked.cu, spread]
from += __shfl_sync(kWarp, upto, 31) => from += 0  # the row's first weights again
if (inside < 8) mine &= => if (false) mine &=  # bits past the last column
__ldg(from + next++) => __ldg(from + ++next)  # the next weight
[block_sparse/linear_masked.cu, kept]
if (lane == 0) before = 0; =>   # lane 0 adds another lane's bits
(last >> 8 * i & 0xff) => 0  # forgets the last lane's weights
token < p.n && k < p.cols => token < p.n  # what lies behind X meets zeros
[block_sparse/linear_blocks.cu, mma]
kStages - 2>(); => kStages - 1>();  # reads a stage that is under way
chunk ^ (row % 8) => chunk  # copies to other places than are read
at * kTogether + chunk / kSpanChunks => at * kTogether  # the first block of a stage twice
inside && first_token + row + r < p.n => inside  # tokens past the last
w[j / 2][j % 2 * 2 + 1] => w[j / 2][j % 2 * 2]  # eight columns of k twice
kUnit + row + 1] => kUnit + row]  # one bias of up for two rows
sum[kParts - 1][i][j][half => sum[0][i][j][half  # the gate in place of up
round_tf32(word[0]) => word[0]  # truncates X
[ptx/matrices.cuh, mma]
"=r"(word[2]), "=r"(word[3]) => "=r"(word[3]), "=r"(word[2])  # exchanges two matrices
[attention/gat.cuh, gat]
raw > 0.0f ? 1.0f : slope => raw > 0.0f ? slope : 1.0f  # slopes of the other side
entry * p.heads + head => entry + head  # another entry's dropout
? 1.0f : __ldg(p.counts + entry) => ? 1.0f : 1.0f  # forgets parallel edges
[attention/gat_scores.cu, gat]
index % p.heads * p.width => 0  # the first head's vector for all
[attention/gat_softmax.cu, gat]
? 1.0f : __expf(highest - highest_now) => ? 1.0f : 1.0f  # does not rescale the sums
empty ? 0.0f : 1.0f / sum.total => 1.0f / sum.total  # empty rows become NaN
[attention/spmm_gat.cu, gat]
kMasked && u >= left => kMasked && u > left  # adds an entry of nobody
lane - step >= start => lane - step >= 0  # adds the heads before
side.column == max(begin, slab) => side.column == begin  # drops parts of a head
gat::multiples(p, number, => gat::multiples(p, entry,  # another entry's dropout in the gradients
[attention/edge_scores.cu, edges]
{head, head * p.width + at, => {head, at,  # the first head's columns for all
vector[v] * gat::leaky(z, slope); => vector[v] * z;  # scores without the bend
return static_cast<float>(p.slope) * dot; => return dot;  # dot products without their scale
shared && step[u].inside ? at : step[u].column => step[u].column  # columns of another edge
[attention/edge_rows.cu, edges]
if (at + u < item.z) add => if (at + u <= item.z) add  # adds the last entry twice
from.weight * gat::derivative(z, slope) => from.weight  # forgets the slope
p.order == nullptr ? entry : => true ? entry :  # another entry's weight in the transpose
p.shared ? side.head * p.width : 0 => false ? side.head * p.width : 0  # columns of another edge
[attention/edge_columns.cu, edges]
+= feature * pull[v] => += pull[v]  # forgets the features of edges
[attention/gat_terms.cu, gat]
bent - plain * terms.w => bent - plain  # forgets the mean slope
[attention/gat_vectors.cu, gat]
sum[1][v] += target[u] * x => sum[1][v] += source[u] * x  # one vector's for the other
[epilogue/column_sums.cuh, gat]
if (first + a < gridDim.x) total => if (first + a > 0) total  # drops a block's sums
[epilogue/column_sums.cuh, columns]
arrivals[blockIdx.y] = 0 => arrivals[blockIdx.y] = 1  # leaves a counter behind
[epilogue/epilogue_gradient.cu, columns]
<= 0.0f => < 0.0f  # passes what ReLU cut at 0
at + u * step >= p.rows => at + u * step > p.rows  # adds a row of nobody
row * p.c_stride => row * p.grad_stride  # one matrix's rows for the other's
[mma/bmat.cuh, voltrix]
before += __popc(word[i]); => before += 0;  # forgets the words before
[ptx/ptx.cuh, voltrix]
%%lanemask_lt => %%lanemask_le  # value of the next entry
[windows/bmat_windows.cuh, voltrix]
bits.value += bit_count(words(tile - 1, s)); => ;  # packed values of the redo
[windows/redo_bmat.cu, voltrix]
if (!(pieces >> j & 1)) continue; =>  # adds to C what is stored already
[windows/spmm_bmat.cu, voltrix]
value / kEach * kEach => value  # values that begin between 16 bytes
columns * kSize + 15) / 16 => columns * kSize) / 16  # last columns are not copied
++at < 4 => ++at < 5  # an item that was done before
[pipeline/ring.cuh, bcsr]
parity ^= 1 => parity ^= 0  # parity stays in the second round
turn.parity ^ 1 => turn.parity  # the producer waits for the wrong parity
[pipeline/ring.cuh, wcsr]
empty(full + kStages) => empty(full + kStages - 1)  # barriers overlap
[mma/wgmma.cuh, bcsr]
swizzle = kRowBytes == 128 ? 1 : 2 => swizzle = kRowBytes == 128 ? 1 : 3  # FP8's swizzle
[ptx/transpose.cuh, wcsr]
sent = upper ? word[i] : => sent = upper ? word[i | step] :  # sends what it keeps
[mma/wgmma_regs.cuh, wcsr]
"m64n128k16.f32.f16.f16", ", 1" => "m64n128k16.f32.f16.f16", ", 0"  # major side of B
[block_sparse/bcsr.cuh, bcsr]
kWarpStoreBytes = 2 * => kWarpStoreBytes = 1 *  # warps' stores overlap
[block_sparse/block_steps.cuh, bcsr]
(chunk ^ (r % 8)) * 16 => (chunk ^ (r % 4)) * 16  # swizzle of a copy by threads
[block_sparse/block_stores.cuh, bcsr]
*p.spoilt = 1 => *p.spoilt = 0  # does not say that C is to be repaired
[rows/finish_dense.cu, dense]
begin = first * groups, step => begin = blockIdx.x * groups, step  # other rows than its own
spoilt &= spoilt - 1; => spoilt = 0;  # one element of a warp
at < end; at += 32 => at + 1 < end; at += 32  # a row's last entry
[rows/repair_strided.cu, bcsr]
if (*p.flag == 0) return => if (*p.flag != 0) return  # repairs what is right
[block_sparse/spmm_bcsr.cu, bcsr]
i > 0 || !kElided, sum => i > 1 || !kElided, sum  # the second product overwrites the first
last + gridDim.x / kCluster => last + gridDim.x  # misses items of a cluster
ring.full, i % 2 => ring.full, 0  # parity of a copy that is waited for at once
sum[j] += part[j] => sum[j] = part[j]  # FP8 keeps the last two blocks
[pack/tf32_operand.cu, bcsr]
if (i < inside) => if (i + 1 < inside)  # last column of an odd width
__syncthreads(); => __syncwarp();  # reads what other warps have not written
[windows/wcsr.cuh, wcsr]
before += __popc(left) + __popc(right) => before += 0  # values of the redo's lower rows
[windows/redo_wcsr.cu, wcsr]
unit % kUnits * kUnitCols => 0  # the first columns of a slab for all
[windows/redo_windows.cu, wcsr]
special |= 1u << i; => ;  # leaves out tiles with what is not finite
s_decoded[now ^ 1] => s_decoded[now]  # overwrites what the team multiplies
[windows/redo.cuh, wcsr]
if (threadIdx.x < kFlags) flags[unit * kFlags + threadIdx.x] = 0; =>  # flags stay
[windows/spmm_wcsr.cu, wcsr]
n = l % 4 * 2 + l / 4 => n = l % 4 + l / 4 * 4  # which column is which n
[windows/join_wcsr.cu, wcsr]
int other = 1; other < kParts => int other = 2; other < kParts  # leaves a run out
[pack/pack_cells.cu, cells]
if (is_head(p, i)) p.tile => if (!is_head(p, i)) p.tile  # column ids are not written
/ slots * p.group => / slots  # windows of an odd number of tiles
row % 8 * 4 + column % 4 => row % 8 * 4 + column % 2  # lane of a cell
p.repeat ? column : -1 => p.repeat ? -1 : column  # slots without a column
(u64(1) << cell % 64) - 1 => (u64(2) << cell % 64) - 1  # place of a packed value
p.places[entry] = cell => p.places[i] = cell  # cells in the order of windows
[pack/merge_rows.cu, merging]
mixed(2 * lane + 2) => mixed(2 * lane + 1)  # terms of the hash functions
if (shared || end > limit) => if (end > limit)  # rows that began in an earlier range
lane < own && best != 0 => lane + 1 < own && best != 0  # preferences of a block's last group
u64(common << 16 | => u64(common << 8 |  # ties decide before similarity
known >= 0 ? known : agreed => known > 0 ? known : agreed  # the partner of group 0
max(a, b)) & 0xffff) => max(a, b)) & 0xfff)  # which of equally similar groups is preferred
>> (p.key_bits + 32 - kKeyBits) => >> (p.key_bits + 31 - kKeyBits)  # second values in keys
[pack/pack_groups.cu, groups]
if (same) window = kNoWindow; => window = kNoWindow;  # windows that share a warp
rank += __popc(mask & below(row)) => rank += __popc(mask)  # order inside a column
fresh && later < end => later < end  # a column that an earlier row has again
cell.number >= full * p.fixed => cell.number > full * p.fixed  # entries of no slice
[pack/group_entries.cu, grouped]
p.entries > p.edges && key == other => p.entries > p.edges && key > other  # given self-loops
lane >= step => lane > step  # running sums of a warp
counts[tile] = before + up_to - mine => counts[tile] = up_to - mine  # tiles of other rounds
bit >= width => bit + 1 >= width  # last bit of a digit
earlier + __popc(below) => __popc(below)  # entries of earlier steps
pass.shift += width => pass.shift += width + 1  # later digits
end - begin > job.segment => end - begin > 2 * job.segment  # rows that are cut
(begin + half - 1) / half => (begin + 2 * half - 1) / (2 * half)  # pieces of neighbouring rows
job.order[place] = number => job.order[place] = i  # order of several passes
1.0f / column : 0.0f => 1.0f : 0.0f  # gradient of a mean
[pack/normalise.cu, normalised values]
mine.begin + kAlone, mine.end} => mine.begin, mine.end}  # entries of a long row
first += kUnroll * kThreads => first += 2 * kUnroll * kThreads  # batches of a long row
degree == Acc(0) ? Acc(0) :  =>  # rows without weight
scale == Acc(0) ? Acc(0) : found => found  # gradient without weight
[pack/check_rows.cu, intake]
column >= p.column_count) p => column > p.column_count) p  # a column past the last
begin > end || => begin >= end ||  # rows without entries
i == 0 || column > number_at => i == 0 || column >= number_at  # an entry twice
at) != i) p.facts => at) == i) p.facts  # first entries of rows
[pack/list_rows.cu, row lists]
unit.length > p.limits[each] => unit.length >= p.limits[each]  # units over a length
number < kMaxima ? max( => number <= kMaxima ? max(  # total of a block
other < warp) below => other <= warp) below  # units of warps before
unit.length && other < threadIdx => unit.length && other > threadIdx  # order of equal lengths
[pack/pack_bundles.cu, bundles]
fresh && other < place => fresh && other <= place  # columns met in the row itself
kListStep - 1) / kListStep * kListStep => kListStep) / kListStep * kListStep  # whole batches
bits & ((1u << member) - 1) => bits & ((2u << member) - 1)  # who writes an element
[pack/search.cuh, cells]
starts[middle] <= entry => starts[middle] < entry  # row of its first entry
[pack/row_windows.cuh, bundles]
entries) >= least => entries) > least  # shares just enough
"""


def _read(text: str) -> Iterator[Mutation]:
    file = suite = ""
    for line in text.strip().splitlines():
        if line.startswith("["):
            file, suite = line.strip("[]").split(", ")
        else:
            change, breaks = line.split("  # ")
            before, after = change.split(" =>")
            yield Mutation(file, before, after.strip(), breaks, suite)


MUTATIONS = tuple(_read(_LIST))
