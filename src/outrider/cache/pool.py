"""What both caches share: the tensors, and the way from a request's virtual indices to their slots.

A pool is a row of slots, one token each, cut into blocks of `block_size`. Block 0 is a scratch page: padding rows
write there and nobody reads it. Blocks hold zeros when they are handed out, because one NaN left in a slot that is
masked out still poisons a softmax-weighted sum (0 * NaN = NaN).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..protocols import KVNeed
from ..types import Request

FEW = 4
"""Runs of blocks that are zeroed one by one."""


@dataclass(slots=True)
class Record:
    """Where one request lives. `blocks` in virtual order; `slots [room]` the slot of every virtual index, made of all `numbers`
    when somebody asks; the first `run` of them are consecutive from slot `base`, so a view that stays below `run` needs no
    copy."""

    blocks: tuple[int, ...]
    numbers: Tensor
    size: int
    room: int
    base: int
    run: int
    _slots: Tensor | None = None

    @classmethod
    def of(cls, blocks: tuple[int, ...], numbers: Tensor, size: int, room: int) -> Record:
        """Of so many blocks of `size`, at least one."""
        return cls(blocks, numbers, size, room, blocks[0] * size, min(_runs(blocks)[0][1] * size, room))

    @property
    def slots(self) -> Tensor:
        if self._slots is None:
            pieces = [self.numbers[first * self.size : (first + count) * self.size] for first, count in _runs(self.blocks)]
            self._slots = (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[: self.room]
        return self._slots


class Store:
    """Keys and values of a stack of layers, zero at first. Layers of equal shape share one tensor
    `[layers, 2, slots, heads, dim]`, so that moving and zeroing cost one pass per shape instead of one per layer."""

    def __init__(self, layers: Sequence[tuple[int, int]], slots: int, dtype: torch.dtype, device: torch.device) -> None:
        members: dict[tuple[int, int], list[int]] = {}
        for layer, shape in enumerate(layers):
            members.setdefault(shape, []).append(layer)
        self.groups: list[Tensor] = []
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for (heads, dim), owners in members.items():
            group = torch.zeros(len(owners), 2, slots, heads, dim, dtype=dtype, device=device)
            self.groups.append(group)
            pairs.update((layer, (group[i, 0], group[i, 1])) for i, layer in enumerate(owners))
        self.layers = tuple(pairs[layer] for layer in range(len(layers)))

    def read(self, layer: int, record: Record, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` tokens of a request, `[length, heads, dim]` twice."""
        keys, values = self.layers[layer]
        if length <= record.run:
            return keys.narrow(0, record.base, length), values.narrow(0, record.base, length)
        slots = _part(record, 0, length)
        return keys.index_select(0, slots), values.index_select(0, slots)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put `keys` and `values` `[n, heads, dim]` into `slots [n]`."""
        into_keys, into_values = self.layers[layer]
        into_keys.index_copy_(0, slots, keys)
        into_values.index_copy_(0, slots, values)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source [n]` over slots `target [n]` in all layers, reading everything first."""
        for group in self.groups:
            group.index_copy_(2, target, group.index_select(2, source))

    def zero(self, start: int, end: int) -> None:
        """Zero the slots `start .. end - 1` of all layers."""
        for group in self.groups:
            group[:, :, start:end].zero_()


