"""Train the digits with stock DDP and with GaussianK, two processes each, and compare. This is what `make demo` runs.

python examples/demo.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.train import make_strategy, quiet, say, train


def main() -> None:
    """Train twice and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.01, help="fraction that GaussianK sends, default 0.01")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data, default 6")
    parser.add_argument("--log-dir", default="runs/demo", help="folder for the metrics, default runs/demo")
    args = parser.parse_args()
    quiet()
    results = {}
    for name, density in (("ddp", None), ("gaussiank_ddp", args.density)):
        say(f"Training with strategy={name!r}: two processes, {args.epochs} epochs ...")
        # Lightning starts the second process in the first fit by running this script again; both then go through
        # this loop in step.
        results[name] = train(make_strategy(name, density), epochs=args.epochs, log_dir=f"{args.log_dir}/{name}")

    say(f"\n{'strategy':<16}{'accuracy':>10}{'bytes sent per step and worker':>34}{'step time':>12}")
    for name, result in results.items():
        say(
            f"{name:<16}{result['val/accuracy']:>10.2%}{result['step/bytes']:>34,.0f}"
            f"{1e3 * result['step/seconds']:>9.1f} ms"
        )
    saving = results["ddp"]["step/bytes"] / results["gaussiank_ddp"]["step/bytes"]
    say(
        f"\nResNet-20 on 1,437 handwritten digits, validated on 360 others; GaussianK at density {args.density:g} sent "
        f"{saving:.0f} times less.\nBoth processes share this machine, so sending costs next to nothing here: the "
        f"step time shows what\ncompression costs, not what it saves on a network. Metrics of every epoch are in "
        f"{args.log_dir}."
    )


if __name__ == "__main__":
    main()
