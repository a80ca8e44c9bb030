"""The hot loops: each operation has a reference in plain torch, and most have implementations in C or Triton."""
