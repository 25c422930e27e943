"""Structured output by the hundred: are the tokens the same with speculation on and off, is the JSON valid, is it faster?

    python benchmarks/forms.py --schemas 200 --output benchmarks/results/forms_cpu.json

Every schema is answered three times with one seed: with the drafter and what the form forces, with the drafter alone, and
plainly, in this order, so that no drafter can have seen the text before. T is 0 and 1 in turns. Exit status 1 if tokens
differ, an answer does not conform to its schema, or speculation was slower over all.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("name", "city", "age", "email", "price", "in_stock", "tags", "address", "first_name", "order_id", "rating", "colour")
WORDS = ("red", "green", "blue", "small", "large", "open", "closed", "pending", "Paris", "Rome", "not available")


def schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random object schema, at most `depth` levels deep, whose answers are all finite."""
    names = rng.sample(NAMES, rng.randint(1, 4))
    properties = {name: _value(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth > 0 and rng.random() < 0.35:
        if rng.random() < 0.5:
            return schema(rng, depth)
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": 1, "maxItems": rng.randint(1, 3)}
    low = rng.randint(0, 50)
    leaves: tuple[dict[str, Any], ...] = (
        {"type": "string", "maxLength": rng.randint(4, 12)},
        {"type": "integer", "minimum": low, "maximum": low + rng.choice((9, 99, 999))},
        {"type": "boolean"},
        {"enum": rng.sample(WORDS, rng.randint(2, 4))},
        {"const": rng.choice((*WORDS, 7, True, None))},
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
        {"type": "string", "pattern": rng.choice(("^[a-c]{3}$", "^[0-9]{2}-[0-9]{2}$", "^(yes|no)$"))},
    )
    return rng.choice(leaves)


def conforms(value: Any, wanted: dict[str, Any]) -> bool:
    """Whether a value is what such a schema asks for."""
    if "anyOf" in wanted:
        return any(conforms(value, one) for one in wanted["anyOf"])
    if "enum" in wanted or "const" in wanted:
        return any(value == v and type(value) is type(v) for v in wanted.get("enum", [wanted.get("const")]))
    kind = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}[wanted["type"]]
    if type(value) is not kind:
        return False
    if kind is dict:
        return set(value) == set(wanted["properties"]) and all(conforms(value[k], s) for k, s in wanted["properties"].items())
    if kind is list:
        return wanted["minItems"] <= len(value) <= wanted["maxItems"] and all(conforms(v, wanted["items"]) for v in value)
    if kind is str:
        return len(value) <= wanted.get("maxLength", 99) and re.search(wanted.get("pattern", ""), value) is not None
    return kind is not int or wanted["minimum"] <= value <= wanted["maximum"]


@dataclass(frozen=True)
class Answered:
    """One schema under one way of decoding."""

    tokens: tuple[int, ...]
    text: str
    ended: bool
    rounds: int
    drafted: int
    accepted: int
    seconds: float


class Forms:
    """Asks one model for JSON."""

    def __init__(self, model: str | None, draft: str, max_tokens: int) -> None:
        from outrider import LLM
        from outrider.serve.grammar import Grammars

        named = {} if model is None else {"model": model}
        self.llm = LLM(**named, draft=draft, prefix_cache=False)
        self.grammars, self.max_tokens = Grammars(self.llm.tokenizer), max_tokens

    def answer(self, wanted: dict[str, Any], seed: int, way: str) -> Answered:
        """`way`: `forced`, `drafter` or `off`."""
        from outrider import SamplingParams

        text = f"Make up a record with the fields {', '.join(wanted['properties'])} and write it as JSON."
        tokenizer = self.llm.tokenizer
        ids = tokenizer.chat([{"role": "user", "content": text}]) if tokenizer.has_chat else tokenizer.encode(text)
        form = self.grammars.processor(self.grammars.compile("json_schema", wanted), len(ids))
        params = SamplingParams(
            temperature=float(seed % 2),
            seed=seed,
            max_tokens=self.max_tokens,
            draft="none" if way == "off" else None,
            processors=(form if way == "forced" else form.__call__,),
        )
        started = time.perf_counter()
        [found] = self.llm.generate([ids], params)
        seconds = time.perf_counter() - started
        tokens = tuple(found.token_ids)
        counts = (found.stats.rounds, found.stats.drafted, found.stats.accepted)
        return Answered(tokens, found.text, found.finish_reason == "stop", *counts, seconds)


def run(forms: Forms, wanted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All schemas in all ways; the figures."""
    ways: dict[str, list[Answered]] = {"forced": [], "drafter": [], "off": []}
    forms.answer(wanted[0], 0, "off")  # what is made once is not timed
    for seed, one in enumerate(wanted):
        for way, found in ways.items():
            found.append(forms.answer(one, seed, way))
    plain = ways["off"]
    complete = [(a, s) for a, s in zip(plain, wanted, strict=True) if a.ended]
    figures: dict[str, Any] = {
        "schemas": len(wanted),
        "complete": len(complete),
        "valid": sum(valid(a.text, s) for a, s in complete),
        "same_tokens": sum(len({ways[w][i].tokens for w in ways}) == 1 for i in range(len(wanted))),
    }
    for way, found in ways.items():
        seconds, rounds, drafted = (sum(getattr(a, name) for a in found) for name in ("seconds", "rounds", "drafted"))
        speeds = [p.seconds / a.seconds for p, a in zip(plain, found, strict=True)]
        figures[way] = {
            "seconds": seconds,
            "tokens_per_round": sum(len(a.tokens) for a in found) / rounds,
            "accepted": sum(a.accepted for a in found) / drafted if drafted else None,
            "speedup": sum(a.seconds for a in plain) / seconds,
            "median_speedup": statistics.median(speeds),
        }
    return figures


def valid(text: str, wanted: dict[str, Any]) -> bool:
    """Whether a text is JSON that conforms."""
    try:
        return conforms(json.loads(text), wanted)
    except ValueError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="other schemas")
    parser.add_argument("--model", help="the embedded one if it is left out")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--output", type=Path, help="write the figures to a file as well")
    a = parser.parse_args()
    rng = random.Random(a.seed)
    forms = Forms(a.model, a.draft, a.max_tokens)
    figures = {"date": time.strftime("%Y-%m-%d"), "model": forms.llm.name, "draft": a.draft}
    figures |= run(forms, [schema(rng) for _ in range(a.schemas)])
    text = json.dumps(figures, indent=1)
    print(text)
    if a.output is not None:
        a.output.write_text(text + "\n")
    good = figures["valid"] == figures["complete"] and figures["same_tokens"] == a.schemas
    sys.exit(not good or figures["forced"]["speedup"] <= 1)


if __name__ == "__main__":
    main()
