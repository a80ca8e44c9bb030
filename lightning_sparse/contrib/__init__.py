"""Optional features. No other module of the package imports them.

- `memsgd`: Mem-SGD in one process and on shared memory, with its learning rate schedule and its weight average.
- `weight_averaging`: Lightning's `WeightAveraging` for every version of Lightning.
- `robust`: simulated attacks to test a method with, and election coding.
"""
