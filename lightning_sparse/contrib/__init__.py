"""Parts beside the core, for their own users. Nothing else in the package imports them.

- `memsgd`: Mem-SGD in one process and on shared memory, with its learning rate and its average of the weights.
- `weight_averaging`: Lightning's `WeightAveraging` for every version of Lightning.
- `robust`: attacks by some ranks, to try a method with, and election coding.
"""
