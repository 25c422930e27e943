"""Triton kernels of the fast path. Modules here are imported only where there is a GPU (or Triton's interpreter); what the host
must agree with them on stands in this file."""

from functools import cache
from importlib.util import find_spec

BLOCK = 64
"""Tokens per KV block that the kernels are built for, and positions per tile of attention."""
STOPS = 8
"""Stop tokens a lane can hold; a request with more is decoded pass by pass."""


@cache
def there(kind: str) -> bool:
    """Whether devices of this type have kernels: CUDA's, where Triton is installed."""
    return kind == "cuda" and find_spec("triton") is not None
