"""What servers' own metrics tell about speculation, whatever prefix they use.

vLLM, llama.cpp, TensorRT-LLM and this package's server share the names of their counters, `..spec_decode_num_drafts`,
`.._num_draft_tokens`, `.._num_accepted_tokens` and `.._num_accepted_tokens_per_pos{position}`; SGLang has gauges instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
COUNTER = re.compile(r"spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?$")
POSITION = re.compile(r'position="([0-9]{1,3})"')
GAUGE = re.compile(r"sglang[:_]spec_accept_(length|rate)$")


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the server's start: rounds with guesses, guesses, those kept, and kept by position; `length` and `rate` as
    SGLang's gauges show them at the moment."""

    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    by_position: Mapping[int, float] = field(default_factory=dict)
    length: float | None = None
    rate: float | None = None
    known: bool = False

    @classmethod
    def read(cls, text: str | None) -> Counters:
        """From Prometheus' text; several engines' counters are added up. Nothing is `known` without the counters of guesses."""
        sums: dict[str, float] = {}
        places: dict[int, float] = {}
        gauges: dict[str, float] = {}
        for line in (text or "").splitlines():
            found = LINE.match(line)
            if found is None:
                continue
            name, labels, value = found.groups()
            counter, gauge = COUNTER.search(name), GAUGE.search(name)
            try:
                number = float(value)
            except ValueError:
                continue
            if not 0 <= number < math.inf:
                continue
            if gauge:
                gauges[gauge[1]] = number
            elif counter and counter[1] == "accepted_tokens_per_pos":
                position = POSITION.search(labels or "")
                if position:
                    places[int(position[1])] = places.get(int(position[1]), 0.0) + number
            elif counter:
                sums[counter[1]] = sums.get(counter[1], 0.0) + number
        rounds, drafted, accepted = (sums.get(name, 0.0) for name in ("drafts", "draft_tokens", "accepted_tokens"))
        return cls(rounds, drafted, accepted, places, gauges.get("length"), gauges.get("rate"), "draft_tokens" in sums)

    def since(self, before: Counters) -> Counters:
        """What was added after `before`. Nothing is known where `before` was not, or of a server that began anew."""
        if any(getattr(self, name) < getattr(before, name) for name in ("rounds", "drafted", "accepted")):
            return Counters(length=self.length, rate=self.rate)
        places = {p: n - before.by_position.get(p, 0.0) for p, n in self.by_position.items()}
        sums = (self.rounds - before.rounds, self.drafted - before.drafted, self.accepted - before.accepted)
        return Counters(*sums, places, self.length, self.rate, self.known and before.known)
