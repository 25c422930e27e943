"""What happened, in numbers."""

from __future__ import annotations

from .results import Summary
from .types import COUPLED, NONE, Committed, Stats, StepEvent
from .watch.gain import Gain


def add(stats: Stats, item: Committed) -> None:
    """Count one request's share of a round into its `Stats`."""
    if not item.tokens and not item.drafted:
        return
    stats.rounds += 1
    stats.tokens += len(item.tokens)
    stats.drafted += item.drafted
    stats.accepted += item.accepted
    grow = len(item.offered_at) - len(stats.offered_at)
    stats.offered_at += [0] * grow
    stats.accepted_at += [0] * grow
    for depth, offered in enumerate(item.offered_at):
        stats.offered_at[depth] += offered
        stats.accepted_at[depth] += depth < len(item.origins) and item.origins[depth] != NONE


def add_plain(stats: Stats) -> None:
    """`add` of one token that was no guess."""
    stats.rounds += 1
    stats.tokens += 1


def add_chain(stats: Stats, drafted: int, accepted: int) -> None:
    """`add` of a chain of guesses, of which the first few were accepted, and a token more."""
    stats.rounds += 1
    stats.tokens += accepted + 1
    stats.drafted += drafted
    stats.accepted += accepted
    offered_at, accepted_at = stats.offered_at, stats.accepted_at
    if drafted > len(offered_at):
        grow = [0] * (drafted - len(offered_at))
        offered_at += grow
        accepted_at += grow
    for depth in range(drafted):
        offered_at[depth] += 1
    for depth in range(accepted):
        accepted_at[depth] += 1


def charge(event: StepEvent, now: float) -> None:
    """Book a round's seconds with every request it served (each of them waited for all of it)."""
    drafting, verifying = event.draft_seconds, event.verify_seconds
    for item in event.committed:
        if item.late:
            continue
        request = item.request
        stats = request.stats
        stats.draft_seconds += drafting
        stats.verify_seconds += verifying
        stats.seconds = seconds = now - request.started
        if stats.rounds == 1 and item.tokens:
            stats.first_token_seconds = seconds


def summarise(
    stats: Stats, drafter: str, accept: str = COUPLED, lossless: bool = True, controller: str = "", gain: Gain | None = None
) -> Summary:
    """`Stats` as users script against them."""
    return Summary(
        tokens=stats.tokens,
        rounds=stats.rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        tokens_per_round=stats.tokens / stats.rounds if stats.rounds else 0.0,
        acceptance_rate=stats.accepted / stats.drafted if stats.drafted else 0.0,
        acceptance_by_position=tuple(a / max(o, 1) for a, o in zip(stats.accepted_at, stats.offered_at, strict=True)),
        draft_seconds=stats.draft_seconds,
        verify_seconds=stats.verify_seconds,
        seconds=stats.seconds,
        tokens_per_second=stats.tokens / stats.seconds if stats.seconds else 0.0,
        first_token_seconds=stats.first_token_seconds,
        drafter=drafter,
        accept=accept,
        lossless=lossless,
        controller=controller,
        speedup=gain.speedup if gain is not None and gain.known else None,
        losing=gain is not None and gain.losing,
    )
