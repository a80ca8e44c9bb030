"""Optional features. In the core only `lightning_sparse.methods` imports this folder, and only for `CONTRIB`.

- `methods`: `CONTRIB`, methods for comparison. Each of their compressors and aggregators is one module. Kernels that
  only they use are in `kernels/`.
- `published_gaussiank`: GaussianK with the published search for a threshold.
- `memsgd`: Mem-SGD in one process and on shared memory, with its learning rate schedule and its weight average.
- `weight_averaging`: Lightning's `WeightAveraging` for every version of Lightning.
- `robust`: simulated attacks to test a method with, and election coding.
"""