class Pool:
    """The part of `protocols.Cache` that does not depend on how slots are handed out.

    `layers` gives (KV heads, head dim) per layer. `scratch_slot` is for rows that only pad a pass. Heirs hand out
    blocks by calling `_assign`, which also takes care of what is given back: it is zero when it is handed out again.
    """

    capacity: int
    block_size: int
    scratch_slot: int

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"a KV pool needs at least one block of one token, got {blocks} of {block_size}")
        self.block_size = block_size
        self.scratch_slot = 0
        self.dtype = dtype
        self.device = torch.device(device)
        self._total = (blocks + 1) * block_size
        self._numbers = torch.arange(self._total, device=self.device)
        self._none = Record((), self._numbers, block_size, 0, 0, 0, self._numbers[:0])
        self._records: dict[int, Record] = {}
        self._store = Store(layers, self._total, dtype, self.device)
        self._stores = [self._store]
        self._table: tuple[tuple[int, ...], Tensor] | None = None

    def keys(self, layer: int) -> Tensor:
        """All keys of a layer, `[slots, heads, dim]`, the pool's own memory."""
        return self._store.layers[layer][0]

    def values(self, layer: int) -> Tensor:
        """All values of a layer, `[slots, heads, dim]`, the pool's own memory."""
        return self._store.layers[layer][1]

    def slots(self, request: Request, start: int, end: int) -> Tensor:
        """Slots of the virtual indices `start .. end - 1`, int64 `[end - start]`; not to be written to.

        Raises `IndexError` beyond what is reserved."""
        return _part(self._records.get(request.id, self._none), start, end)

    def view(self, layer: int, request: Request, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` virtual indices, `[length, heads, dim]`: the pool's own memory where
        they lie in one run, else a copy. Raises `IndexError` beyond what is reserved."""
        return self._store.read(layer, self._records.get(request.id, self._none), length)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put `keys` and `values` `[n, heads, dim]` into `slots [n]`. Slots are distinct, scratch slots excepted."""
        self._store.write(layer, slots, keys, values)

    def table(self, requests: Sequence[Request]) -> Tensor:
        """Block ids `[B, blocks of the longest, at least 1]` int64, padded with 0 (scratch): virtual index i of request b
        lies in slot `table[b, i // block_size] * block_size + i % block_size`. Kept until blocks change hands, so not to
        be written to."""
        ids = tuple(request.id for request in requests)
        if self._table is not None and self._table[0] == ids:
            return self._table[1]
        rows = [self._records.get(i, self._none).blocks for i in ids]
        width = max([1, *map(len, rows)])
        cells = [row + (0,) * (width - len(row)) for row in rows]
        table = torch.tensor(cells, dtype=torch.int64).reshape(len(ids), width).to(self.device, non_blocking=True)
        self._table = (ids, table)
        return table

    def blocks(self, request: Request) -> tuple[int, ...]:
        """The request's blocks, in virtual order; the same object until they change."""
        return self._records.get(request.id, self._none).blocks

    def room(self, request: Request) -> int:
        """Virtual indices that the request has memory for."""
        return self._records.get(request.id, self._none).room

    def groups(self) -> list[Tensor]:
        """All memory under the pool's slots, also what is attached: `[layers, 2, slots, heads, dim]` each."""
        return [group for store in self._stores for group in store.groups]

    def move(self, request: Request, source: Tensor, start: int) -> None:
        """Copy the virtual indices `source [n]` (int64, on the device) to `start .. start + n - 1` in every layer, also of
        attached pools, reading everything before writing. An entry that should stay names itself. No host sync."""
        count = source.shape[0]
        if count:
            record = self._records.get(request.id, self._none)
            self.copy(record.slots.index_select(0, source), _part(record, start, start + count))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """`move` for a whole batch, in slots: copy slots `source [n]` over slots `target [n]`. Targets are distinct."""
        for store in self._stores:
            store.copy(source, target)

    def attach(self, need: KVNeed) -> AttachedPool:
        """Memory for a drafter under the same slots: zero at first, moved by `move`, zeroed when slots are. Finished prefixes
        are forgotten: they hold nothing of this drafter's."""
        self.forget()
        store = Store([(need.heads, need.dim)] * need.layers, self._total, self.dtype, self.device)
        self._stores.append(store)
        return AttachedPool(self, store)

    def detach(self, pool: object) -> None:
        """Give back what `attach` gave; nothing happens for anything else. Nobody may use it afterwards."""
        if isinstance(pool, AttachedPool):
            self._stores = [store for store in self._stores if store is not pool._store]

    def reattach(self, pool: object) -> None:
        """What was attached once, and maybe detached, as if attached now."""
        if isinstance(pool, AttachedPool):
            self.forget()
            pool._store.zero(0, self._total)
            self._stores = [*(store for store in self._stores if store is not pool._store), pool._store]

    def scrub(self, request: Request) -> None:
        """Zero all that a request alone holds, and the scratch page, which its pass may have written to: for a request whose
        scores were not finite. Blocks it gave back are zeroed before anybody has them."""
        self._zero((0, *self.blocks(request)))

    # Sharing. A cache that cannot share finds nothing, and so is never asked to adopt anything.

    def find(self, tokens: Sequence[int], most: int, grain: int, group: str | None = None) -> tuple[int, ...]:
        """Blocks of requests of a group that hold the beginning of `tokens`: at most `most` of it, and a multiple of `grain`."""
        return ()

    def head(self, request: Request, length: int) -> tuple[int, ...]:
        """Those of a request's blocks that lie wholly below virtual index `length`, to be shared with another."""
        return ()

    def adopt(self, request: Request, blocks: tuple[int, ...]) -> None:
        """Let a request that owns nothing begin with `blocks`, which it must not write to."""
        if blocks:
            raise ValueError("this cache does not share blocks")

    def publish(self, request: Request, length: int) -> None:
        """Note that the KV of a request's first `length` tokens is final, so that others may begin with its full blocks."""

    def forget(self) -> None:
        """Forget all that was published."""

    def _assign(self, request: Request, blocks: tuple[int, ...], room: int) -> None:
        """Make `blocks` all that `request` owns, `room` tokens of them usable; give back the others."""
        old = self._records.get(request.id, self._none).blocks
        self._table = None
        kept = set(blocks)
        self._drop([block for block in old if block not in kept])
        if not blocks:
            self._records.pop(request.id, None)
            return
        self._records[request.id] = Record.of(blocks, self._numbers, self.block_size, room)

    def _drop(self, blocks: list[int]) -> None:
        """A request gives up `blocks`; nobody else has them."""
        self._zero(sorted(blocks))

    def _zero(self, blocks: Sequence[int]) -> None:
        size, runs = self.block_size, _runs(blocks)
        if len(runs) > FEW:
            at = torch.tensor(blocks).to(self.device, non_blocking=True)
            for group in self.groups():
                group.view(*group.shape[:2], -1, size, *group.shape[3:]).index_fill_(2, at, 0)
            return
        for first, count in runs:
            for store in self._stores:
                store.zero(first * size, (first + count) * size)


class AttachedPool:
    """A drafter's own layers in the target's pool; see `protocols.PoolView`."""

    def __init__(self, pool: Pool, store: Store) -> None:
        self._pool = pool
        self._store = store
        self.block_size = pool.block_size

    def table(self, requests: Sequence[Request]) -> Tensor:
        """As `Pool.table`: the target's."""
        return self._pool.table(requests)

    def keys(self, layer: int) -> Tensor:
        """All keys of a layer, `[slots, heads, dim]`."""
        return self._store.layers[layer][0]

    def values(self, layer: int) -> Tensor:
        """All values of a layer, `[slots, heads, dim]`."""
        return self._store.layers[layer][1]

    def slots(self, request: Request, start: int, end: int) -> Tensor:
        """As `Pool.slots`: the target's."""
        return self._pool.slots(request, start, end)

    def view(self, layer: int, request: Request, length: int) -> tuple[Tensor, Tensor]:
        """As `Pool.view`, of the drafter's layers."""
        return self._store.read(layer, self._pool._records.get(request.id, self._pool._none), length)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `Pool.write`, into the drafter's layers."""
        self._store.write(layer, slots, keys, values)


def _part(record: Record, start: int, end: int) -> Tensor:
    if not 0 <= start <= end <= record.room:
        raise IndexError(f"virtual indices {start} .. {end - 1} of a request with room for {record.room}: reserve first")
    return record.slots.narrow(0, start, end - start)


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive block ids as (first, count)."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and block == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
