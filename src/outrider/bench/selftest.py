"""`outrider audit --self-test`: every planted fault must be noticed, and nothing may be noticed without one.

Each fault comes with a check, a function of a seed that says whether something looked wrong. Both sides of a comparison of texts
run in the broken engine, as in a real audit: each prompt alone, without a drafter, over the contiguous cache, against all
prompts together with a drafter that knows how they should go on.

Power. A check is deterministic for a seed, and fails to see its fault with some probability over seeds. `TRIES` seeds are tried.
Of 40 seeds per fault, the least sensitive check saw its fault with 37 (`tests/bench/test_selftest.py` repeats the count, and
demands a rate above `RATE`); already at RATE, TRIES independent seeds all miss with probability (1 - RATE)**TRIES < 0.01.
False alarms: seeds are fixed and texts are compared in fp64, where scores differ by about 1e-14 between passes, so that rounding
turns a choice over about once in 1e13; law tests have `law.ALARM` each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from .. import registry
from ..accept import coupled
from ..config import SamplingParams
from ..protocols import Drafter
from ..text import TextStream
from ..types import Request
from . import law, tiny
from .faults import Fault, faults
from .probes import Answers, Bushy, Ragged, RaggedTrees, Replay

TRIES = 8
RATE = 0.44
PROMPTS = tuple(tuple(p) for p in tiny.prompts(4, seed=3))
OPTIONS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "sampled": SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True),
    "nucleus": SamplingParams(temperature=1.0, top_p=0.8, max_tokens=24, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2, max_tokens=24, ignore_eos=True
    ),
    "ends": SamplingParams(temperature=1.0, logit_bias={tiny.EOS: 2.5}, stop_token_ids=(11,), min_tokens=6, max_tokens=28),
}

Check = Callable[[int], bool]
Maker = Callable[[Answers], Drafter]


@dataclass(frozen=True, slots=True)
class Plant:
    """A fault and the check that must notice it: `check(seed)` says whether anything looked wrong."""

    name: str
    fault: Fault
    check: Check


@dataclass(frozen=True, slots=True)
class Caught:
    """What became of one plant: was the check silent without the fault (`clean`), did it notice it (`caught`), after how many
    seeds, and how long it all took."""

    name: str
    clean: bool
    caught: bool
    seeds: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.clean and self.caught


def plants() -> list[Plant]:
    """All of them, in the order of `faults()`."""
    checks = _checks()
    return [Plant(name, fault, checks[name]) for name, fault in faults().items()]


def run(plant: Plant, tries: int = TRIES) -> Caught:
    """Look without the fault, then with it, until it is seen or `tries` seeds are spent."""
    started, seeds = time.perf_counter(), 0
    with vectorised():
        clean = not noticed(plant.check, 0)
        with plant.fault():
            caught = any(noticed(plant.check, seeds := seed) for seed in range(tries))
    return Caught(plant.name, clean, caught, seeds + 1, time.perf_counter() - started)


def noticed(check: Check, seed: int) -> bool:
    """Whether the check finds something wrong; an engine that fails outright is wrong as well."""
    try:
        return check(seed)
    except (AssertionError, IndexError, RuntimeError, ValueError):
        return True


@contextmanager
def vectorised() -> Iterator[None]:
    """Judge with the vectorised rule, whose pieces the faults break (on CPU its plain twin would)."""
    with mock.patch.object(coupled, "walk", coupled.vectorised):
        yield


# Comparisons


def _checks() -> dict[str, Check]:
    chain, tree = _chain, Bushy
    return {
        "stale kv": _texts("sampled", tree),
        "draft cache hole": _self_draft_falls_short,
        "position too far": _texts("sampled", chain),
        "position too near": _texts("sampled", chain),
        "noise keyed by slot": _texts("sampled", chain),
        "noise keyed by row": _texts("sampled", chain),
        "noise reused by neighbours": _law(SamplingParams(temperature=1.0)),
        "penalties of the wrong slot": _texts("penalties", chain),
        "penalties of a sibling": _texts("penalties", tree),
        "min tokens counts rounds": _min_tokens,
        "bad word across a block": _bad_word,
        "top k after the fact": _law(SamplingParams(temperature=1.0, top_k=2)),
        "top p from another row": _texts("nucleus", chain),
        "eos overrun": _texts("ends", chain),
        "length overrun": _texts("sampled", _right),
        "stop string at a block end": _stop_string,
        "redraw after mismatch": _texts("sampled", chain),
        "last guess unchecked": _texts("sampled", chain),
        "padding that leaks": _texts("sampled", Ragged, RaggedTrees),
        "siblings see each other": _texts("sampled", tree),
        "wrong block shared": _texts("greedy", chain),
        "retry with a new seed": _preempted,
        "index restarts on resume": _preempted,
    }


def _chain(answers: Answers) -> Drafter:
    return Replay(answers, depth=5, spoil=0.2)  # type: ignore[abstract]


def _right(answers: Answers) -> Drafter:
    return Replay(answers, depth=5)  # type: ignore[abstract]


def requests(params: SamplingParams, seed: int, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    """One request per prompt, each with a seed of its own."""
    return [tiny.request(p, replace(params, seed=1 + 100 * seed + i)) for i, p in enumerate(prompts)]


def plain(made: Sequence[Request]) -> dict[tuple[int, ...], list[int]]:
    """The answer of each request decoded alone, by prompt."""
    out = {}
    for request in made:
        prompt = tuple(request.tokens)
        [out[prompt]] = tiny.World(cache="slots").run(registry.parse("none"), [request])
    return out


def _texts(option: str, *makers: Maker) -> Check:
    """Whether some drafter changes some text."""

    def check(seed: int) -> bool:
        answers = plain(requests(OPTIONS[option], seed))
        want = list(answers.values())
        return any(tiny.World().run(make(answers), requests(OPTIONS[option], seed)) != want for make in makers)

    return check


def _law(params: SamplingParams) -> Check:
    """Whether the texts of many seeds miss the enumerated law."""
    return lambda seed: law.run(params, samples=768, seed=10_000 * seed).fails


def _self_draft_falls_short(seed: int) -> bool:
    """Whether the target, drafting for itself, has a guess rejected."""
    made = requests(replace(OPTIONS["sampled"], max_tokens=1 + 4 * 6), seed)
    tiny.World().run(tiny.draft_model(3, depth=3), made)
    return any(r.stats.accepted != 18 for r in made)


def _min_tokens(seed: int) -> bool:
    """Whether a text that wants to end at once is anything but min_tokens long, and its end."""
    params = SamplingParams(temperature=0.0, min_tokens=9, max_tokens=28, logit_bias={tiny.EOS: 100.0})
    answers = plain(requests(params, seed, PROMPTS[:1]))
    [text] = tiny.World().run(_right(answers), requests(params, seed, PROMPTS[:1]))
    return len(text) != 10


def _bad_word(seed: int) -> bool:
    """Whether a drafter brings in a forbidden pair of tokens: two neighbours of the plain text."""
    answers = plain(requests(OPTIONS["sampled"], seed))

    def forbidding() -> list[Request]:
        made = requests(OPTIONS["sampled"], seed)
        for i, (request, text) in enumerate(zip(made, answers.values(), strict=True)):
            request.bad_words = ((text[3 + i], text[4 + i]),)
        return made

    want = list(plain(forbidding()).values())
    return tiny.World().run(_right(answers), forbidding()) != want


def _preempted(seed: int) -> bool:
    """Whether memory so tight that requests give way to each other changes a text."""
    want = list(plain(requests(OPTIONS["sampled"], seed)).values())
    return tiny.World(tokens=88).run(registry.parse("none"), requests(OPTIONS["sampled"], seed)) != want


class _Letters:
    """A tokenizer of single characters."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [ord(c) - 48 for c in text]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(chr(48 + i) for i in ids)


def _stop_string(seed: int) -> bool:
    """Whether a text is not cut at a stop string, wherever the rounds' bounds fall."""
    letters: _Letters = _Letters()
    answers = plain(requests(OPTIONS["sampled"], seed))
    made, want = requests(OPTIONS["sampled"], seed), []
    for i, (request, ids) in enumerate(zip(made, answers.values(), strict=True)):
        whole = letters.decode(ids)
        stop = whole[4 + i : 7 + i]
        request.text = TextStream(letters, (stop,))  # type: ignore[arg-type]
        want.append(whole[: whole.index(stop)])
    tiny.World().run(_right(answers), made)
    return [r.text.text for r in made if r.text is not None] != want
