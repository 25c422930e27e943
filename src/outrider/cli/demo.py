"""`outrider demo`: the same answer twice, plain and with guesses, and what that changed (the speed) and did not (the text)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from ..config import SamplingParams
from . import options as o
from .answer import check, loaded, stream_answer

if TYPE_CHECKING:
    from ..llm import LLM
    from ..results import Result

CODE = '''def shopping_report(items):
    """Print a line for each item and return the total price."""
    total = 0
    count = 0
    for item in items:
        name = item["name"]
        price = item["price"]
        quantity = item["quantity"]
        if quantity <= 0
            print("skipping", name)
            continue
        cost = price * quantity
        if quantity >= 10:
            cost = cost * 0.9
        print(name, quantity, cost)
        total = total + cost
        count = count + quantity
    print("items:", count)
    print("total:", total)
    if total > 100:
        print("free shipping")
    else:
        print("shipping: 5")
        total = total + 5
    return total
'''
PROMPT = f"Fix the errors in this Python function and write the whole function again:\n\n```python\n{CODE}```"
WHY = """The task is an edit: fix a function (a colon is missing) and write it out again. Most of such an answer repeats
its prompt, which is what lookup in the text is good at; what is new can only be guessed by a drafter that was trained for
the model. The model is tiny and may get the edit wrong: what counts here is that it says the same with speculation off and
on."""
SIMILAR = 0.05
"""Speeds closer than this share are called equal."""


def demo(
    model: o.Model = o.DEFAULT_MODEL,
    draft: o.Draft = "auto",
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    quantize: o.Quantize = "none",
    threads: o.Threads = None,
    max_tokens: o.MaxTokens = 256,
    debug: o.Debug = False,
) -> None:
    """Answer one prompt with speculation off and on; exit 1 if a single token differs."""
    with loaded(o.ModelOptions(model, draft, device=device, dtype=dtype, threads=threads, quantize=quantize), rehearse=1) as llm:
        print(f"{WHY}\n\n{PROMPT}\n")
        for depth in (0, None):  # what only a first pass pays for, neither run should
            _run(llm, min(8, max_tokens), depth, o.Display(json=True))
        print("--- 1 of 2: speculation off ---", flush=True)
        off = _run(llm, max_tokens, 0, o.Display())
        print(f"\n--- 2 of 2: speculation on, drafter {llm.drafter_name} ---", flush=True)
        on = _run(llm, max_tokens, None, o.Display(show_draft=True))
    outcome = Outcome.of(off, on)
    print(outcome.table())
    print(outcome.sentence())
    if outcome.differs_at is not None:
        raise typer.Exit(1)


def _run(llm: LLM, max_tokens: int, depth: int | None, display: o.Display) -> Result:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, depth=depth)
    answer = stream_answer(llm, llm.stream_chat([{"role": "user", "content": PROMPT}], params), display)
    if answer.interrupted:
        raise KeyboardInterrupt
    check(answer.result)
    return answer.result


@dataclass(frozen=True, slots=True)
class Outcome:
    """Both runs side by side. `differs_at` is the first token that differs, None if all are equal."""

    off: Result
    on: Result
    differs_at: int | None

    @classmethod
    def of(cls, off: Result, on: Result) -> Outcome:
        """Compare token by token; a text that merely goes on longer differs where the shorter one ends."""
        a, b = off.token_ids, on.token_ids
        if a == b:
            return cls(off, on, None)
        shared = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        return cls(off, on, next(shared, min(len(a), len(b))))

    @property
    def ratio(self) -> float:
        """Speed with speculation over speed without."""
        return self.on.stats.tokens_per_second / max(self.off.stats.tokens_per_second, sys.float_info.min)

    def table(self) -> str:
        """Speeds, acceptance and the comparison, for people."""
        off, on = self.off.stats, self.on.stats
        where = "yes" if self.differs_at is None else f"NO, from token {self.differs_at + 1} on"
        rows = [
            ("speculation", "off", "on"),
            ("tokens", f"{off.tokens}", f"{on.tokens}"),
            ("seconds", f"{off.seconds:.2f}", f"{on.seconds:.2f}"),
            ("tokens per second", f"{off.tokens_per_second:.1f}", f"{on.tokens_per_second:.1f}"),
            ("tokens per round", f"{off.tokens_per_round:.2f}", f"{on.tokens_per_round:.2f}"),
            ("guesses accepted", "-", f"{on.accepted} of {on.drafted} ({on.acceptance_rate:.0%})"),
        ]
        lines = [f"{name:<20}{left:>10}{right:>20}" for name, left, right in rows]
        return "\n".join(["", *lines, f"{'same tokens':<20}{where:>30}"])

    def sentence(self) -> str:
        """What happened, whichever way it went."""
        if self.differs_at is not None:
            return "The two answers differ, which must never happen: please report it with the output of `outrider version`."
        s = self.on.stats
        if not s.drafted:
            return "No token was guessed, so both runs did the same work, one token per pass."
        told = (
            f"In each pass the model checked guesses and wrote {s.tokens_per_round:.1f} tokens on average instead of one, "
            f"so the same {s.tokens} tokens came "
        )
        if self.ratio > s.tokens_per_round:
            return (
                f"{told}{self.ratio:.2f} times as fast, which is more than {s.tokens_per_round:.1f} tokens per pass can explain: "
                "something else was using the machine. Run it again when it is quiet."
            )
        if self.ratio > 1 + SIMILAR:
            return f"{told}{self.ratio:.2f} times as fast."
        if self.ratio >= 1 - SIMILAR:
            return f"{told}no faster and no slower: the wider passes cost what the accepted guesses saved."
        return f"{told}at {self.ratio:.2f} times the speed, slower: too few guesses were right to pay for the wider passes."
