"""Every drafter there is, ready for a contract test: the registry's, the examples', and the probes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outrider import registry
from outrider.config import SamplingParams
from outrider.protocols import Drafter, Replayer

from .. import probes, tiny

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


SPECIAL: dict[str, dict[str, Maker]] = {
    "draft_model": {
        "draft_model": lambda answers: tiny.draft_model(2),
        "draft_model:width=3": lambda answers: tiny.draft_model(2, depth=3, width=3),
        "draft_model:padded": lambda answers: tiny.draft_model(2, vocab=tiny.VOCAB + 16),
        "draft_model:cut": lambda answers: tiny.draft_model(2, vocab=tiny.VOCAB - 8, depth=7),
    },
    "synthetic": {"synthetic": _replaying},
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
    "sleeper:7": lambda answers: probes.Sleeper(tiny.draft_model(2, depth=3, width=2), 7),
    "merger": lambda answers: probes.Merger(tiny.draft_model(2, depth=3, width=2), probes.Replay(answers, depth=4, spoil=0.3)),
}


def every() -> dict[str, Maker]:
    return registered() | PROBES
