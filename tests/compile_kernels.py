"""Compiles every Triton kernel for a GPU that need not be there, and prints what the assembler says, as JSON.

    python -m tests.compile_kernels 90    # compute capability 9.0

Run as a script by tests/test_kernels.py, because Triton decides on import whether it compiles or interprets.
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
from lightning_sparse.kernels import block_stats, checks, chunks, launch, pack, select_triton, threshold, write_back

SCAN = {
    "u": "*fp32",
    "grad": "*fp32",
    "scale": "*fp32",
    "maxima": "*i32",
    "partial": "*fp32",
    "first": "i32",
    "start": "i32",
    "numel": "i32",
}
SELECT = {
    "bits": "*i32",
    "indices": "*i64",
    "numel": "i32",
    "count": "i32",
    "threshold": "*i32",
    "counts": "*i64",
    "out": "*i64",
    "k": "i32",
    "ties_up_to": "i32",
    "tiles": "i32",
    "when": "*i32",
}
BINS = {**SELECT, "counts": "*i32"}
SEARCH = {"tops": "*i32", "first": "*i32", "limit": "*i32", "count": "i32", "fewest": "i32", "most": "i32"}
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
WORDS = {"words": "*i32", "within": "*i64", "of_block": "*i64", "sums": "*i64", "count": "i32", "block": "i32"}
WORDS |= {"tiles": "i32", "words_each": "i32", "sums_each": "i32"}
MESSAGES = dict.fromkeys(("messages", "sums", "sent", "senders", "worst", "out"), "*i64")
MESSAGES |= {"rows": "i32", "each": "i32"}
BROKEN = {"u": "*fp32", "indices": "*i64", "worst": "*i64", "out": "*i64", "own": "i64", "count": "i32", "numel": "i32"}
CHUNKS = {"bits": "*i32", "indices": "*i64", "numel": "i32", "k": "i32", "k_last": "i32"}
GATHER = {"u": "*fp32", "indices": "*i64", "values": "*fp32", "count": "i32", "numel": "i32"}
PACK = {
    "indices": "*i64",
    "words": "*i32",
    "lower": "*u8",
    "count": "i32",
    "each": "i32",
    "words_each": "i32",
    "capacity": "i32",
    "numel": "i32",
}
UNPACK = {
    "upper": "*u8",
    "lower": "*i16",
    "counts": "*i64",
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
TILES = {"MAXIMA": True, "MOMENTS": True, "BLOCK": 64, "TILE": block_stats.TILE}
CHOSEN = {"GATHER": True, "BLOCK": 64, "TILE": select_triton.TILE, "WHEN": False}
COUNTED = {name: value for name, value in CHOSEN.items() if name != "WHEN"}
# Name to kernel, types of its arguments, and constants.
KERNELS = {
    "add fp32": (block_stats._add_with_stats, SCAN, {**TILES, "ADD": True, "MOMENTS": False}),
    "add bf16": (block_stats._add_with_stats, {**SCAN, "grad": "*bf16"}, {**TILES, "ADD": True}),
    "add fp16": (block_stats._add_with_stats, {**SCAN, "grad": "*fp16"}, {**TILES, "ADD": True, "BLOCK": 16}),
    "read": (block_stats._add_with_stats, SCAN, {**TILES, "ADD": False}),
    "first digit": (select_triton._histogram, BINS, {**CHOSEN, "DIGIT": 0}),
    "last digit": (select_triton._histogram, BINS, {**CHOSEN, "DIGIT": 3}),
    "digit of maxima": (select_triton._histogram, BINS, {**CHOSEN, "DIGIT": 1, "GATHER": False}),
    "threshold": (select_triton._threshold, BINS, {}),
    "count": (select_triton._count, BINS, COUNTED),
    "count at 1 %": (select_triton._count, BINS, {**COUNTED, "BLOCK": 16}),
    "write": (select_triton._write, SELECT, CHOSEN),
    "digit if needed": (select_triton._histogram, BINS, {**CHOSEN, "DIGIT": 3, "WHEN": True}),
    "write if needed": (select_triton._write, SELECT, {**CHOSEN, "WHEN": True}),
    "search": (threshold._search, SEARCH, {"ROUNDS": threshold.ROUNDS}),
    "weigh": (checks._add_weighted, WORDS, {"SIGN": -1, "TILE": checks.TILE}),
    "judge": (
        checks._judge,
        MESSAGES,
        {"INTACT": framing.INTACT, "CORRUPT": exchange.CORRUPT, "LATE": exchange.OUT_OF_STEP, "TILE": checks.TILE},
    ),
    "note": (checks._note_broken, BROKEN, {"OK": exchange.OK, "TILE": checks.TILE}),
    "chunks": (chunks._chunktopk, CHUNKS, {"CHUNK": chunks.CHUNK}),
    "add entries": (write_back._add_entries, ENTRIES, {"TILE": write_back.TILE}),
    "gather": (pack._gather, GATHER, {"TILE": pack.TILE}),
    "pack": (pack._pack, PACK, {"TILE": pack.TILE, "WIDTH": 8}),
    "pack without lower bits": (pack._pack, {**PACK, "lower": "*i32"}, {"TILE": pack.TILE, "WIDTH": 0}),
    "pack 16 lower bits": (pack._pack, {**PACK, "lower": "*i16"}, {"TILE": pack.TILE, "WIDTH": 16}),
    "count bits": (pack._count_bits, {**UNPACK, "counts": "*i32"}, {"TILE": pack.BYTES}),
    "unpack": (pack._unpack, {**UNPACK, "lower": "*u8"}, {"TILE": pack.BYTES, "WIDTH": 8}),
    "unpack 16 lower bits": (pack._unpack, UNPACK, {"TILE": pack.BYTES, "WIDTH": 16}),
    "unpack without lower bits": (pack._unpack, {**UNPACK, "lower": "*u8"}, {"TILE": pack.BYTES, "WIDTH": 0}),
    "count of single elements": (select_triton._count, BINS, {**COUNTED, "BLOCK": 1}),
    "write of single elements": (select_triton._write, SELECT, {**CHOSEN, "BLOCK": 1, "WHEN": True}),
    "write at 0.5 %": (select_triton._write, SELECT, {**CHOSEN, "BLOCK": 32}),
    "add to many fp32": (
        write_back._add_to_many,
        {**MANY, "typed": "*fp32", "values": "*fp32"},
        {"TILE": write_back.TILE, "STEPS": 4, "WHEN": False},
    ),
    "add to many": (write_back._add_to_many, MANY, {"TILE": write_back.TILE, "STEPS": 4, "WHEN": True}),
}


def compiled(stand_in, types, constants, capability):
    """Return registers, spilled bytes, and how many loads and stores of global memory there are, and wide ones."""
    function = stand_in.load()  # KERNELS holds the stand-ins, made before any is loaded
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    # As at launch, where torch's memory is aligned and the numbers that matter are multiples of 16.
    aligned = set(names) - set(constants) - set(stand_in.plain)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, signature, constants, attributes)
    wide = {"BLOCK", "CHUNK"} & set(names) or stand_in.function.__name__ == "_unpack"
    warps = 1 if names[0] == "tops" else 8 if wide else 4
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
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        "wide loads": len(re.findall(r"ld\.global\S*\.v[24]\.b(?:32|64)", ptx)),
        "loads": len(re.findall(r"ld\.global", ptx)),
        "wide stores": len(re.findall(r"st\.global\S*\.v[24]\.b(?:32|64)", ptx)),
        "stores": len(re.findall(r"st\.global", ptx)),
    }


if __name__ == "__main__":
    print(json.dumps({name: compiled(*case, int(sys.argv[1])) for name, case in KERNELS.items()}))
