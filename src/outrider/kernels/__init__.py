"""Triton kernels of the fast path. Only imported where there is a GPU (or Triton's interpreter)."""
