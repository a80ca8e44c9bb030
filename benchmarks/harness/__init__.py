"""The parts that the benchmarks share.

- `table`, `results`: CSV files, with library versions and hardware. `plots`: one style for all figures.
- `timing`: quantiles, clocks for CPU and CUDA, the load of other programs.
- `shaped_links`, `launch`: hosts behind slow links, a process for each rank on them, and what ranks do together.
- `baselines`, `training`, `workloads`: ways to average gradients, training loops, models and data.
"""
