"""Where top-k and top-p end in a row of scores, found by search instead of a sort, with ties to the lowest id.

A score's *place* in its row is an integer: how far it lies below the best, tempered, as the bits of a non-negative fp32 (which
order like the numbers), then the token id. Top-k and top-p keep the tokens whose place is before some end. Two surveys count, and
add integer masses, before 16 edges each, in chunks of the row; what lies in the window that is left (a few hundred tokens of
ordinary scores) is gathered, and one program per row narrows it down to one token. Windows too full to gather are searched in the
row itself, which is slower and happens with flat or tied scores. Sums are of integers, so that no order of work can change a bit.
The definition is `oracle.survivors`, the arithmetic that of `sampling` on devices.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_TINY = tl.constexpr(1.1754943508222875e-38)
_ID_BITS = tl.constexpr(23)
_INFINITE = tl.constexpr(0x7F800000)
END = tl.constexpr(0x7F800000 << 23)
"""Behind every token that is allowed."""
EDGES = tl.constexpr(16)
_FINE = tl.constexpr(8)


@triton.jit
def _exp(x):
    """torch's fp32 exp on CUDA is the same function of the same library; `tl.exp` is an approximation of it."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def place_of(z, v, top, heat):
    """int64: distance of a tempered score from the best, then the id; `END` for tokens that are not allowed."""
    tempered = tl.div_rn(z - top, tl.maximum(heat, _TINY))
    far = (0.0 - tempered).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(far < _INFINITE, (far.to(tl.int64) << _ID_BITS) | v.to(tl.int64), END)


@triton.jit
def weight_of(place):
    """exp of the tempered score, fp32; 0 for tokens that are not allowed."""
    return _exp(0.0 - (place >> _ID_BITS).to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def mass_of(place):
    return (weight_of(place).to(tl.float64) * 1099511627776.0).to(tl.int64)


@triton.jit
def filters_of(TOP_K, TOP_P, lane, usable):
    """Top-k (0 where it is off) and top-p."""
    k = tl.load(TOP_K + lane)
    return tl.where(k >= usable, 0, tl.maximum(k, 0)), tl.load(TOP_P + lane)


@triton.jit
def top_of(RAW, row, CHUNKS, CP: tl.constexpr):
    i = tl.arange(0, CP)
    return tl.max(tl.load(RAW + row * CHUNKS + i, mask=i < CHUNKS, other=float("-inf")), 0)


@triton.jit
def _take(k, j, values, before):
    """Element j - 1 of `values`, or what comes before them; and element j."""
    low = tl.where(j > 0, tl.sum(tl.where(k == j - 1, values, 0), 0), before)
    return low, tl.sum(tl.where(k == j, values, 0), 0)


@triton.jit
def edges_of(low, high, FIRST: tl.constexpr):
    """Edges that cut a window in 16. The first window, everything, is cut at whole distances: there the weights fall by e."""
    k = tl.arange(0, EDGES) + 1
    if FIRST:
        bits = k.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) << _ID_BITS
        return tl.where(k == EDGES, END, bits)
    else:
        step = (high - low + EDGES - 1) // EDGES
        return tl.minimum(low + k * step, high)


@triton.jit
def _window(SUMS, row, top_k, top_p, SURVEYS: tl.constexpr):
    """What is known after `SURVEYS` surveys: the window of places in which the row's end lies, counts and masses before its
    ends, and the count or mass that the end must reach. Top-k's end where the row has one, else top-p's."""
    base = SUMS + row * (4 * EDGES)
    k = tl.arange(0, EDGES)
    goal = tl.where(top_k > 0, top_k.to(tl.float64), tl.load(base + 2 * EDGES - 1).to(tl.float64) * top_p)
    low = tl.full((), 0, tl.int64)
    high = tl.full((), END, tl.int64)
    low_count = low
    low_mass = low
    high_count = low
    high_mass = low
    for turn in tl.static_range(SURVEYS):
        counts = tl.load(base + turn * 2 * EDGES + k)
        masses = tl.load(base + turn * 2 * EDGES + EDGES + k)
        before = tl.where(top_k > 0, counts, masses).to(tl.float64)
        j = tl.sum(((before < goal) & (k < EDGES - 1)).to(tl.int32), 0)
        low, high = _take(k, j, edges_of(low, high, turn == 0), low)
        low_count, high_count = _take(k, j, counts, low_count)
        low_mass, high_mass = _take(k, j, masses, low_mass)
    return low, high, low_count, high_count, low_mass, high_mass, goal


@triton.jit
def _gathering(low, low_count, low_mass, high_count, top_k, top_p):
    """From which place on a window's tokens are gathered, how many they are, and what lies before. Where top-p must add up what
    top-k leaves, from the best on."""
    both = (top_k > 0) & (top_p < 1)
    low_count = tl.where(both, 0, low_count)
    return tl.where(both, 0, low), high_count - low_count, low_count, tl.where(both, 0, low_mass)


