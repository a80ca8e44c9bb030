"""Common code of the benchmarks.

- `table`, `results`: CSV files with library versions and hardware. `plots`: one style for all figures.
- `timing`: quantiles, clocks for CPU and CUDA, load of other programs.
- `shaped_links`, `launch`: hosts behind slow links, one process per rank, and functions for these processes.
- `baselines`, `training`, `workloads`: ways to average gradients, training loops, models and data.
- `tracer`, `trips`: which functions of the package run while a gradient, an update or a checkpoint passes through it.
"""
