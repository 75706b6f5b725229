"""The mutations as data: a fragment of one line, its replacement, what breaks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTATIONS", "SUITES", "Mutation", "Suite"]


@dataclass(frozen=True)
class Suite:
    """GPU tests that run against a mutation.

    Attributes
    ----------
    tests : tuple of str
        Files, those first that fail fastest.
    systems : tuple of str
        Of tests that every system runs, only those of these systems; all when empty.
    leave_out : str
        Regular expression of test ids that are slow and add nothing.
    kernel : str
        The kernel that ``--compile`` tries first.
    constant : str
        Of its configurations only those in which this is true; all when empty.
    """

    tests: tuple[str, ...]
    systems: tuple[str, ...] = ()
    leave_out: str = ""
    kernel: str = ""
    constant: str = ""


@dataclass(frozen=True)
class Mutation:
    """One change of one token.

    Attributes
    ----------
    file : str
        Path from the device tree on.
    before, after : str
        A fragment that the file holds exactly once, and what replaces it.
    breaks : str
        What is wrong then.
    suite : str
        Key of ``SUITES``.
    kernel : str
        The only kernel to compile with ``--compile``; any that includes the file when empty.
    equivalent : str
        Why no test can notice the change; empty for all others.
    """

    file: str
    before: str
    after: str
    breaks: str
    suite: str
    kernel: str = ""
    equivalent: str = ""

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
    "gat": Suite(("tests/nn/test_gpu_gat.py",), (), "autocast|compiled|memory|stored", "spmm_gat"),
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
        _SLOW,
        "spmm_bmat",
    ),
    "gather": Suite(("tests/launch/test_gather.py",), kernel="gather_rows"),
    "columns": Suite(("tests/launch/test_columns.py",), kernel="epilogue_gradient"),
    "cells": Suite(("tests/formats/test_device_cells.py",), kernel="pack_cells"),
    "groups": Suite(("tests/systems/test_brp_windows.py",), kernel="pack_groups"),
    "row lists": Suite(("tests/formats/test_device_rows.py",), kernel="list_rows"),
    "bundles": Suite(("tests/formats/test_device_rows.py",), kernel="pack_bundles"),
    "blocks": Suite(("tests/nn/test_blocks.py",), kernel="spmm_block"),
    "normalised values": Suite(("tests/layers/test_normalise.py",), kernel="normalise"),
    "turned blocks": Suite(
        ("tests/layers/test_edge_rows.py", "tests/nn/test_blocks.py"), kernel="transpose_block"
    ),
}


def _in(file: str, suite: str, *changes: tuple[str, str, str]) -> tuple[Mutation, ...]:
    return tuple(Mutation(file, before, after, breaks, suite) for before, after, breaks in changes)


MUTATIONS: tuple[Mutation, ...] = (
    # -- element types and their conversions
    *_in(
        "ptx/ptx.cuh",
        "csr",
        ("static_cast<u32>(bits) << 16", "static_cast<u32>(bits) << 15", "widens bfloat16 wrongly"),
        ("@q fma.rn.f32 %3, %4, %8, %3;}", "@q fma.rn.f32 %3, %4, %7, %3;}", "takes a neighbour"),
        ("@q add.rn.f32 %3, %7, %3;}", "@q add.rn.f32 %3, %6, %3;}", "takes a neighbour"),
    ),
    *_in(
        "ptx/ptx.cuh",
        "acc",
        ("inside ? 16 : 0", "inside ? 8 : 0", "copies half of 16 bytes"),
        ('"n"(kPending)', '"n"(kPending + 1)', "does not wait for the tile's own copies"),
    ),
    *_in(
        "ptx/ptx.cuh",
        "rsh",
        ("m8n8.x4.trans.shared", "m8n8.x4.shared", "rows of B are not transposed"),
        ("%%laneid", "%%warpid", "all lanes take one place"),
    ),
    *_in(
        "ptx/element.cuh",
        "csr",
        ("word & 0xffff0000u", "word & 0xff000000u", "cuts the upper bfloat16 of a word"),
        ("packed.pair[v / 2]", "packed.pair[0]", "takes the first pair for all"),
        ("widen(part[r / kPart], r % kPart)", "widen(part[r / kPart], 0)", "one weight a bundle"),
    ),
    # -- sums and extrema of CUDA cores
    *_in(
        "rows/accumulator.cuh",
        "csr",
        ("held += other;", "held = other;", "drops what a group had"),
        ("? -ptx::infinity<Acc>()", "? ptx::infinity<Acc>()", "begins a maximum at infinity"),
        ("candidate > sum[0][q][v]", "candidate < sum[0][q][v]", "names the wrong winner"),
    ),
    *_in(
        "rows/row_items.cuh",
        "csr",
        (
            "tags[m] & (1u << (kColumnBits + r))",
            "tags[m] & (1u << kColumnBits)",
            "one row's bit for a whole bundle",
        ),
        ("if (begin + lane < length)", "if (begin + lane + 1 < length)", "misses the last entry"),
        ("if (most == M - 1)", "if (most == M)", "off by one at the end of a row"),
        ("if (most <= kLess)", "if (most < M)", "drops the last entry of a small product's row"),
        ("int step = kFrom; step < kTo", "int step = 2 * kFrom; step < kTo", "half of the groups"),
        ("m < chunk.left", "m <= chunk.left", "adds an entry of nobody"),
    ),
    *_in(
        "rows/row_items.cuh",
        "half",
        ("== 0.0f ? Acc(0) : value * scale", "== 0.0f ? Acc(0) : value", "a bundle's power of two"),
        ("is_wide(value, scale) ? Acc(0) : value * scale", "value * scale", "adds wide rows twice"),
        ("size >= 1.17549435e-38f", "size >= 0.0f", "rounds weights that are subnormal"),
        ("value != Acc(0) && !normal", "false && !normal", "keeps weights that are infinite"),
        ("% (kPart * sizeof(float)) == 0", "% sizeof(float) == 0", "loads what is not aligned"),
        ("x[v / kPart].element", "x[0].element", "first part of a wide row"),
        ("first + __ffs(wide) - 1", "first + __ffs(wide)", "adds the entry after a wide one"),
        ("if (load_scale(p, k) != 0.0f) continue", "if (true) continue", "drops wide rows of B"),
    ),
    *_in(
        "rows/spmm_half.cu", "half", ("using V = F32", "using V = F16", "reads values as float16")
    ),
    *_in(
        "pack/half_rows.cu",
        "half",
        ("kBias - kTop + e", "kBias - kTop - e", "takes another power back than it gave"),
        ("scaled < kSmallest", "scaled < 0.0f", "keeps elements that float16 cannot hold"),
        ("e > kMost", "e > 4 * kMost", "lets values times scales leave float32"),
        ("wide ? u16(0) :", "false ? u16(0) :", "keeps Inf and NaN in the copy"),
    ),
    *_in(
        "pack/gather_rows.cu",
        "gather",
        ("first + lane < p.count ?", "first + lane + 1 < p.count ?", "takes row 0 for the last"),
        ("from + j * kGroups);", "from + j);", "takes a neighbour's row"),
        ("&& at < p.count", "&& at <= p.count", "writes a row too many"),
    ),
    *_in(
        "rows/spmm_csr.cu",
        "csr",
        ("blockIdx.x - block * p.slabs", "blockIdx.x - block", "wrong slab where slabs are fast"),
    ),
    *_in(
        "rows/spmm_csr.cu",
        "bcsr",
        ("__ldcg(p.args) == 0", "__ldcg(p.args) != 0", "never repairs C"),
    ),
    *_in(
        "rows/row_items.cuh",
        "narrow",
        ("at + (kUnroll - 1) * step < item.z", "at < item.z", "adds entries of the next row"),
        ("(work.first + lane) / kColumnLanes", "lane / kColumnLanes", "groups add the same"),
        ("join_lanes<1, kColumnLanes, kLanes>", "join_lanes<1, 2 * kColumnLanes, kLanes>", "half"),
        ("lane % kColumnLanes * kVec", "lane / kParts * kVec", "lanes add each other's columns"),
    ),
    *_in(
        "rows/sampled_items.cuh",
        "csr",
        ("mine = odd ? dot[2 * i + 1]", "mine = odd ? dot[2 * i]", "keeps the wrong sum"),
        ("lane / kUnroll == j / kUnroll", "lane / kUnroll == j", "loses all but one batch"),
        ("p.g + blockIdx.z * p.g_batch", "p.g + blockIdx.z * p.b_batch", "wrong stride of batches"),
    ),
    *_in(
        "rows/sddmm_csr.cu",
        "csr",
        ("threadIdx.x % kLanes", "threadIdx.x % 32", "takes another group's columns"),
    ),
    # -- CSR arrays as they are
    *_in(
        "rows/direct.cuh",
        "direct",
        ("V::narrow(typename V::Acc(1))", "V::narrow(typename V::Acc(0))", "a pattern of zeros"),
        ("column == static_cast<int>(column) ?", "true ?", "cuts a column of 64 bits"),
        ("entries.y > entries.x ? scale / Acc", "false ? scale / Acc", "a mean that is a sum"),
        ("if (here) report", "if (false) report", "is silent about a wrong column"),
        ("  column = 0;", "  column = p.cols;", "reads a row that B does not have"),
    ),
    *_in(
        "rows/direct_items.cuh",
        "direct",
        ("(length + p.segment - 1) / p.segment", "length / p.segment", "too few pieces"),
        ("pieces > 1 ? slot + i : -1", "-1", "pieces overwrite each other"),
        ("if (row >= p.rows || is_long)", "if (row >= p.rows)", "adds up long rows twice"),
        ("= node + i / kFanIn", "= node", "one parent for all"),
        ("slot + count + g, 0)", "slot + count, 0)", "the wrong place above"),
        ("p.counts[i] = 0", "p.counts[i] = 1", "leaves counters behind for the next launch"),
        ("if (end < begin) report", "if (false) report", "is silent about row pointers"),
    ),
    *_in(
        "rows/spmm_direct.cu",
        "direct",
        ("slab = blockIdx.y", "slab = 0", "the first slab again"),
    ),
    *_in(
        "rows/sddmm_direct.cu",
        "direct",
        ("threadIdx.x % kLanes", "threadIdx.x % 32", "takes another group's columns"),
    ),
    # -- items, trees, windows
    *_in(
        "rows/segment.cuh",
        "csr",
        ("block >= block_end[s]", "block > block_end[s]", "off by one between sections"),
        ("arrived != children - 1", "arrived != children", "nobody completes a node"),
        ("*counter = 0", "*counter = 1", "leaves a counter behind for the next launch"),
    ),
    *_in(
        "rows/tree.cuh",
        "csr",
        ("place(info.x + number)", "place(info.x)", "adds the first child only"),
    ),
    *_in(
        "rows/tree.cuh",
        "acc",
        ("place(slot) + w * kLanes", "place(slot) + w", "words overlap"),
    ),
    *_in(
        "windows/windows.cuh",
        "acc",
        (
            "left > 0 ? __ldg(offsets + window + 1)",
            "left > 0 ? __ldg(offsets + window)",
            "ends early",
        ),
        ("redo(window - __ffs(rest))", "redo(window - __ffs(rest) + 1)", "repairs a neighbour"),
    ),
    # -- what happens to a row of C after its sum
    *_in(
        "epilogue/epilogue.cuh",
        "csr",
        ("__ldg(p.indptr + row + 1)", "__ldg(p.indptr + row)", "no mean"),
        ("Out::widen(c[v * step])", "Out::widen(c[0])", "C's first"),
        ("Out::narrow(sum[v + e])", "Out::narrow(sum[v])", "stores one sum for a vector"),
    ),
    *_in(
        "epilogue/epilogue.cuh",
        "acc",
        ("p.c + blockIdx.z * p.c_batch_stride", "p.c + 0 * p.c_batch_stride", "one batch for all"),
        ("p.bias + column + v", "p.bias + column", "one bias for a vector"),
    ),
    *_in(
        "epilogue/epilogue.cuh",
        "bcsr",
        (
            "sum[v] += terms.bias",
            "sum[v] -= terms.bias",
            "sign of a bias",
        ),
    ),
    *_in(
        "epilogue/epilogue.cuh",
        "wcsr",
        ("if (position >= p.rows)", "if (position > p.rows)", "writes a row past C"),
        ("sum[v] < Acc(0) ? Acc(0)", "sum[v] > Acc(0) ? Acc(0)", "clips the wrong side"),
    ),
    # -- the exact redo
    *_in(
        "mma/exact.cuh",
        "acc",
        ("return all != 0.0f", "return all == 1.0f", "never sees that sums are not finite"),
        ("u32(low) | u32(high) << 1", "u32(low)", "upper halves of words count as finite"),
    ),
    *_in(
        "windows/exact_tiles.cuh",
        "acc",
        ("if (entry &&", "if (", "zeros of a tile meet what is not finite"),
        ("own << 2 * (lane & 3)", "own << (lane & 3)", "goes through other columns"),
        ("all.word[s][1] : all.word[s][0]", "all.word[s][0] : all.word[s][1]", "another weight"),
    ),
    *_in(
        "mma/exact.cuh",
        "wcsr",
        ("return all != 0.0f", "return all > 0.0f", "NaN is not greater than 0"),
    ),
    *_in(
        "windows/exact_strips.cuh",
        "wcsr",
        (
            "if (entry && !(",
            "if (!(",
            "zeros of a tile meet what is not finite",
        ),
        ("u32(bad[1] != 0) << (t + 4)", "u32(bad[1] != 0) << t", "goes through other columns"),
    ),
    *_in(
        "windows/exact_strips.cuh",
        "voltrix",
        ("k < 4 ? of[half] : of[2 + half]", "of[half]", "weights of other columns"),
        ("chunk_at(t + 4 * place), id", "chunk_at(t), id", "other columns of B"),
        ("if (i > 0 && first + i >= end) break;", "", "the last tile of a window several times"),
        ("a[0] | a[2] << 16, a[1]", "a[0] | a[3] << 16, a[1]", "weights of other rows, 16 bits"),
    ),
    # -- bitmap tiles and their products with mma.sync
    *_in(
        "mma/bittcf.cuh",
        "acc",
        ("(g & 3) * 8 + t * 2", "(g & 3) * 8 + t", "shift of the two bits"),
        ("read(below + (pair & 1))", "read(below + 1)", "value after one that is not there"),
        ("first | second << 16", "first | second << 15", "shift of the second weight"),
        ("values += begin & 1", "values += 0", "values that begin in the middle of a word"),
        ("before += upper + __popc(both.y)", "before += upper", "counts half of a tile's values"),
        ("(end + kEach - 1) / kEach", "end / kEach", "last value of an odd number"),
    ),
    *_in(
        "mma/mma.cuh",
        "acc",
        ("0x5410", "0x5432", "takes the upper half of a row of B"),
        (
            "round_tf32(row[1].word[2 * q]), ",
            "round_tf32(row[1].word[2 * q + 1]), ",
            "column",
        ),
        ("kOne = 0x3f800000u", "kOne = 0x3f000000u", "a pattern's entries are halves"),
    ),
    *_in(
        "mma/mma.cuh",
        "rsh",
        ("m16n8k16.row.col.f32.bf16.bf16.f32", "m16n8k16.row.col.f32.f16.f16.f32", "another type"),
        ("mma_tf32(a, round_tf32(b0)", "mma_tf32(a, round_tf32(b1)", "upper rows of B twice"),
    ),
    *_in(
        "mma/mma.cuh",
        "bcsr",
        ("cvt.rn.tf32.f32", "cvt.rz.tf32.f32", "truncates instead of rounding"),
    ),
    *_in(
        "pipeline/copy_ring.cuh",
        "acc",
        ("(stage, 2 * t + r, column)", "(stage, 2 * t, column)", "reads one row of B twice"),
        ("ids + h * kLoadRows + lane", "ids + lane", "copies the upper rows twice"),
        ("j * kSide * 16", "j * 16", "segments of a row overlap"),
    ),
    *_in(
        "windows/spmm_bittcf.cu",
        "acc",
        ("(column & 1) * 2 + row", "row * 2 + (column & 1)", "rows for columns in the sums"),
        ("load_row(me, b + id.y *", "load_row(me, b + id.x *", "one row of B twice, odd widths"),
        ("if (item.w >= 0)", "if (item.w > 0)", "the first piece is not joined"),
        (
            "sum[v] = tally.at(j, stack, r, v)",
            "sum[v] = tally.at(j, stack, 0, v)",
            "stores another row",
        ),
        ("if (!all_finite(tally)) {", "if (false) {", "pieces of windows are not made exact"),
        (
            "begin += Store::read(stage +",
            "begin = Store::read(stage +",
            "forgets where values begin",
        ),
    ),
    # -- windows as MMA operands, and residual rows in the same launch
    *_in(
        "windows/fragment_items.cuh",
        "rsh",
        (
            "(at.lane & 15) * kRowStride",
            "(at.lane & 7) * kRowStride",
            "first eight rows of B twice",
        ),
        ("j * 128 + 4 * kRowStride", "j * 128 + 3 * kRowStride", "rows of B that float32 adds"),
        ("other < kThreads / 32", "other < kThreads / 32 - 1", "forgets the last warp's part"),
        ("(warp + 1) * steps / kWarps", "(warp + 1) * (steps / kWarps)", "steps that nobody does"),
        ("place[w * 32] = mine.word[w]", "place[0] = mine.word[w]", "one word of a part alone"),
        ("high << (at.t + 4)", "high << at.t", "columns that the redo goes through, float32"),
        ("high << (2 * at.t + 8)", "high << 2 * at.t", "the same, 16 bits"),
        (
            "if (!all_finite(tally)) exact_sums(p, slab, part.y",
            "if (false) exact_sums(p, slab, part.y",
            "parts of windows are not made exact",
        ),
        ("* p.window_slabs + slab", "* p.window_slabs", "slabs share their partial sums"),
        ("i * kStep / kSize < left", "i * kStep < left", "leaves columns out"),
        ("if (item.w >= 0)", "if (item.w > 0)", "the first piece is not joined"),
    ),
    *_in(
        "windows/window_sums.cuh",
        "rsh",
        ("2 * half + v / (kCount / 2)", "2 * half", "one column of C twice"),
        (
            "four.pair[w] = odd ? theirs : first",
            "four.pair[w] = first",
            "one pair of columns twice",
        ),
        ("8 * at.t + 4 * e + j % 4", "8 * at.t + 4 * e", "bias of other columns, float32"),
        ("8 * j + 2 * at.t + e", "8 * j + 2 * at.t", "one bias for two columns, 16 bits"),
    ),
    *_in(
        "mma/stored_fragments.cuh",
        "rsh",
        ("kHalf ? k % 8 / 2 : k % 4", "kHalf ? 0 : k % 4", "weights of the redo, 16 bits"),
        ("k / (kHalf ? 8 : 4) * 2", "0", "the redo's weights of a step's second half"),
        ("i64(tile + k / 8) * 2", "i64(tile) * 2", "bits of a step's first tile alone"),
        ("(8 * (r % 8) + k % 8)", "(8 * (k % 8) + r % 8)", "rows for columns in the redo"),
        ("(kBytes / kDepth)", "kBytes", "fragments of other tiles, 16 bits"),
    ),
    *_in(
        "mma/step.cuh",
        "brp",
        ("kDepth = kHalf ? 2 : 1", "kDepth = kHalf ? 4 : 1", "steps of twice the tiles, 16 bits"),
    ),
    *_in(
        "windows/hybrid.cuh",
        "rsh",
        ("blockIdx.y << p.slab_shift", "blockIdx.y", "columns of another group"),
        ("number - row_block * p.row_slabs", "number - row_block", "slabs that rows do not have"),
        ("p.shared_item_count + item, slab", "item, slab", "shared windows again, no others"),
    ),
    *_in("windows/spmm_rstile.cu", "rsh", ("hybrid_block(p);", ";", "computes nothing")),
    *_in(
        "mma/fixed_slots.cuh",
        "brp",
        ("ids[s] >> 3 != r", "(ids[s] & 7) != r", "columns for rows"),
        ("i64(tile) * (8 * kFixed)", "i64(tile) * 8", "slots of other tiles"),
        ("i / 2 * 8 + 2 * t + 1", "i / 2 * 8 + 2 * t", "one column twice, 16 bits"),
        ("i / 2 * 4 + t", "t", "a tile's first four columns twice, float32"),
        ("low | high << 16", "low", "every other column alone"),
        ("bits = Mma<E>::kOne", "bits = 0", "a pattern has no entries"),
    ),
    *_in(
        "windows/window_rest.cuh",
        "brp",
        ("at.g + i % 4 / 2 * 8", "at.g", "upper rows twice"),
        ("+ (group + 1) * count", "+ (group + 1) * (count - 1)", "leaves an entry out"),
        ("to[q * kRestStep + side", "to[side", "one vector of a lane alone"),
        ("if (offset < at.left)", "if (offset <= at.left)", "reads past B"),
        ("if (its_row < 0) continue;", "continue;", "forgets rows that groups of lanes share"),
        ("i64(end - tile) * count / tiles", "count", "entries outside tiles in every part"),
    ),
    *_in("windows/spmm_brp.cu", "brp", ("kRest = true", "kRest = false", "entries outside groups")),
    *_in(
        "windows/window_adds.cuh",
        "brp atomics",
        ("8 * half + at.g", "at.g", "upper rows twice"),
        ("[2 * half + v]", "[2 * half]", "one column of C twice, 16 bits"),
        ("j / 8 * 4 + v]", "j / 8 * 4]", "one column of C four times, float32"),
        ("column_of(at, j / 8 * 4, j % 8 / 4)", "column_of(at, j / 8 * 4, 0)", "columns of C"),
        ("scale_sums(terms, sum);", ";", "forgets alpha and the mean"),
        ("if (offset < at.left)", "if (true)", "adds past the last column"),
        ("if (row < 0) continue;", ";", "adds to rows that are not there"),
    ),
    *_in(
        "windows/fragment_items.cuh",
        "brp atomics",
        ("if (!all_finite(tally)) {", "if (false) {", "pieces are not made exact"),
        (
            "add_rest(p, slab, item.x, item.y, item.z",
            "add_rest(p, slab, item.x, item.y, item.y",
            "entries outside groups of pieces",
        ),
        (
            "for (int tile = item.y; tile < item.z;",
            "for (int tile = item.y; tile + kDepth < item.z;",
            "a piece's last step",
        ),
    ),
    *_in(
        "ptx/ptx.cuh",
        "brp atomics",
        (
            '"l"(address), "f"(sum[0]), "f"(sum[1])',
            '"l"(address), "f"(sum[0]), "f"(sum[0])',
            "one of two numbers that are added, 16 bits",
        ),
    ),
    # -- few tokens of a layer
    *_in(
        "block_sparse/linear_few.cu",
        "few",
        ("16 * strip + 8 * lower", "16 * strip", "rows g twice"),
        (
            "upper.z, lower.z, upper.w, lower.w",
            "upper.z, lower.z, upper.w, lower.z",
            "one row twice",
        ),
        ("int w = 1; w < kGroup", "int w = 1; w < kGroup - 1", "forgets the last warp's sums"),
        ("warp / kGroup * p.pair_block_rows", "0", "the gate in place of up"),
        (
            "if (token >= p.n || row < 0) continue;",
            "if (row < 0) continue;",
            "tokens past the last",
        ),
    ),
    # -- graph attention
    *_in(
        "attention/gat.cuh",
        "gat",
        ("raw > 0.0f ? raw :", "raw < 0.0f ? raw :", "bends the scores above 0"),
        ("raw > 0.0f ? 1.0f : slope", "raw > 0.0f ? slope : 1.0f", "slopes of the other side"),
        ("entry * p.heads + head", "entry + head", "another entry's dropout"),
        ("? 1.0f : __ldg(p.counts + entry)", "? 1.0f : 1.0f", "forgets parallel edges"),
    ),
    *_in(
        "attention/gat_scores.cu",
        "gat",
        ("index % p.heads * p.width", "0", "the first head's vector for all"),
        ("int step = 1; step < kLanes", "int step = 2; step < kLanes", "half of the lanes"),
    ),
    *_in(
        "attention/gat_softmax.cu",
        "gat",
        ("total += other.total, bent", "bent", "drops what another lane had"),
        ("? 1.0f : __expf(highest - highest_now)", "? 1.0f : 1.0f", "does not rescale the sums"),
        ("step >= kLanes && !work.wide", "step >= kLanes", "one group of a warp's"),
        ("work.first / kLanes * step", "0", "all groups of a warp take the same entries"),
        ("term * gat::derivative(raw[u], slope)", "term", "no mean slope"),
        ("empty ? 0.0f : 1.0f / sum.total", "1.0f / sum.total", "empty rows become NaN"),
    ),
    *_in(
        "attention/spmm_gat.cu",
        "gat",
        ("kMasked && u >= left", "kMasked && u > left", "adds an entry of nobody"),
        ("weight * bend * x", "weight * x", "forgets the slopes in the kept sum"),
        ("work.first / kLanes * kUnroll", "0", "all groups of a warp take the same entries"),
        ("bend * (weight * dot -", "bend * (weight * dot +", "adds D"),
        ("column == head * p.width", "column >= 0", "takes D's part once a vector"),
        ("int step = 1; step < kLanes", "int step = 2; step < kLanes", "half of the lanes"),
        ("lane - step >= start", "lane - step >= 0", "adds the heads before"),
        ("end > r * kStep) total", "end > r * kSlab) total", "half of a head in two vectors"),
        ("d_source * first[v] +", "d_source * first[v] -", "subtracts what targets bring"),
        ("side.column == max(begin, slab)", "side.column == begin", "drops parts of a head"),
        ("int step = kLanes; step < 32", "int step = 2 * kLanes; step < 32", "half of the groups"),
        ("sum[v] += __ldg(p.bias", "sum[v] -= __ldg(p.bias", "subtracts the bias"),
        ("__ldg(p.order + entry)", "entry", "another entry's dropout in the gradients"),
    ),
    *_in(
        "attention/gat_terms.cu",
        "gat",
        ("bent - plain * terms.w", "bent - plain", "forgets the mean slope"),
        ("terms.z, plain}", "terms.z, bent}", "another D"),
    ),
    *_in(
        "attention/gat_vectors.cu",
        "gat",
        ("sum[1][v] += target[u] * x", "sum[1][v] += source[u] * x", "one vector's for the other"),
        ("at + u * step >= p.nodes", "at + u * step > p.nodes", "adds a node of nobody"),
    ),
    *_in(
        "epilogue/column_sums.cuh",
        "gat",
        ("int w = 1; w < kWarps", "int w = 2; w < kWarps", "drops a warp's sums"),
        ("if (first + a < gridDim.x) total", "if (first + a > 0) total", "drops a block's sums"),
        ("int step = kLanes; step < 32", "int step = 2 * kLanes; step < 32", "half of the nodes"),
    ),
    *_in(
        "epilogue/column_sums.cuh",
        "columns",
        ("arrivals[blockIdx.y] = 0", "arrivals[blockIdx.y] = 1", "leaves a counter behind"),
    ),
    *_in(
        "epilogue/epilogue_gradient.cu",
        "columns",
        ("<= 0.0f", "< 0.0f", "passes what ReLU cut at 0"),
        ("at + u * step >= p.rows", "at + u * step > p.rows", "adds a row of nobody"),
        ("row * p.c_stride", "row * p.grad_stride", "one matrix's rows for the other's"),
    ),
    # -- BMat tiles fed by bulk copies
    *_in(
        "mma/bmat.cuh",
        "voltrix",
        ("word[i] >> lane & 1", "word[i] >> (lane ^ 1) & 1", "bits of the neighbouring lane"),
        ("before += __popc(word[i]);", "before += 0;", "forgets the words before"),
        (
            "first.of[1] | first.of[3] << 16",
            "first.of[1] | first.of[2] << 16",
            "one row's weight in another, 16 bits",
        ),
    ),
    *_in(
        "ptx/ptx.cuh",
        "voltrix",
        ("%%lanemask_lt", "%%lanemask_le", "value of the next entry"),
    ),
    *_in(
        "windows/bmat_windows.cuh",
        "voltrix",
        (") * 2 + tile % 2;", ") * 2;", "whole tiles' weights of the redo, 16 bits"),
        ("bits.value += bit_count(words(tile - 1, s));", ";", "packed values of the redo"),
        ("(side * 4 + t) * kSpan", "(side + 2 * t) * kSpan", "columns of other lanes"),
        ("sums[j][half * 2 + side]", "sums[j][half * 2]", "one column of C twice"),
    ),
    *_in(
        "windows/redo_bmat.cu",
        "voltrix",
        ("if (!(pieces >> j & 1)) continue;", "", "adds to C what is stored already"),
        ("first + j * kPieceCols", "first", "the second piece where the first belongs"),
    ),
    *_in(
        "windows/spmm_bmat.cu",
        "voltrix",
        ("me + lane % kProducerRows", "lane % kProducerRows", "rows of one producer alone"),
        ("first_lane = step * kProducerRows", "first_lane = 0", "rows of a batch's first step"),
        ("(i * kStack + s) * 32", "i * kStack * 32", "weights of a window's upper part"),
        ("value / kEach * kEach", "value", "values that begin between 16 bytes"),
        ("value % (16 / kSize)", "0", "values of the entries before"),
        ("row(0), high = row(4)", "row(0), high = row(3)", "rows of B that float32 adds"),
        ("second[1].word) = row(12)", "second[1].word) = row(8)", "rows of B that 16 bits add"),
        ("me.g % 2 * 4 + me.g / 2", "me.g", "columns of other lanes"),
        ("warp + j * kConsumers", "warp * kPieces", "one piece twice"),
        ("* p.slab_pieces + piece;", "* p.slab_pieces;", "pieces share their partial sums"),
        ("item.slot >= 0 &&", "item.slot > 0 &&", "the first piece is not joined"),
        ("columns * kSize + 15) / 16", "columns * kSize) / 16", "last columns are not copied"),
        ("++at < 4", "++at < 5", "an item that was done before"),
    ),
    # -- rings, barriers, warpgroup products
    *_in(
        "pipeline/ring.cuh",
        "bcsr",
        ("parity ^= 1", "parity ^= 0", "parity stays in the second round"),
        ("turn.parity ^ 1", "turn.parity", "the producer waits for the wrong parity"),
    ),
    *_in(
        "pipeline/ring.cuh",
        "wcsr",
        ("empty(full + kStages)", "empty(full + kStages - 1)", "barriers overlap"),
    ),
    *_in(
        "mma/wgmma.cuh",
        "bcsr",
        ("u64(leading >> 4) << 16", "u64(leading >> 5) << 16", "second 64 columns of B"),
        ("u64(stride >> 4) << 32", "u64(stride >> 5) << 32", "next eight rows of an operand"),
        (
            "swizzle = kRowBytes == 128 ? 1 : 2",
            "swizzle = kRowBytes == 128 ? 1 : 3",
            "FP8's swizzle",
        ),
        ("cvt.rn.f16x2.f32 %0, %1, %2", "cvt.rn.f16x2.f32 %0, %2, %1", "swaps two columns of C"),
        (".x4.trans.shared.b16", ".x4.shared.b16", "stores a transposed C untransposed"),
    ),
    *_in(
        "ptx/transpose.cuh",
        "wcsr",
        ("sent = upper ? word[i] :", "sent = upper ? word[i | step] :", "sends what it keeps"),
    ),
    *_in(
        "mma/wgmma_regs.cuh",
        "wcsr",
        ("u64(along_k >> 4) << 16", "u64(along_n >> 4) << 16", "stride along k"),
        ('"m64n128k16.f32.f16.f16", ", 1"', '"m64n128k16.f32.f16.f16", ", 0"', "major side of B"),
        ('" A1 ", " A2 "', '" A2 ", " A1 "', "swaps two words of A"),
    ),
    # -- blocks of 64 x 64
    *_in(
        "block_sparse/bcsr.cuh",
        "bcsr",
        ("kWarpStoreBytes = 2 *", "kWarpStoreBytes = 1 *", "warps' stores overlap"),
    ),
    *_in(
        "block_sparse/block_steps.cuh",
        "bcsr",
        ("(chunk ^ (r % 8)) * 16", "(chunk ^ (r % 4)) * 16", "swizzle of a copy by threads"),
        ("pair >> (16 * e)", "pair >> (8 * e)", "second element of a pair"),
    ),
    *_in(
        "block_sparse/block_stores.cuh",
        "bcsr",
        ("((lane / 16) ^ (lane % 8))", "((lane / 16) ^ (lane % 4))", "swizzle of a store"),
        ("(chunk ^ (lane % 8))", "(chunk ^ (lane % 4))", "swizzle of a transposed store"),
        (
            "p.c_stride + row, sum[i / 2 * 4 + half * 2",
            "p.c_stride + row, sum[i / 2 * 4 + half",
            "sums of a transposed float32",
        ),
        (
            "scale[i / 2 % 2], row_bias[",
            "scale[i / 2 % 2], -row_bias[",
            "sign of a row's bias",
        ),
        ("sum[i / 2 * 4 + i % 2] += bias", "sum[i / 2 * 4] += bias", "a column's bias twice"),
        ("sum[i] < 0.0f ? 0.0f", "sum[i] > 0.0f ? 0.0f", "clips the wrong side"),
        ("*p.spoilt = 1", "*p.spoilt = 0", "does not say that C is to be repaired"),
        (
            "first_column + (group * 4 + q) * 8",
            "first_column + (group * 4 + q) * 16",
            "column of C",
        ),
    ),
    *_in(
        "rows/repair_strided.cu",
        "bcsr",
        ("p.b + column * p.b_column_stride", "p.b + column", "another column of B"),
        ("__ldg(p.values + at)", "__ldg(p.values)", "the first weight for all"),
        ("if (*p.flag == 0) return", "if (*p.flag != 0) return", "repairs what is right"),
    ),
    *_in(
        "block_sparse/spmm_bcsr.cu",
        "bcsr",
        (
            "wg::descriptor<kRowBytes>(stage + k * 32",
            "wg::descriptor<kRowBytes>(stage + k * 16",
            "k of A",
        ),
        ("b + k * 2048, kBoxBytes", "b + k * 1024, kBoxBytes", "k of B"),
        (
            "i > 0 || !kElided, sum",
            "i > 1 || !kElided, sum",
            "the second product overwrites the first",
        ),
        ("item = next, next = after;", "item = next;", "the producer repeats an item"),
        ("last + gridDim.x / kCluster", "last + gridDim.x", "misses items of a cluster"),
        ("p.queue[0] = 0", "p.queue[0] = 1", "leaves an item out for the next launch"),
        ("ring.full, i % 2", "ring.full, 0", "parity of a copy that is waited for at once"),
        ("sum[j] += part[j]", "sum[j] = part[j]", "FP8 keeps the last two blocks"),
        (
            "cluster_rank() * (kBlock / kCluster)",
            "cluster_rank() * (kBlock / 4)",
            "a cluster's halves",
        ),
    ),
    *_in(
        "pack/tf32_operand.cu",
        "bcsr",
        ("from[kPitch], from[2 * kPitch]", "from[kPitch], from[kPitch]", "one element twice"),
        ("if (i < inside)", "if (i + 1 < inside)", "last column of an odd width"),
        ("__syncthreads();", "__syncwarp();", "reads what other warps have not written"),
    ),
    # -- windows of 64 rows
    *_in(
        "windows/wcsr.cuh",
        "wcsr",
        ("column % 2 * 4 + column / 2", "column % 4 * 2 + column / 4", "place of a column id"),
        ("* kWarps + warp;", "* kWarps;", "strips share their partial sums"),
        ("mine[8 + e], mine[12 + e]", "mine[12 + e], mine[8 + e]", "swaps two columns of C"),
        ("at % 2 == 0 ? first", "at % 2 == 1 ? first", "swaps neighbours of 16 bits"),
        (
            "before += __popc(left) + __popc(right)",
            "before += 0",
            "values of the redo's lower rows",
        ),
    ),
    *_in(
        "windows/redo_wcsr.cu",
        "wcsr",
        ("unit % kUnits * kUnitCols", "0", "the first columns of a slab for all"),
    ),
    *_in(
        "windows/redo_windows.cu",
        "wcsr",
        ("tile = first + lane / 8;", "tile = first;", "a step's first rows of B for all tiles"),
        ("heads.next_bits();", ";", "bits of a step once more for the next one"),
        ("special |= 1u << i;", ";", "leaves out tiles with what is not finite"),
        ("first_strip + s, first, groups", "first_strip, first, groups", "another strip's rows"),
        ("s_decoded[now ^ 1]", "s_decoded[now]", "overwrites what the team multiplies"),
    ),
    *_in(
        "windows/redo.cuh",
        "wcsr",
        ("min(tiles % kTeam, warp)", "0", "leaves out tiles that warps do not share evenly"),
        ("sum[2] += other.z", "sum[2] += other.w", "one of four sums of other warps"),
        ("if (threadIdx.x < kFlags) flags[unit * kFlags + threadIdx.x] = 0;", "", "flags stay"),
    ),
    *_in(
        "windows/spmm_wcsr.cu",
        "wcsr",
        ("n = l % 4 * 2 + l / 4", "n = l % 4 + l / 4 * 4", "which column is which n"),
        ("at[16] = column(row[0].z", "at[16] = column(row[0].w", "one element of B"),
        ("(l ^ row % 8) * 16", "(l ^ row % 4) * 16", "swizzle of 16-bit rows"),
        ("offsets[0] & ~(16 / kSize - 1)", "offsets[0]", "alignment of a step's values"),
        (
            "(last - aligned + kEach - 1) / kEach",
            "(last - aligned) / kEach",
            "last values of a step",
        ),
        ("kCols * 16, 128)", "kCols * 16, 256)", "next eight columns of B"),
        ("sum[4 * w + 2], sum[4 * w + 3]", "sum[4 * w + 3], sum[4 * w + 2]", "partial sums"),
    ),
    *_in(
        "windows/join_wcsr.cu",
        "wcsr",
        ("sum[4 * j + 3] += word.w", "sum[4 * j + 3] += word.z", "one of four sums"),
        ("int other = 1; other < kParts", "int other = 2; other < kParts", "leaves a run out"),
        ("group * 4 * 32", "group * 32", "partial sums of other columns"),
    ),
    # -- tiles packed on a GPU
    *_in(
        "pack/pack_cells.cu",
        "cells",
        ("if (is_head(p, i)) p.tile", "if (!is_head(p, i)) p.tile", "column ids are not written"),
        ("/ slots * p.group", "/ slots", "windows of an odd number of tiles"),
        ("row % 8 * 4 + column % 4", "row % 8 * 4 + column % 2", "lane of a cell"),
        ("p.repeat ? column : -1", "p.repeat ? -1 : column", "slots without a column"),
        ("(u64(1) << cell % 64) - 1", "(u64(2) << cell % 64) - 1", "place of a packed value"),
        ("p.places[entry] = cell", "p.places[i] = cell", "cells in the order of windows"),
    ),
    # -- windows of brp counted and packed on a GPU
    *_in(
        "pack/pack_groups.cu",
        "groups",
        ("row < 8 ? 0xffu : 0xff00u", "row < 8 ? 0xffu : 0xffu", "columns of the second half"),
        ("size / 4 << 10", "size / 2 << 10", "slices of four"),
        ("if (same) window = kNoWindow;", "window = kNoWindow;", "windows that share a warp"),
        ("min(kHeight, p.rows - first)", "min(kHeight - 1, p.rows - first)", "the last row"),
        ("rank += met.before;", "rank = met.before;", "entries of other rows"),
        ("rank += __popc(mask & below(row))", "rank += __popc(mask)", "order inside a column"),
        ("fresh && later < end", "later < end", "a column that an earlier row has again"),
        ("i64(kept - 1) * kHeight", "i64(window) * kHeight", "place of a row among those kept"),
        ("i64(window - kept) * kHeight", "i64(window) * kHeight", "place of other rows"),
        ("cell.begin ? p.slice_sums", "cell.rank ? p.slice_sums", "slices of windows before"),
        ("cell.number >= full * p.fixed", "cell.number > full * p.fixed", "entries of no slice"),
        ("slice >= tiles * kTileColumns", "slice > tiles * kTileColumns", "slices of no group"),
        ("cell.number % p.fixed", "cell.number", "slot of an entry in its column"),
        ("cell.row * kTileColumns + slice", "cell.row + slice", "row of a slot"),
        ("p.rest_sums[i] - 1", "p.rest_sums[i]", "place of an entry outside"),
    ),
    # -- sampled graphs
    *_in(
        "rows/spmm_block.cu",
        "blocks",
        ("number >= 0 && ", "", "numbers below zero"),
        ("number < count", "number <= count", "one past the last row"),
        ("p.targets[i - 1] > row", "p.targets[i - 1] > row + 1", "rows that do not ascend"),
        ("row == column", "row == column + 1", "edges from a node to itself"),
        ("low += less * step", "low += (less + 1) * step", "first entry of a row"),
        ("row_of_entry(p, entry) == row", "row_of_entry(p, entry) >= row", "where a row ends"),
        ("first + u < count", "first + u <= count", "entries of the next row"),
        ("Acc(1) / Acc(max(p.divisors[of_b], 1))", "Acc(1)", "gradient of a mean"),
        ("begin + kAlone < p.edges", "begin + kAlone < 0", "entries of a long row"),
        ("mine + share < last", "mine + share <= 0", "shares of a long row"),
        ("p.mean && end > begin", "p.mean && end < begin", "means"),
        ("static_cast<int>(end - begin)", "static_cast<int>(end - begin + 1)", "lengths of rows"),
        ("row < 0 ? 0", "row <= 0 ? 0", "end of the first row"),
    ),
    *_in(
        "pack/transpose_block.cu",
        "turned blocks",
        ("lane >= step", "lane > step", "running sums of a warp"),
        ("sum += of_warp[other]", "sum += of_warp[0]", "sums of warps before"),
        ("set ? votes : ~votes", "set ? votes : kWarp", "lanes with the same digit"),
        ("bit >= bits", "bit + 1 >= bits", "last bit of a digit"),
        ("earlier + __popc(below)", "earlier + __popc(alike)", "places of equal digits"),
        ("*count = earlier + __popc(alike)", "*count = __popc(alike)", "entries of earlier steps"),
        ("before += here", "before += 1", "places of digits"),
        ("16 + digit * width", "16", "second digit"),
        ("known == 0 ? before : nearest", "nearest", "ends of columns without entries"),
        ("before = max(before, last[other])", "before = last[0]", "ends in warps before"),
    ),
    # -- normalisation of a graph's values
    *_in(
        "pack/normalise.cu",
        "normalised values",
        ("lanes / 2", "lanes / 4", "sums of lanes"),
        ("mine.begin + kAlone, mine.end}", "mine.begin, mine.end}", "entries of a long row"),
        ("first += kUnroll * kThreads", "first += 2 * kUnroll * kThreads", "batches of a long row"),
        ("int u = 1; u < kUnroll", "int u = 2; u < kUnroll", "sums in flight"),
        ("sum += s_sums[warp]", "sum += s_sums[0]", "sums of warps"),
        ("row + (other - group) * sets", "row", "scale of a long row"),
        ("source < 0 ?", "source < 1 ?", "weight 0"),
        ("degree == Acc(0) ? Acc(0) : ", "", "rows without weight"),
        ("* weight_of(p, i) * right", "* weight_of(p, i) * left", "scale of the column"),
        ("pull(__ldg(p.order + i))", "pull(i)", "gradient by column"),
        ("Acc(-0.5) * scale", "Acc(0.5) * scale", "gradient of a root"),
        ("+ __ldg(p.pulls + of)", "", "gradient of degrees"),
        ("scale == Acc(0) ? Acc(0) : found", "found", "gradient without weight"),
    ),
    # -- rows counted, listed and bundled on a GPU
    *_in(
        "pack/list_rows.cu",
        "row lists",
        ("unit.length > p.limits[each]", "unit.length >= p.limits[each]", "units over a length"),
        (
            "sum_of_lanes(unit.length, kWindow / 2)",
            "sum_of_lanes(unit.length, 1)",
            "two rows of four",
        ),
        ("number < kMaxima ? max(", "number <= kMaxima ? max(", "total of a block"),
        ("unit.length > p.wide_length", "unit.length >= p.wide_length", "rows with a warp"),
        ("!unit.bundled && unit.length", "unit.length", "bundles shared by a block"),
        ("other < warp) below", "other <= warp) below", "units of warps before"),
        (
            "length == unit.length && other < threadIdx.x",
            "length == unit.length && other > threadIdx.x",
            "order of equal lengths",
        ),
        ("to += p.pieces[1]", "to += p.pieces[0]", "pieces of wide bundles"),
        ("entry < found.z", "entry <= found.z", "columns past an item"),
        ("item += p.sections[section]", "item = p.sections[section]", "first item of a section"),
    ),
    *_in(
        "pack/pack_bundles.cu",
        "bundles",
        ("fresh && other < place", "fresh && other <= place", "columns met in the row itself"),
        ("if (same) window = kNoWindow;", "window = kNoWindow;", "windows that share a warp"),
        ("at == end || p.columns[at]", "at != end && p.columns[at]", "columns past a row's end"),
        (
            "kListStep - 1) / kListStep * kListStep",
            "kListStep) / kListStep * kListStep",
            "whole batches",
        ),
        ("place - i64(bundle) * kWindow", "place - i64(bundle)", "place of a row in no bundle"),
        (
            "last = max(last, p.columns[stop - 1])",
            "last = p.columns[stop - 1]",
            "column of padding",
        ),
        ("bits & ((1u << member) - 1)", "bits & ((2u << member) - 1)", "who writes an element"),
        ("other == member ? i :", "other == member ? i + 1 :", "columns before an entry's own"),
        ("i64(element) * kWindow + member", "i64(element) * kWindow", "row of a value"),
    ),
    *_in(
        "pack/search.cuh",
        "cells",
        ("starts[middle] <= entry", "starts[middle] < entry", "row of its first entry"),
    ),
    *_in(
        "pack/search.cuh",
        "groups",
        ("columns[middle] < column", "columns[middle] <= column", "entries before a column"),
    ),
    *_in(
        "pack/search.cuh",
        "bundles",
        ("low = middle + 1", "low = middle + 2", "a column that is passed over"),
    ),
    *_in(
        "pack/row_windows.cuh",
        "bundles",
        (
            "static_cast<float>(entries) >= least",
            "static_cast<float>(entries) > least",
            "windows that share just enough",
        ),
    ),
)
