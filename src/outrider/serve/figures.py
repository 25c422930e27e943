"""What an answer cost, under the names that clients read: OpenAI's `usage`, vLLM's `metrics.speculative_decoding`, llama.cpp's
`timings`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ..types import FINISH_NAMES, Request, Stats
from ..watch.gain import Gain


def usage(requests: Sequence[Request], scored_only: bool = False) -> dict[str, Any]:
    """Tokens in and out. A prompt counts once, however many samples it has; `scored_only`: what was written does not count."""
    written = 0 if scored_only else sum(r.stats.tokens for r in requests)
    read = sum(r.prompt_len for r in requests if r.index == 0)
    drafted, accepted = sum(r.stats.drafted for r in requests), sum(r.stats.accepted for r in requests)
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "completion_tokens_details": details,
    }


def speculation(stats: Sequence[Stats]) -> dict[str, Any]:
    """vLLM's fields. A step is a round that had guesses; `mean_acceptance_length` = 1 + accepted / steps; the histogram counts
    steps by how many guesses were kept."""
    offered, kept = _sums(s.offered_at for s in stats), _sums(s.accepted_at for s in stats)
    steps = offered[0] if offered else 0
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [high - low for high, low in pairwise([steps, *kept, 0])] if steps else [],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(offered),
        "acceptance_by_position": [k / o if o else 0.0 for k, o in zip(kept, offered, strict=True)],
    }


def timings(requests: Sequence[Request]) -> dict[str, Any]:
    """llama.cpp's fields, in milliseconds; of several choices, the longest."""
    first = max((r.stats.first_token_seconds for r in requests), default=0.0)
    whole = max((r.stats.seconds for r in requests), default=0.0)
    written, read = sum(r.stats.tokens for r in requests), sum(r.prompt_len for r in requests if r.index == 0)
    later, span = max(written - len(requests), 0), whole - first
    return {
        "prompt_n": read,
        "prompt_ms": 1e3 * first,
        "predicted_n": written,
        "predicted_ms": 1e3 * span,
        "predicted_per_second": later / span if span > 0 else 0.0,
        "draft_n": sum(r.stats.drafted for r in requests),
        "draft_n_accepted": sum(r.stats.accepted for r in requests),
    }


def noted(requests: Sequence[Request]) -> dict[str, Any]:
    """What the log and traces tell of an answer."""
    stats = [r.stats for r in requests]
    sums = {name: sum(getattr(s, name) for s in stats) for name in ("tokens", "rounds", "drafted", "accepted")}
    seconds = {f"{name}_ms": round(1e3 * sum(getattr(s, f"{name}_seconds") for s in stats), 1) for name in ("draft", "verify")}
    first = max((s.first_token_seconds for s in stats), default=0.0)
    about = {"choices": len(requests), "prompt_tokens": sum(r.prompt_len for r in requests if r.index == 0)}
    ends = tuple(FINISH_NAMES[r.finish] for r in requests if r.finish in FINISH_NAMES)
    more = {"first_ms": round(1e3 * first, 1), "finish": ends, "lossless": all(r.lossless for r in requests)}
    return about | sums | seconds | more


def extensions(requests: Sequence[Request], drafter: str, gain: Gain) -> dict[str, Any]:
    """What stands beside `usage`: both servers' fields, and our own."""
    stats = [r.stats for r in requests]
    rounds, tokens = sum(s.rounds for s in stats), sum(s.tokens for s in stats)
    own = {
        "drafter": drafter,
        "lossless": all(r.lossless for r in requests),
        "rounds": rounds,
        "tokens_per_round": tokens / rounds if rounds else 0.0,
        "draft_seconds": sum(s.draft_seconds for s in stats),
        "verify_seconds": sum(s.verify_seconds for s in stats),
        "speedup": gain.speedup if gain.known else None,
        "losing": gain.losing,
    }
    return {"metrics": {"speculative_decoding": speculation(stats) | own}, "timings": timings(requests)}


def _sums(columns: Iterable[Sequence[int]]) -> list[int]:
    total: list[int] = []
    for column in columns:
        total += [0] * (len(column) - len(total))
        for i, value in enumerate(column):
            total[i] += value
    return total
