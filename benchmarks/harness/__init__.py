"""The parts that the benchmarks share.

- `results`: CSV files, with library versions and hardware. Needs pandas.
- `plots`: one style for all figures. Needs matplotlib.
- `timing`: quantiles, clocks for CPU and CUDA, the load of other programs.
- `shaped_links`, `launch`: hosts behind slow links, and a process for each rank on them.
- `ranks`: what the processes of `launch` do together.
- `baselines`: ways to average gradients, ours and others, as wrappers of a model.
- `workloads`, `shapes`: models and data.
"""