@triton.jit
def survey(
    Z, LANE, HEAT, TOP_K, TOP_P, RAW, SUMS, stride, usable, CHUNKS,
    SURVEY: tl.constexpr, CP: tl.constexpr, CH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Per chunk: tokens and masses before each of 16 edges, added to the row's sums."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.load(LANE + row)
    heat = tl.load(HEAT + lane)
    top_k, top_p = filters_of(TOP_K, TOP_P, lane, usable)
    if (heat <= 0) | ((top_k == 0) & (top_p >= 1)):
        return
    low, high, _, _, _, _, _ = _window(SUMS, row, top_k, top_p, SURVEY)
    edges = edges_of(low, high, SURVEY == 0)
    top = top_of(RAW, row, CHUNKS, CP)
    counts = tl.zeros((EDGES,), tl.int64)
    masses = tl.zeros((EDGES,), tl.int64)
    for start in range(0, CH, TILE):
        v = chunk * CH + start + tl.arange(0, TILE)
        z = tl.load(Z + row * stride + v, mask=v < usable, other=float("-inf"))
        place = place_of(z, v, top, heat)
        before = place[None, :] < edges[:, None]
        counts += tl.sum(before.to(tl.int32), 1).to(tl.int64)
        masses += tl.sum(tl.where(before, mass_of(place)[None, :], 0), 1)
    out = SUMS + row * (4 * EDGES) + SURVEY * 2 * EDGES + tl.arange(0, EDGES)
    tl.atomic_add(out, counts, sem="relaxed")
    tl.atomic_add(out + EDGES, masses, sem="relaxed")


@triton.jit
def gather(
    Z, LANE, HEAT, TOP_K, TOP_P, RAW, SUMS, FOUND, PLACES, stride, usable, CHUNKS,
    CP: tl.constexpr, CH: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Per chunk: the places of a window's tokens, in any order, if all chunks' are at most CAP."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.load(LANE + row)
    heat = tl.load(HEAT + lane)
    top_k, top_p = filters_of(TOP_K, TOP_P, lane, usable)
    if (heat <= 0) | ((top_k == 0) & (top_p >= 1)):
        return
    low, high, low_count, high_count, low_mass, _, _ = _window(SUMS, row, top_k, top_p, 2)
    base, many, _, _ = _gathering(low, low_count, low_mass, high_count, top_k, top_p)
    if many > CAP:
        return
    v = chunk * CH + tl.arange(0, CH)
    z = tl.load(Z + row * stride + v, mask=v < usable, other=float("-inf"))
    place = place_of(z, v, top_of(RAW, row, CHUNKS, CP), heat)
    wanted = (place >= base) & (place < high)
    count = tl.sum(wanted.to(tl.int32), 0)
    if count > 0:
        at = tl.atomic_add(FOUND + row, count, sem="relaxed") + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(PLACES + row * CAP + at, place, mask=wanted)


@triton.jit
def _tile(Z, PLACES, start, many, full, usable, top, heat, TILE: tl.constexpr):
    """Places to search: of the gathered tokens, or, where those are too many, of the row's."""
    i = start + tl.arange(0, TILE)
    place = tl.load(PLACES + i, mask=(i < many) & (full == 0), other=END)
    if full != 0:
        z = tl.load(Z + i, mask=i < usable, other=float("-inf"))
        place = place_of(z, i, top, heat)
    return place


@triton.jit
def _narrow(
    Z, PLACES, many, full, usable, top, heat, base_count, base_mass, low, high, low_count, high_count, high_mass, goal,
    MASS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cut the window in 8 until it holds one token at most: then its end is the row's. Also count and mass before that end."""
    k = tl.arange(0, _FINE)
    entries = tl.where(full != 0, usable, many.to(tl.int32))
    while (high - low > 1) & (high_count - low_count > 1):
        step = (high - low + _FINE - 1) // _FINE
        edges = tl.minimum(low + (k + 1) * step, high)
        counts = tl.zeros((_FINE,), tl.int64) + base_count
        masses = tl.zeros((_FINE,), tl.int64) + base_mass
        for start in range(0, entries, TILE):
            place = _tile(Z, PLACES, start, many, full, usable, top, heat, TILE)
            before = place[None, :] < edges[:, None]
            counts += tl.sum(before.to(tl.int32), 1).to(tl.int64)
            masses += tl.sum(tl.where(before, mass_of(place)[None, :], 0), 1)
        reached = masses.to(tl.float64) if MASS else counts.to(tl.float64)
        j = tl.sum(((reached < goal) & (k < _FINE - 1)).to(tl.int32), 0)
        low, high = _take(k, j, edges, low)
        low_count, high_count = _take(k, j, counts, low_count)
        high_mass = tl.sum(tl.where(k == j, masses, 0), 0)
    return high, high_count, high_mass


@triton.jit
def settle(
    Z, LANE, HEAT, TOP_K, TOP_P, RAW, SUMS, PLACES, LAST, stride, usable, CHUNKS,
    CP: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """A program per row: the place before which top-k and top-p keep every token."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(LANE + row)
    heat = tl.load(HEAT + lane)
    if heat <= 0:
        return
    top_k, top_p = filters_of(TOP_K, TOP_P, lane, usable)
    if (top_k == 0) & (top_p >= 1):
        tl.store(LAST + row, tl.full((), END, tl.int64))
        return
    low, high, low_count, high_count, low_mass, high_mass, goal = _window(SUMS, row, top_k, top_p, 2)
    _, many, base_count, base_mass = _gathering(low, low_count, low_mass, high_count, top_k, top_p)
    full = (many > CAP).to(tl.int32)
    base_count = tl.where(full != 0, 0, base_count)
    base_mass = tl.where(full != 0, 0, base_mass)
    top = top_of(RAW, row, CHUNKS, CP)
    scores = Z + row * stride
    places = PLACES + row * CAP
    if top_k > 0:
        high, high_count, high_mass = _narrow(
            scores, places, many, full, usable, top, heat, base_count, base_mass,
            low, high, low_count, high_count, high_mass, goal, False, TILE,
        )  # fmt: skip
        low = tl.full((), 0, tl.int64)
        low_count = low
        goal = high_mass.to(tl.float64) * top_p
    if top_p < 1:
        high, high_count, high_mass = _narrow(
            scores, places, many, full, usable, top, heat, base_count, base_mass,
            low, high, low_count, high_count, high_mass, goal, True, TILE,
        )  # fmt: skip
    tl.store(LAST + row, high)
