"""Cards one may not have: memory, bandwidth and peak arithmetic, from their makers' data sheets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..errors import BadInput
from .sizes import Size

STREAM, PEAK = 0.8, 0.7
"""Shares of bandwidth and of peak arithmetic that passes reach. With them, and with seconds that a layer takes whatever its size,
the passes in docs/performance.md (8B, 1.5B and 135M shapes on an H100) come out within 5 %."""
LAYER = 30e-6
HOST = 250e-6
"""Seconds of the host in a round with guesses, which nothing hides; plain rounds are launched ahead."""
LOOKUP, EACH = 25e-6, 8e-6
"""Seconds that a drafter without a model takes on the host, once and per request (docs/lab-notes.md, proposal cost)."""
KNEE = 4
"""How sharply the time of a pass turns from bandwidth to arithmetic (the exponent of a norm)."""


@dataclass(frozen=True, slots=True)
class Card:
    """`memory` in GiB (a sixteenth less than on the sheet where its own error correction, on by default, takes that from GDDR6),
    `bandwidth` in GB/s, `peak` in dense bf16 (fp16 where there is no bf16) TFLOP/s."""

    name: str
    memory: float
    bandwidth: float
    peak: float
    source: str


CARDS = (
    Card("T4", 15, 320, 65, "NVIDIA T4 datasheet"),
    Card("V100", 32, 900, 125, "NVIDIA V100 datasheet (SXM2)"),
    Card("A10", 22.5, 600, 125, "NVIDIA A10 datasheet"),
    Card("L4", 22.5, 300, 121, "NVIDIA L4 datasheet"),
    Card("A6000", 48, 768, 155, "NVIDIA RTX A6000 datasheet"),
    Card("L40S", 45, 864, 362, "NVIDIA L40S datasheet"),
    Card("RTX3090", 24, 936, 71, "NVIDIA Ampere GA102 whitepaper"),
    Card("RTX4090", 24, 1008, 165, "NVIDIA Ada GPU architecture whitepaper"),
    Card("RTX5090", 32, 1792, 210, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
    Card("A100-40", 40, 1555, 312, "NVIDIA A100 datasheet (40 GB)"),
    Card("A100", 80, 2039, 312, "NVIDIA A100 datasheet (80 GB SXM)"),
    Card("H100-PCIe", 80, 2000, 756, "NVIDIA H100 datasheet (PCIe)"),
    Card("H100", 80, 3350, 989, "NVIDIA H100 datasheet (SXM)"),
    Card("H200", 141, 4800, 989, "NVIDIA H200 datasheet (SXM)"),
    Card("B200", 180, 7700, 2250, "NVIDIA DGX B200 datasheet (per GPU)"),
    Card("MI300X", 192, 5300, 1307, "AMD Instinct MI300X datasheet"),
)


def find(name: str) -> Card:
    """A card by name, whatever the case. Raises `BadInput` with those there are."""
    known = {c.name.lower(): c for c in CARDS}
    wanted = name.lower().replace(" ", "")
    if wanted in known:
        return known[wanted]
    close = difflib.get_close_matches(wanted, known, 1)
    hint = f"did you mean {known[close[0]].name!r}? " if close else ""
    raise BadInput(f"no card {name!r}; {hint}there are {', '.join(c.name for c in CARDS)}")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Costs on a card that were not measured: the slower of reading weights and KV and of arithmetic, and a fixed time per layer.
    `draft`: the draft model's size; None for a drafter without a model. `width`: bytes of a number, `context`: tokens of a text.
    Weights are read in `weight_bytes` and `draft_bytes`, all of them in every pass."""

    card: Card
    target: Size
    weight_bytes: float
    draft_size: Size | None = None
    draft_bytes: float = 0.0
    context: int = 1024
    width: int = 2
    measured: bool = False
    asked: bool = True

    def plain(self, batch: int) -> float:
        """A pass without guesses."""
        return self.verify(batch, batch)

    def verify(self, batch: int, rows: float) -> float:
        """A pass of the target."""
        return self._pass(self.target, self.weight_bytes, batch, rows)

    def draft(self, batch: int, depth: float) -> float:
        """So many passes of the draft model, one after the other; a lookup takes the same for any depth."""
        if depth <= 0 or not batch:
            return 0.0
        if self.draft_size is None:
            return LOOKUP + EACH * batch
        return depth * self._pass(self.draft_size, self.draft_bytes, batch, batch)

    def other(self, batch: int, depth: float) -> float:
        """The host's share."""
        return HOST if depth > 0 else 0.0

    def reading(self, batch: int) -> float:
        """Not reckoned: answers are taken to be long."""
        return 0.0

    def begin(self, batch: int) -> float:
        """Not reckoned."""
        return 0.0

    def nodes(self, batch: int, depth: float) -> float:
        """Not known."""
        return 0.0

    def beyond(self, batch: int, depth: float) -> float:
        """Nothing: drafters that run the target's own layers are refused."""
        return 0.0

    def knows(self, batch: int, rows: float) -> bool:
        """Nothing was measured."""
        return False

    def _pass(self, size: Size, weights: float, batch: float, rows: float) -> float:
        read = weights + batch * self.context * size.kv * self.width
        stream = read / (STREAM * self.card.bandwidth * 1e9)
        reckon = 2.0 * size.read * rows / (PEAK * self.card.peak * 1e12)
        return float((stream**KNEE + reckon**KNEE) ** (1 / KNEE)) + LAYER * size.layers
