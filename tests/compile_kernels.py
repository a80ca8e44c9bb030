"""Compiles every Triton kernel for a GPU, without using one, and prints the assembler's output as JSON.

    python -m tests.compile_kernels 90    # compute capability 9.0

tests/test_kernels.py runs this as a script, because Triton decides at import time whether it compiles or interprets.
"""

import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from lightning_sparse import exchange, framing
from lightning_sparse.contrib.kernels import codes, levels, row_numbers, row_table, signs, ternary
from lightning_sparse.kernels import (
    block_stats,
    changes,
    checks,
    chunks,
    gradient_table,
    launch,
    pack,
    payout,
    quantize,
    select_kernels,
    threshold,
    two_bits,
    uniform,
    write_back,
)

SCAN = {
    "u": "*fp32",
    "typed": "*fp32",
    "table": "*i64",
    "scale": "fp32",
    "maxima": "*i32",
    "partial": "*fp32",
    "many": "i32",
    "numel": "i32",
}
SELECT = {
    "bits": "*i32",
    "indices": "*i64",
    "numel": "i32",
    "count": "i32",
    "counts": "*i32",
    "k": "i32",
    "limits": "*i32",
    "tallies": "*i32",
    "out": "*i64",
    "tops": "*i32",
    "bound": "*i32",
    "kept": "*i32",
    "places": "*i16",
    "numbers": "*i32",
    "blocks": "*i64",
    "tiles": "i32",
    "size": "i32",
}
OF_KEPT = {**SELECT, "indices": "*i32"}
SEARCH = {"tops": "*i32", "partial": "*fp32", "least": "*i32", "limits": "*i32", "count": "i32", "tiles": "i32"}
SEARCH |= {"numel": "i32", "double": "i64", "fewest": "i32", "most": "i32"}
ENTRIES = {"x": "*fp32", "indices": "*i64", "values": "*fp32", "scale": "fp32", "count": "i32", "numel": "i32"}
MANY = {
    "table": "*i64",
    "typed": "*bf16",
    "indices": "*i64",
    "values": "*bf16",
    "step_ok": "*i1",
    "count": "i32",
    "numel": "i32",
    "many": "i32",
}
TABLES = dict.fromkeys(("outs", "weights", "stepped", "grads", "deltas", "references", "table"), "*i64")
UPDATES = {
    **TABLES,
    **dict.fromkeys(
        (
            "typed",
            "typed_after",
            "factors",
            "rests",
            "coefficients",
            "u",
            "residual",
            "delta_dtype",
            "reference_dtype",
        ),
        "*fp32",
    ),
}
UPDATES |= {"partial": "*fp32", "maxima": "*i32", "scale": "fp32"} | dict.fromkeys(("many", "numel", "count"), "i32")
WORDS = {"words": "*i32", "within": "*i64", "of_block": "*i64", "sums": "*i64", "count": "i32", "block": "i32"}
WORDS |= {"tiles": "i32", "words_each": "i32", "sums_each": "i32"}
WORDS |= {"heads": "*i64", "fingerprint": "i64", "status": "*i64", "start": "i64"}
MESSAGES = dict.fromkeys(("messages", "sums", "senders", "worst", "out"), "*i64")
MESSAGES |= {"sent": "i64", "fine": "*i1", "rows": "i32", "each": "i32", "parts": "i32"}
BROKEN = {"u": "*fp32", "indices": "*i64", "worst": "*i64", "out": "*i64", "own": "i64", "count": "i32", "numel": "i32"}
CHUNKS = {"bits": "*i32", "indices": "*i64", "numel": "i32", "k": "i32", "k_last": "i32"}
BLOCKS = {
    "u": "*fp32",
    "update": "*fp32",
    "table": "*i64",
    "scales": "*i16",
    "codes": "*u8",
    "rows": "i32",
    "many": "i32",
}
CODES = {"codes": "*i16", "packed": "*u8", "count": "i32", "groups": "i32"}
OF_64 = {"STEPS": 4, "BLOCK": 64, "HALF": 32, "ROWS": quantize.TILE // 64}
ROWS = {"u": "*fp32", "partial": "*fp64", "out": "*fp32", "clip": "fp32", "table": "*i64", "codes": "*i16"}
ROWS |= dict.fromkeys(("upper", "lower", "own", "scales", "norms", "update"), "*fp32")
ROWS |= dict.fromkeys(("packed", "votes", "used", "won"), "*u8")
ROWS |= dict.fromkeys(("pieces", "rows", "many", "numel", "begin", "size", "turn"), "i32")
ROWS |= dict.fromkeys(("votes_each", "used_each", "width", "key", "step", "levels", "bucket"), "i32")
SIGNS = {"STEPS": 4, "TILE": signs.TILE}
TERNARY = {"STEPS": 4, "TILE": ternary.TILE}
TWO_BITS = {**dict.fromkeys(("values", "table", "update", "out"), "*fp32"), "packed": "*u8", "total": "i32"}
TWO_BITS |= dict.fromkeys(("groups", "each", "table_each", "packed_each"), "i32")
GATHER = {"u": "*fp32", "indices": "*i64", "values": "*fp32", "count": "i32", "numel": "i32"}
PACK = {
    "indices": "*i64",
    "words": "*i32",
    "lower": "*u8",
    "values": "*fp32",
    "count": "*i32",
    "out": "*fp32",
    **dict.fromkeys(("total", "each", "words_each", "lower_each", "count_each", "out_each", "numel"), "i32"),
}
UNPACK = {
    "upper": "*u8",
    "lower": "*i16",
    "counts": "*i32",
    "count": "*i32",
    "out": "*i64",
    "nbytes": "i32",
    "tiles": "i32",
    "capacity": "i32",
    "numel": "i32",
    "upper_each": "i32",
    "lower_each": "i32",
    "count_each": "i32",
}
TILES = {"MAXIMA": True, "MOMENTS": True, "BLOCK": 64, "TILE": block_stats.TILE, "STEPS": 4, "LOAD": False, "PART": 256}
LOOK = {"KEPT": False, "GATHER": True, "BLOCK": 64, "TILE": select_kernels.TILE, "PART": select_kernels.TILE}
KEEP = {**LOOK, "PART": select_kernels.PART}
COUNT = {**LOOK, "LIMITED": False}
WRITE = {**LOOK, "ADDED_UP": False, "TOPS": False, "END": False, "PAD": False}
KEPT = {"KEPT": True, "GATHER": False, "PART": select_kernels.PART}
WEIGH = {"HEADER": False, "LOAD": False, "TILE": checks.TILE}
EIGHT_WARPS = {
    *("_add_with_stats", "_add_with_payout", "_histogram", "_count", "_write", "_keep", "_chunktopk"),
    *("_pack", "_unpack", "_changes", "_sums"),
}
# Name to kernel, types of its arguments, and constants.
KERNELS = {
    "add fp32": (block_stats._add_with_stats, SCAN, {**TILES, "ADD": True, "MOMENTS": False}),
    "add bf16": (block_stats._add_with_stats, {**SCAN, "typed": "*bf16"}, {**TILES, "ADD": True}),
    "add fp16": (
        block_stats._add_with_stats,
        {**SCAN, "typed": "*fp16", "scale": "*fp32"},
        {**TILES, "ADD": True, "BLOCK": 16, "LOAD": True},
    ),
    "read": (block_stats._add_with_stats, SCAN, {**TILES, "ADD": False}),
    **{
        f"changes{' rescaled' * rescale}": (
            changes._changes,
            UPDATES,
            {"RESCALE": rescale, "STEPS": 4, "TILE": gradient_table.TILE, "PART": 256},
        )
        for rescale in (False, True)
    },
    "payout": (payout._add_with_payout, UPDATES, {**TILES, "REFERENCE": True, "RESCALED": True, "MOMENTS": False}),
    "payout of bf16": (
        payout._add_with_payout,
        {**UPDATES, "reference_dtype": "*bf16"},
        {**TILES, "REFERENCE": True, "RESCALED": False, "BLOCK": 16},
    ),
    "clear": (
        write_back._clear,
        {**UPDATES, "indices": "*i64", "typed": "*bf16"},
        {"TILE": write_back.TILE, "STEPS": 4},
    ),
    "first digit": (select_kernels._histogram, SELECT, {**COUNT, "DIGIT": 0}),
    "last digit": (select_kernels._histogram, SELECT, {**COUNT, "DIGIT": 3}),
    "digit of maxima": (select_kernels._histogram, SELECT, {**COUNT, "DIGIT": 1, "GATHER": False}),
    "digit of kept": (select_kernels._histogram, OF_KEPT, {**COUNT, **KEPT, "DIGIT": 1, "LIMITED": True}),
    "keep": (select_kernels._keep, SELECT, KEEP),
    "keep at 1 %": (select_kernels._keep, SELECT, {**KEEP, "BLOCK": 16}),
    "keep single elements": (select_kernels._keep, SELECT, {**KEEP, "BLOCK": 1}),
    "count": (select_kernels._count, SELECT, COUNT),
    "count of kept": (select_kernels._count, OF_KEPT, {**COUNT, **KEPT}),
    "write": (select_kernels._write, SELECT, {**WRITE, "GATHER": False, "TOPS": True, "END": True}),
    "write of kept": (select_kernels._write, OF_KEPT, {**WRITE, **KEPT, "PAD": True}),
    "write of many": (select_kernels._write, SELECT, {**WRITE, "GATHER": False, "ADDED_UP": True}),
    "write of kept at 0.5 %": (select_kernels._write, OF_KEPT, {**WRITE, **KEPT, "BLOCK": 32}),
    **{
        f"search from {double}": (
            threshold._search,
            {**SEARCH, "double": double},
            {"ROUNDS": threshold.ROUNDS, "TILE": threshold.AT_A_TIME},
        )
        for double in ("i64", "i32")  # the bits of 0.0
    },
    "weigh": (checks._weigh, WORDS, WEIGH),
    "seal": (checks._weigh, WORDS, {**WEIGH, "HEADER": True}),
    "seal with a pin": (
        checks._weigh,
        {**WORDS, "fingerprint": "*i64"},
        {**WEIGH, "HEADER": True, "LOAD": True},
    ),
    "worst_status": (
        checks._worst_status,
        MESSAGES,
        {
            "INTACT": framing.INTACT,
            "CORRUPT": exchange.CORRUPT,
            "LATE": exchange.OUT_OF_STEP,
            "OK": exchange.OK,
            "LOAD": False,
            "ROWS": checks.ROWS,
            "TILE": checks.PARTS,
        },
    ),
    "note": (checks._note_broken, BROKEN, {"OK": exchange.OK, "TILE": checks.TILE, "ALL": False, "PLACE": True}),
    "note everywhere": (
        checks._note_broken,
        {**BROKEN, "u": "*bf16", "indices": "*bf16", "own": "u32"},  # as which Triton takes rank 0's status
        {"OK": exchange.OK, "TILE": checks.TILE, "ALL": True, "PLACE": False},
    ),
    "chunks": (chunks._chunktopk, CHUNKS, {"CHUNK": chunks.CHUNK}),
    "quantize to 4 bits": (quantize._quantize, BLOCKS, {**OF_64, "BITS": 4}),
    "quantize to 8 bits": (quantize._quantize, BLOCKS, {**OF_64, "BITS": 8}),
    "dequantize 4 bits": (quantize._dequantize, BLOCKS, {**OF_64, "BITS": 4}),
    **{
        f"pack codes of {bits} bits": (codes._pack_codes, CODES, {"BITS": bits, "TILE": codes.TILE})
        for bits in (1, 5, 15)
    },
    **{
        f"unpack codes of {bits} bits": (codes._unpack_codes, CODES, {"BITS": bits, "TILE": codes.TILE})
        for bits in (1, 5, 15)
    },
    "dequantize 8 bits": (quantize._dequantize, BLOCKS, {**OF_64, "BITS": 8}),
    **{
        f"{kind} of pieces of {piece}": (
            row_numbers._of_pieces,
            ROWS,
            {"KIND": kind, "SUMS": sums, "STEPS": 4, "PIECE": piece, "PIECES": row_numbers.TILE // piece},
        )
        for kind, sums in row_numbers.SUMS.items()
        for piece in ([64, row_table.LONGEST] if kind == "means" else [row_table.LONGEST])
    },
    **{
        f"{kind} of rows, {wide} at a time": (
            row_numbers._of_rows,
            {**ROWS, "out": "*u8"} if kind == "used" else ROWS,
            {"KIND": kind, "SUMS": sums, "STEPS": 4, "PIECE": row_table.LONGEST}
            | {"ROWS": row_numbers.AT_A_TIME // wide, "WIDE": wide},
        )
        for kind, sums in row_numbers.SUMS.items()
        for wide in ([1, row_numbers.AT_A_TIME] if kind == "means" else [1])
    },
    "write signs": (signs._write_signs, ROWS, SIGNS),
    "read signs": (signs._read_signs, ROWS, SIGNS),
    "votes": (signs._count_votes, ROWS, SIGNS),
    "round to levels": (
        levels._round_to_levels,
        ROWS,
        {"FIRST": uniform.FACTORS[0], "SECOND": uniform.FACTORS[1], "TILE": levels.TILE},
    ),
    "level values": (levels._level_values, {**ROWS, "codes": "*u8"}, {"TILE": levels.TILE}),
    "round to ternary": (ternary._round, ROWS, {**TERNARY, "FIRST": uniform.FACTORS[0], "SECOND": uniform.FACTORS[1]}),
    "ternary values": (ternary._values, ROWS, TERNARY),
    "add entries": (write_back._add_entries, ENTRIES, {"TILE": write_back.TILE}),
    "gather": (pack._gather, GATHER, {"TILE": pack.TILE}),
    "pack": (pack._pack, PACK, {"TILE": pack.TILE, "WIDTH": 8, "COUNTS": True, "VALUES": True}),
    "pack without lower bits": (
        pack._pack,
        {**PACK, "lower": "*i32"},
        {"TILE": pack.TILE, "WIDTH": 0, "COUNTS": False, "VALUES": False},
    ),
    "pack 16 lower bits": (
        pack._pack,
        {**PACK, "lower": "*i16"},
        {"TILE": pack.TILE, "WIDTH": 16, "COUNTS": True, "VALUES": False},
    ),
    "two bits": (two_bits._round, TWO_BITS, {"MANY": two_bits.GROUPS}),
    "two-bit values": (two_bits._values, TWO_BITS, {"MANY": two_bits.GROUPS}),
    "count bits": (pack._count_bits, UNPACK, {"TILE": pack.BYTES}),
    "unpack": (pack._unpack, {**UNPACK, "lower": "*u8"}, {"TILE": pack.BYTES, "WIDTH": 8, "ADDED_UP": False}),
    "unpack 16 lower bits": (pack._unpack, UNPACK, {"TILE": pack.BYTES, "WIDTH": 16, "ADDED_UP": False}),
    "unpack without lower bits": (
        pack._unpack,
        {**UNPACK, "lower": "*u8", "counts": "*i64"},
        {"TILE": pack.BYTES, "WIDTH": 0, "ADDED_UP": True},
    ),
    "add to many fp32": (
        write_back._add_to_many,
        {**MANY, "typed": "*fp32", "values": "*fp32"},
        {"TILE": write_back.TILE, "STEPS": 4, "WHEN": False},
    ),
    **{
        f"zero {dtype}": (
            write_back._zero_all,
            {**MANY, "typed": f"*{dtype}"},
            {"TILE": gradient_table.TILE, "PART": 256, "STEPS": 4},
        )
        for dtype in ("fp32", "bf16")
    },
    "write to many fp32": (
        write_back._write_to_many,
        {**MANY, "out": "*fp32"},
        {"TILE": gradient_table.TILE, "PART": 256, "STEPS": 4, "WHEN": False},
    ),
    "write to many": (
        write_back._write_to_many,
        {**MANY, "out": "*bf16"},
        {"TILE": gradient_table.TILE, "PART": 256, "STEPS": 4, "WHEN": True},
    ),
    "add to many": (write_back._add_to_many, MANY, {"TILE": write_back.TILE, "STEPS": 4, "WHEN": True}),
}


def compiled(stand_in, types, constants, capability):
    """Return registers, spilled bytes, and how many loads and stores of global memory there are, and wide ones."""
    function = stand_in.load()  # KERNELS holds the stand-ins, made before any is loaded
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    # As at launch: torch's memory is aligned, and the numbers that matter are multiples of 16.
    aligned = set(names) - set(constants) - set(stand_in.plain)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, signature, constants, attributes)
    eight = stand_in.function.__name__ in EIGHT_WARPS
    warps = 16 if names[0] == "tops" or constants.get("BLOCK") == 1 else 8 if eight else 4
    kernel = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={**launch.OPTIONS, "num_warps": warps}
    )
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        chip = re.search(r"\.target (\w+)", ptx)[1]
        # Triton brings several, and chooses by the GPU; before 3.6 it brought one.
        ptxas = get_ptxas(capability) if inspect.signature(get_ptxas).parameters else get_ptxas()
        command = [ptxas.path, "-v", f"--gpu-name={chip}", "-o", f"{folder}/kernel.cubin", str(file)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return {
        "function": stand_in.function.__name__,
        "warps": warps,
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        "wide loads": len(re.findall(r"ld\.global\S*\.v[24]\.b(?:32|64)", ptx)),
        "loads": len(re.findall(r"ld\.global", ptx)),
        "wide stores": len(re.findall(r"st\.global\S*\.v[24]\.b(?:32|64)", ptx)),
        "stores": len(re.findall(r"st\.global", ptx)),
    }


if __name__ == "__main__":
    print(json.dumps({name: compiled(*case, int(sys.argv[1])) for name, case in KERNELS.items()}))
