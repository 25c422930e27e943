"""Counter-based Gumbel noise: a pure function of (request key, position, vocabulary entry).

Philox4x64 with 10 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"); fewer rounds are visibly biased
on consecutive seeds. Key = (request key, purpose), counter = (v // 4 + 1, position, node, round start); entry v takes word
v % 4 of its block. Text noise has purpose, node and round start 0: whoever asks, in any batch and any order, gets the same
value, so a drafter that knows the key adds the noise the target will add. `oracle.gumbel` is the definition.

The classical rules draw from streams instead: purposes DRAFT, ACCEPT and RESIDUAL, position 0, `node` the slot in the round and
`round start` the number of tokens known before it. A stream must not be keyed by position alone: rules that look ahead before
they reject have used a position's randomness already when the next round comes (`oracle.uniform` is the definition).

u = ((word >> 12) + 1/2) / 2**52 is never 0 or 1, so the noise is finite: -3.6 < g < 36.8. Logarithms are taken in fp64 and
rounded to fp32: fp64 logarithms of different libraries differ in the last bit at most, which the rounding hides.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .kernels import there

Words = npt.NDArray[np.uint64]
Singles = npt.NDArray[np.float32]

DRAFT, ACCEPT, RESIDUAL = 1, 2, 3
"""Purposes of the streams of the classical rules; drafters are given the first only."""
_TEXT = 0
_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_GAP = 700
"""Entries between two wanted ones that numpy makes in about the time it takes to move its counter (2 us)."""


def request_key(seed: int, prompt_ids: Sequence[int], sample: int = 0, encoder: bytes = b"") -> int:
    """The 64-bit key of all noise of one request: blake2b over seed, prompt, sample index and encoder input.

    Every part has a fixed size or is preceded by its length, so that no two requests share an encoding. `seed` and
    `sample` are unsigned 64-bit; `encoder` is a digest or the raw bytes of an encoder's input.
    """
    head = struct.pack("<QQQQ", seed, sample, len(prompt_ids), len(encoder))
    body = np.asarray(prompt_ids, dtype="<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(head + body + encoder, digest_size=8).digest(), "little")


def fresh_seed() -> int:
    """64 random bits from the operating system, for a request that names no seed."""
    return secrets.randbits(64)


class NoiseCache:
    """Raw words on the host; keeps the last `rows` whole rows, so that a drafter and the target that ask for the same
    (key, position) in one round pay for it once. Forgetting changes no value. Not for use by two threads at once."""

    def __init__(self, rows: int = 64) -> None:
        self._limit = rows
        self._rows: OrderedDict[tuple[int, int], Words] = OrderedDict()
        self._source = np.random.Philox(key=[0, _TEXT])
        self._state = self._source.state  # set whole before every draw: numpy's generator serves as a pure function

    def row(self, key: int, position: int, vocab: int) -> Words:
        """Words of entries 0..vocab - 1, `[vocab]` uint64; read only."""
        found = self._rows.get((key, position))
        if found is None or len(found) < vocab:
            self._aim(key, position)
            found = self._rows[key, position] = self._draw(0, vocab)
            if len(self._rows) > self._limit:
                self._rows.popitem(last=False)
        self._rows.move_to_end((key, position))
        return found[:vocab]

    def at(self, key: int, position: int, ids: npt.NDArray[np.int64], vocab: int) -> Words:
        """Words of the ascending entries `ids [k]`, all below `vocab`. Stretches without any are skipped where that pays."""
        found = self._rows.get((key, position))
        if found is not None and len(found) >= vocab:
            return found[ids]
        self._aim(key, position)
        words = np.empty(len(ids), dtype=np.uint64)
        ends = [*(np.flatnonzero(np.diff(ids) > _GAP) + 1).tolist(), len(ids)]
        start = 0
        for end in ends:
            part = ids[start:end]
            first = int(part[0]) // 4
            part = part - 4 * first
            words[start:end] = self._draw(first, int(part[-1]) + 1)[part]
            start = end
        return words

    def _aim(self, key: int, position: int) -> None:
        inner = self._state["state"]
        inner["key"][0], inner["counter"][1] = key, position

    def _draw(self, block: int, count: int) -> Words:
        """`count` words from `block` on; numpy increments word 0 of the counter before it makes a block, hence the + 1 above."""
        self._state["state"]["counter"][0] = block
        self._source.state = self._state
        return self._source.random_raw(count)


def to_gumbel(words: Words) -> Singles:
    """-log(-log u) of raw words, in fp64, rounded to fp32; same shape."""
    u = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return (-np.log(-np.log(u))).astype(np.float32)


def gumbel_rows(
    keys: Sequence[int] | Tensor,
    positions: Tensor,
    vocab: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    cache: NoiseCache | None = None,
) -> Tensor:
    """Whole rows of noise, `[S, vocab]` of `dtype` (fp32 values), for S pairs of key and position.

    `keys` are Python ints or a tensor of their 64 bits as int64; `positions [S]` int64. The CPU uses numpy's Philox, other
    devices a kernel or integer tensor operations, without a host sync: the values are equal. `cache` (CPU) saves repeated rows.
    """
    if torch.device(device).type != "cpu":
        made = _fused_rows if there(torch.device(device).type) else tensor_rows
        return made(key_tensor(keys, device), positions.to(device), vocab).to(dtype)
    cache = cache or NoiseCache()
    rows = [cache.row(k, p, vocab) for k, p in zip(key_list(keys), positions.tolist(), strict=True)]
    words = np.stack(rows) if rows else np.empty((0, vocab), dtype=np.uint64)
    return torch.from_numpy(to_gumbel(words)).to(dtype)


def gumbel_at(
    keys: Sequence[int] | Tensor,
    positions: Tensor,
    ids: Tensor,
    dtype: torch.dtype = torch.float32,
    cache: NoiseCache | None = None,
) -> Tensor:
    """The noise of chosen entries only: `ids [S, k]` int64 -> `[S, k]` of `dtype` on the device of `ids`, equal to
    gathering from `gumbel_rows`."""
    if ids.device.type != "cpu":
        return tensor_at(key_tensor(keys, ids.device), positions.to(ids.device), ids).to(dtype)
    cache = cache or NoiseCache()
    words = np.empty(tuple(ids.shape), dtype=np.uint64)
    for i, (k, p) in enumerate(zip(key_list(keys), positions.tolist(), strict=True)):
        wanted, back = np.unique(ids[i].numpy(), return_inverse=True)
        words[i] = cache.at(k, p, wanted, int(wanted[-1]) + 1)[back] if len(wanted) else 0
    return torch.from_numpy(to_gumbel(words)).to(dtype)


def key_tensor(keys: Sequence[int] | Tensor, device: torch.device | str) -> Tensor:
    """Unsigned 64-bit keys as the same bits in int64, `[S]` on `device`."""
    if isinstance(keys, Tensor):
        return keys.to(device)
    return torch.tensor([signed(k) for k in keys], dtype=torch.int64).to(device, non_blocking=True)


def key_list(keys: Sequence[int] | Tensor) -> list[int]:
    """Keys as unsigned Python ints."""
    return [k & (2**64 - 1) for k in (keys.tolist() if isinstance(keys, Tensor) else keys)]


def _fused_rows(keys: Tensor, positions: Tensor, vocab: int) -> Tensor:
    from .kernels.noise import rows

    return rows(keys, positions, vocab)


def tensor_rows(keys: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """fp32 noise by int64 tensor operations, on any device: `keys [S]`, `positions [S]` -> `[S, vocab]`."""
    blocks = torch.arange(1, (vocab + 3) // 4 + 1, device=keys.device).expand(len(keys), -1)
    words = tensor_philox(keys[:, None], blocks, positions[:, None].expand_as(blocks))
    return _tensor_gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab])


def tensor_at(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Like `tensor_rows`, for `ids [S, k]` only -> `[S, k]`."""
    words = tensor_philox(keys[:, None], ids // 4 + 1, positions[:, None].expand_as(ids))
    return _tensor_gumbel(torch.stack(words).gather(0, (ids % 4)[None])[0])


def uniforms(keys: Tensor, purpose: int, nodes: Tensor, starts: Tensor) -> Tensor:
    """One number in [0, 1) per element of a stream, fp64 multiples of 2**-52: `keys`, `nodes` and `starts` are int64 and
    broadcast to the shape of the result. On any device, without a host sync."""
    shape = torch.broadcast_shapes(keys.shape, nodes.shape, starts.shape)  # type: ignore[no-untyped-call]
    key, node, start = (t.expand(shape) for t in (keys, nodes, starts))
    words = tensor_philox(key, torch.ones_like(node), torch.zeros_like(node), node, start, purpose)
    return _shift(words[0], 12).double() * 2.0**-52


def stream_gumbel(keys: Tensor, nodes: Tensor, starts: Tensor, vocab: int, purpose: int = DRAFT) -> Tensor:
    """Gumbel noise of a stream, fp64 (fp32 values): one row per element of `keys`, `nodes` and `starts [S]` -> `[S, vocab]`."""
    if keys.device.type != "cpu":
        blocks = torch.arange(1, (vocab + 3) // 4 + 1, device=keys.device).expand(len(keys), -1)
        node, start = (t[:, None].expand_as(blocks) for t in (nodes, starts))
        words = tensor_philox(keys[:, None], blocks, torch.zeros_like(blocks), node, start, purpose)
        return _tensor_gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab]).double()
    where = zip(key_list(keys), nodes.tolist(), starts.tolist(), strict=True)
    rows = [np.random.Philox(key=[k, purpose], counter=[0, 0, n, s]).random_raw(vocab) for k, n, s in where]
    drawn = np.stack(rows) if rows else np.empty((0, vocab), dtype=np.uint64)
    return torch.from_numpy(to_gumbel(drawn)).double()


