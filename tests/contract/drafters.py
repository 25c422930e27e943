"""Every drafter there is, ready for a contract test: the registry's, the examples', and the probes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider import registry
from outrider.config import SamplingParams
from outrider.drafters import translate
from outrider.drafters.hybrid import Hybrid
from outrider.protocols import Drafter, Replayer

from .. import heads, lean, probes, tiny, tongues
from ..probes import Prober

EXAMPLES = Path(__file__).parents[2] / "examples"
Answers = Mapping[tuple[int, ...], Sequence[int]]
Maker = Callable[[Answers], Drafter]


def _named(name: str) -> Maker:
    return lambda answers: registry.parse(name)


def _replaying(answers: Answers) -> Drafter:
    """Told the answers, as answers to whatever seed and temperature the tests may ask for."""
    made = registry.parse("synthetic:rate=0.8,depth=6")
    assert isinstance(made, Replayer)
    for prompt, answer in answers.items():
        for temperature in (0.0, 0.7, 0.8, 1.0):
            for seed in range(32):
                made.record(prompt, SamplingParams(temperature=temperature, seed=seed), answer)
    return made


def registered() -> dict[str, Maker]:
    """Every registered name with its defaults. One whose Config has required keys must be given a tiny stand-in in `SPECIAL`."""
    makers: dict[str, Maker] = {}
    for name in registry.names():
        config = getattr(registry.get(name), "Config", None)
        required = (
            [f for f in dataclasses.fields(config) if f.default is f.default_factory is dataclasses.MISSING] if config else []
        )
        if required and name not in SPECIAL:
            raise AssertionError(f"drafter {name!r} needs {[f.name for f in required]}: add a tiny one to SPECIAL in {__file__}")
        makers |= SPECIAL.get(name, {name: _named(name)})
    for file in sorted(EXAMPLES.glob("*.py")):
        if "@register(" in file.read_text():
            makers[f"examples/{file.name}"] = _named(str(file))
    return makers


def _hybrid(answers: Answers, merge: bool) -> Drafter:
    """Members of every kind: lookup, a model with memory, features and logits, KV in the pool, trees."""
    parts = [
        registry.parse("suffix:factor=3"),
        probes.Replay(answers, depth=3, spoil=0.4),
        tiny.draft_model(2, depth=3, width=2),
        probes.Reader(),
    ]
    return Hybrid.of(parts, merge)


def _pairs(match: str) -> Drafter:
    """A draft whose tokens are mostly other ones; its tokenizer knows letters only, so its word is taken for it."""
    made = tongues.draft(tiny.decoder_first("llama", 2), tongues.pairs(24), depth=4, match="ids")
    if match == "text":
        bind = made.bind

        def bound(decoder: Any, start: Any, tokenizer: Any = None) -> None:
            bind(decoder, start, tokenizer)
            made.bridge = translate.ByText(tokenizer, start)
            made.sampler, made.width = made.bridge.sampler, 1

        made.bind = bound  # type: ignore[method-assign]
    return made


def _searching(answers: Answers) -> Drafter:
    """Looks for better sets in every round."""
    made = registry.parse("layer_skip:search=yes,window=3,attention=0,mlp=2,floor=0.2")
    start = made.start

    def started(about: Any) -> None:
        start(about)
        made._doses._clock = lambda: 0.0  # type: ignore[attr-defined]

    made.start = started  # type: ignore[method-assign]
    return made


SPECIAL: dict[str, dict[str, Maker]] = {
    "hybrid": {
        "hybrid": _named("hybrid"),
        "hybrid:merge": _named("hybrid:merge=yes,members=ngram(min=1;depth=3)+suffix(width=2;depth=4)"),
        "hybrid:all": lambda answers: _hybrid(answers, False),
        "hybrid:all,merge": lambda answers: _hybrid(answers, True),
        "hybrid:heads": lambda answers: Hybrid.of([registry.parse("suffix:factor=3"), heads.eagle(), heads.medusa()]),
        "hybrid:heads,merge": lambda answers: Hybrid.of([heads.medusa(), heads.eagle(), probes.Replay(answers, depth=3)], True),
        "hybrid:parts": _named("hybrid:members=early_exit(exit=2;floor=0;depth=3)+layer_skip(attention=1;depth=2)+suffix"),
        "hybrid:parts,merge": _named("hybrid:merge=yes,members=early_exit(exit=1;floor=0)+layer_skip(mlp=1)+ngram(min=1)"),
        "hybrid:owner": lambda answers: Hybrid.of([Prober(answers), probes.Owner(answers)], True),
    },
    "lookahead": {
        "lookahead": _named("lookahead"),
        "lookahead:small": _named("lookahead:window=1,ngram=2,guesses=1"),
        "lookahead:wide": _named("lookahead:window=3,ngram=5,guesses=3"),
    },
    "suffix": {
        "suffix": _named("suffix"),
        "suffix:width=3": _named("suffix:width=3,depth=4,factor=3,floor=0,prompts=true"),
    },
    "draft_model": {
        "draft_model": lambda answers: tiny.draft_model(2),
        "draft_model:width=3": lambda answers: tiny.draft_model(2, depth=3, width=3),
        "draft_model:padded": lambda answers: tiny.draft_model(2, vocab=tiny.VOCAB + 16),
        "draft_model:ids": lambda answers: tongues.foreign(2, depth=3),
        "draft_model:ids,width=2": lambda answers: tongues.foreign(2, depth=3, width=2, match="ids"),
        "draft_model:pairs": lambda answers: _pairs("ids"),
        "draft_model:pairs,text": lambda answers: _pairs("text"),
        "draft_model:cut": lambda answers: tiny.draft_model(2, vocab=tiny.VOCAB - 8, depth=7),
        "draft_model:lean": lambda answers: lean.draft(),
        "draft_model:lean,width=3": lambda answers: lean.draft(vocab=30, depth=3, width=3),
    },
    "eagle": {
        "eagle": lambda answers: heads.eagle(),
        "eagle:chain": lambda answers: heads.eagle(width=1, depth=3, vocab=30),
        "eagle:one": lambda answers: heads.eagle(version=1, nodes=7),
        "eagle:switches": lambda answers: heads.eagle(
            nodes=12, depth=3, width=5, rows="own", vocab=20, fc_norm=True, norm_output=True, norm_before_residual=True
        ),
    },
    "medusa": {
        "medusa": lambda answers: heads.medusa(),
        "medusa:chain": lambda answers: heads.medusa(nodes=1, rows="own"),
        "medusa:few": lambda answers: heads.medusa(nodes=9, vocab=20, layers=2),
    },
    "synthetic": {"synthetic": _replaying},
    "layer_skip": {
        "layer_skip": _named("layer_skip"),
        "layer_skip:sets": _named("layer_skip:attention=1,mlp=0+2,floor=0,depth=4"),
        "layer_skip:search": _searching,
    },
    "early_exit": {
        "early_exit": _named("early_exit"),
        "early_exit:1": _named("early_exit:exit=1,floor=0,depth=7"),
    },
}

PROBES: dict[str, Maker] = {
    "replay": lambda answers: probes.Replay(answers, depth=5, spoil=0.2),
    "replay:32": lambda answers: probes.Replay(answers, depth=32, spoil=0.02),
    "bushy": lambda answers: probes.Bushy(answers),
    "reader": lambda answers: probes.Reader(),
    "owner": lambda answers: probes.Owner(answers),
    "exiter": lambda answers: probes.Exiter(),
    "prober": lambda answers: probes.Prober(answers),
    "sleeper:1": lambda answers: probes.Sleeper(tiny.draft_model(2, depth=3, width=2), 1),
    "sleeper:eagle": lambda answers: probes.Sleeper(heads.eagle(), 1),
    "sleeper:medusa": lambda answers: probes.Sleeper(heads.medusa(), 2),
    "sleeper:7": lambda answers: probes.Sleeper(tiny.draft_model(2, depth=3, width=2), 7),
    "merger": lambda answers: probes.Merger(tiny.draft_model(2, depth=3, width=2), probes.Replay(answers, depth=4, spoil=0.3)),
}


def every() -> dict[str, Maker]:
    return registered() | PROBES
