"""Kernels that only methods of `contrib` use."""
