"""Compiles every Triton kernel for a GPU that need not be there, and prints what the assembler says, as JSON.

    python -m tests.compile_kernels 90    # compute capability 9.0

Run as a script by tests/test_kernels.py, because Triton decides on import whether it compiles or interprets.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.knobs import nvidia

from lightning_sparse.kernels import scan, select

SELECT = {"bits": "*i32", "blocks": "*i64", "numel": "i64", "count": "i32"}
SHAPE = {"GATHER": True, "BLOCK": 64, "TILE": 8192}
SCAN = {
    **{"u": "*fp32", "grad": "*fp32", "scale": "*fp32", "maxima": "*i32", "partial": "*fp32"},
    **{"first": "i32", "start": "i64", "numel": "i64"},
}
WHOLE = {"MAXIMA": True, "BLOCK": 64, "TILE": scan.TILE}
# Name to kernel, types of its arguments in order, and constants.
KERNELS = {
    "add": (scan, "_scan", SCAN, {"ADD": True, "MOMENTS": False, **WHOLE}),
    "add bf16": (scan, "_scan", {**SCAN, "grad": "*bf16"}, {"ADD": True, "MOMENTS": True, **WHOLE}),
    "add fp16": (scan, "_scan", {**SCAN, "grad": "*fp16"}, {"ADD": True, "MOMENTS": True, **WHOLE, "BLOCK": 16}),
    "read": (scan, "_scan", SCAN, {"ADD": False, "MOMENTS": True, **WHOLE}),
}


def compiled(module, name, types, constants, capability):
    """Return registers, spilled bytes and the widths of global loads and stores."""
    function = getattr(module, name)
    function = function.load() if hasattr(function, "load") else function
    signature = {key: "constexpr" if key in constants else types[key] for key in function.arg_names}
    # As at launch: torch's memory is aligned, and numbers that matter are multiples of 16.
    plain = {function.arg_names[parameter.num] for parameter in function.params if parameter.do_not_specialize}
    aligned = [key for key in types if key not in plain]
    attributes = {(function.arg_names.index(key),): [["tt.divisibility", 16]] for key in aligned}
    source = ASTSource(function, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        chip = re.search(r"\.target (\w+)", ptx)[1]
        command = [nvidia.ptxas.path, "-v", f"--gpu-name={chip}", "-o", f"{folder}/kernel.cubin", str(file)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        "wide loads": len(re.findall(r"ld\.global\S*\.v[24]\.b32", ptx)),
        "loads": len(re.findall(r"ld\.global", ptx)),
        "wide stores": len(re.findall(r"st\.global\S*\.v[24]\.b32", ptx)),
        "stores": len(re.findall(r"st\.global", ptx)),
    }


if __name__ == "__main__":
    print(json.dumps({name: compiled(*case, int(sys.argv[1])) for name, case in KERNELS.items()}))
