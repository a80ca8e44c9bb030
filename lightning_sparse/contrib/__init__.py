"""Parts beside the core. Of the core only `lightning_sparse.methods` imports this folder, and only for `CONTRIB`.

- `methods`: `CONTRIB`, the methods to compare with. Their compressors and aggregators are one module each, and the
  kernels that only they use are in `kernels/`.
- `memsgd`: Mem-SGD in one process and on shared memory, with its learning rate and its average of the weights.
- `weight_averaging`: Lightning's `WeightAveraging` for every version of Lightning.
- `robust`: attacks by some ranks, to try a method with, and election coding.
"""