def _tensor_gumbel(words: Tensor) -> Tensor:
    u = (_shift(words, 12).double() + 0.5) * 2.0**-52
    return (-torch.log(-torch.log(u))).float()


def tensor_philox(
    key: Tensor, block: Tensor, position: Tensor, node: Tensor | None = None, start: Tensor | None = None, purpose: int = _TEXT
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x64-10 of counter (block, position, node, round start) and key (key, purpose); four unsigned
    words as int64 bits, each shaped like `block`."""
    zero = torch.zeros_like(block)
    c0, c1, c2, c3 = block, position, zero if node is None else node, zero if start is None else start
    for r in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high2, low2 = _multiply(c2, _MULTIPLIERS[1])
        k0, k1 = key + signed(r * _WEYL[0]), signed(purpose + r * _WEYL[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 64 bits of the unsigned product, from 32-bit halves; int64 arithmetic wraps, which is what is wanted."""
    a, b = constant & _LOW, constant >> 32
    low, high = x & _LOW, _shift(x, 32)
    carry = high * a + _shift(low * a, 32)
    middle = low * b + (carry & _LOW)
    return high * b + _shift(carry, 32) + _shift(middle, 32), x * signed(constant)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's shift of int64 keeps the sign, so the copies of it are masked away."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(x: int) -> int:
    """The low 64 bits of x, read as a signed number."""
    x &= 2**64 - 1
    return x - 2**64 if x >= 2**63 else x
