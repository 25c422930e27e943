"""KV memory: `PagedCache` (blocks, the product) and `SlotCache` (one run per sequence, the plain reference)."""

from __future__ import annotations

from .paged import PagedCache
from .slots import SlotCache

__all__ = ["PagedCache", "SlotCache"]
