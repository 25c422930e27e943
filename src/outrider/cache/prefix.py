"""Which blocks hold which tokens: an index of finished KV, so that a prompt's beginning is computed once.

A block is found by a chain of hashes: of its parent's key and its own tokens (as in vLLM's prefix caching, Kwon et al. 2023).
A hash only leads to a candidate; its tokens are compared, and its parent must be the very entry that was matched before it, so
no collision can give a request another's KV. Every group has chains of its own: what one has asked, another cannot find out by
how fast an answer comes. Blocks that nobody owns stay in the order of their last use until room is needed.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ..types import Request


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A finished block: what it holds, for which group, and the entry of the block before it (None for the first)."""

    key: bytes
    block: int
    tokens: tuple[int, ...]
    group: str | None
    parent: Entry | None


class Prefixes:
    """The index of one pool with blocks of `size` tokens. `idle` are blocks in it that nobody owns, least recently used first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.idle: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        self._done: dict[int, tuple[int, Entry | None]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

    def find(self, tokens: Sequence[int], most: int, group: str | None = None) -> tuple[int, ...]:
        """Blocks of the longest beginning of `tokens` that is known to a group, of at most `most` tokens."""
        found: list[int] = []
        parent: Entry | None = None
        for start in range(0, most - self.size + 1, self.size):
            own = tuple(tokens[start : start + self.size])
            entry = self._match(_key(parent, own, group), own, group, parent)
            if entry is None:
                break
            found.append(entry.block)
            parent = entry
        return tuple(found)

    def add(self, request: Request, blocks: Sequence[int], length: int) -> list[int]:
        """Note that a request's `blocks` hold the first `length` of its tokens, as far as they are full. What is known
        already is left as it is. Returns blocks that lost their place in the index to these and that nobody owns."""
        tokens, group = request.tokens, request.group
        done, parent = self._done.get(request.id, (0, None))
        lost: list[int] = []
        for i in range(done, length // self.size):
            own = tuple(tokens[i * self.size : (i + 1) * self.size])
            key = _key(parent, own, group)
            entry = self._match(key, own, group, parent)
            if entry is None:
                entry = Entry(key, blocks[i], own, group, parent)
                lost += self._insert(entry)
            self._done[request.id] = (i + 1, entry)
            parent = entry
        return lost

    def leave(self, owner: int) -> None:
        """Forget how far request `owner` had been noted; its blocks stay known."""
        self._done.pop(owner, None)

    def forget(self, block: int) -> bool:
        """Take a block out of the index. Returns whether it was there for nobody: then it is the caller's to free."""
        entry = self._by_block.pop(block, None)
        if entry is None:
            return False
        if self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]
        idle = block in self.idle
        self.idle.pop(block, None)
        return idle

    def clear(self) -> list[int]:
        """Forget everything. Returns the blocks that nobody owned."""
        self._done.clear()
        return [block for block in list(self._by_block) if self.forget(block)]

    def oldest(self, count: int) -> list[int]:
        """Forget `count` blocks that nobody owns, least recently used first."""
        blocks = [block for block, _ in zip(self.idle, range(count), strict=False)]
        for block in blocks:
            self.forget(block)
        return blocks

    def _match(self, key: bytes, tokens: tuple[int, ...], group: str | None, parent: Entry | None) -> Entry | None:
        entry = self._by_key.get(key)
        if entry is None or entry.parent is not parent:
            return None
        return entry if entry.tokens == tokens and entry.group == group else None

    def _insert(self, entry: Entry) -> list[int]:
        old = self._by_key.get(entry.key)
        lost = [old.block] if old is not None and self.forget(old.block) else []
        if entry.block not in self._by_block:
            self._by_key[entry.key] = self._by_block[entry.block] = entry
        return lost


def _key(parent: Entry | None, tokens: tuple[int, ...], group: str | None) -> bytes:
    root = b"" if group is None else blake2b(group.encode("utf-8", "surrogateescape"), digest_size=16).digest()
    packed = struct.pack(f"<{len(tokens)}q", *tokens)
    return blake2b(packed, key=parent.key if parent else root, digest_size=16).digest()
