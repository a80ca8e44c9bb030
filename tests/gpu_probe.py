"""A first test of a GPU: versions, copy rate, whether Triton compiles, and whether it uses the prepared cache.

python -m tests.gpu_probe
python -m tests.gpu_probe --rehearse   # on a CPU with Triton's interpreter
"""

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import time

REHEARSE = "--rehearse" in sys.argv
if REHEARSE:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402  # Triton decides on import whether it interprets

from benchmarks.harness.rehearsal import rehearsal  # noqa: E402
from lightning_sparse.kernels import launch, pack  # noqa: E402
from tests.triton_cache import hits  # noqa: E402


def kernel(device: str) -> tuple[float, bool]:
    """Launch a kernel for the first time; return the seconds that it took, and whether its result is right."""
    x = torch.arange(4096.0, device=device)
    indices = torch.tensor([4095, 0, 17], device=device)
    os.environ[launch.KERNELS] = "triton"
    began = time.perf_counter()
    values = pack.gather(x, indices)
    torch.cuda.synchronize()
    return time.perf_counter() - began, values.tolist() == [4095.0, 0.0, 17.0]


def copy_rate(device: str, numel: int) -> float:
    """Return bytes read and written per second by a copy."""
    x = torch.ones(numel, device=device)
    y = torch.empty_like(x)
    y.copy_(x)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        y.copy_(x)
    stop.record()
    torch.cuda.synchronize()
    return 10 * 8 * numel / (1e-3 * start.elapsed_time(stop))


def main() -> None:
    """Print what is found; exit with 1 unless the kernel's result is right."""
    device = "cpu" if REHEARSE else "cuda"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    if not REHEARSE:
        print(torch.cuda.get_device_name(), "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        smi = shutil.which("nvidia-smi")
        if smi:
            print(subprocess.run([smi, "-L"], capture_output=True, text=True, check=False).stdout.strip())
    for tool in ("gcc", "compute-sanitizer"):
        print(tool, shutil.which(tool) or "is not installed")
    try:
        import triton
    except ImportError:
        sys.exit("Triton is not installed: kernels are plain torch here.")
    print(f"Triton {triton.__version__}, cache {os.environ.get('TRITON_CACHE_DIR', 'by default')}")
    with rehearsal() if REHEARSE else contextlib.nullcontext():
        print(f"copies move {copy_rate(device, 1 << (18 if REHEARSE else 28)) / 1e12:.2f} TB/s")
        with hits() as found:
            seconds, right = kernel(device)
    print(f"the first kernel took {seconds:.2f} s; found in the cache: {found or 'not asked, as it is interpreted'}")
    if not right:
        sys.exit("the kernel's result is wrong")


if __name__ == "__main__":
    main()
