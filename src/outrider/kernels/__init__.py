"""Triton kernels of the fast path. Modules here are imported only where there is a GPU (or Triton's interpreter); what the host
must agree with them on stands in this file."""

BLOCK = 64
"""Tokens per KV block that the kernels are built for, and positions per tile of attention."""
STOPS = 8
"""Stop tokens a lane can hold; a request with more is decoded pass by pass."""
