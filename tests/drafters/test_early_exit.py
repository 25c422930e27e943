"""early_exit: drafts as the first layers alone would, and verification does not run them again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider import registry
from outrider.config import SamplingParams
from outrider.drafters import _tuned, pick
from outrider.drafters.early_exit import EarlyExit
from outrider.errors import BadInput, DrafterMismatch, OutriderWarning

from .. import tiny
from ..contract.test_rules import p_value

PROMPTS = tiny.prompts(3, seed=5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def run(spec: str, params: SamplingParams = GREEDY, world: tiny.World | None = None) -> list:
    made = [tiny.request(p, params) for p in PROMPTS]
    (world or tiny.World()).run(registry.parse(spec), made)
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_are_those_of_the_first_layers_alone(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True, seed=3)
    ours = run("early_exit:exit=2,depth=3,floor=0", params)
    theirs = [tiny.request(p, params) for p in PROMPTS]
    tiny.World().run(tiny.draft_model(2, depth=3), theirs)
    assert [r.output for r in ours] == [r.output for r in theirs]
    assert [(r.stats.drafted, r.stats.accepted, r.stats.rounds) for r in ours] == [
        (r.stats.drafted, r.stats.accepted, r.stats.rounds) for r in theirs
    ]
    assert sum(r.stats.accepted for r in ours) > 0


def written(spec: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that went through each layer, after the prompts."""
    world = tiny.World()
    counts = [0, 0, 0]
    write = world.cache.write

    def counted(layer: int, slots: torch.Tensor, *kv: torch.Tensor) -> None:
        counts[layer] += len(slots)
        write(layer, slots, *kv)

    monkeypatch.setattr(world.cache, "write", counted)
    run(spec, world=world)
    return counts


@pytest.mark.parametrize(("spec", "layers"), [("exit=2,depth=4,floor=0", 2), ("exit=1,depth=4,floor=0.5", 1)])
def test_every_row_goes_through_every_layer_once(spec: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers' rows are those of the last: what was drafted is not run again."""
    counts = written(f"early_exit:{spec}", monkeypatch)
    assert len(set(counts)) == 1
    again = written(f"layer_skip:attention=2,mlp=2,{spec.partition(',')[2]}", monkeypatch)
    assert again[0] > again[2]


def test_some_requests_are_not_drafted_for() -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, depth=d) for n, d in ((2, None), (20, 0), (30, 4))]
    made = [tiny.request(p, q) for p, q in zip(PROMPTS, params, strict=True)]
    plain = [tiny.request(p, q) for p, q in zip(PROMPTS, params, strict=True)]
    assert tiny.World().run(registry.parse("early_exit:exit=2,floor=0"), made) == tiny.World().run(registry.parse("none"), plain)
    assert made[1].stats.drafted == 0 and made[2].stats.drafted > 0


def test_the_law() -> None:
    assert p_value(registry.parse("early_exit:exit=2,depth=2,floor=0.3"), "rejection", count=1536) > 1e-4


@pytest.mark.parametrize("spec", ["exit=0", "depth=0", "floor=1"])
def test_bad_options(spec: str) -> None:
    with pytest.raises(BadInput, match="early_exit needs"):
        registry.parse(f"early_exit:{spec}")


def test_an_exit_past_the_end() -> None:
    with pytest.raises(DrafterMismatch, match="after 3 of its 3 layers"):
        run("early_exit:exit=3")


def test_an_untuned_exit_is_named() -> None:
    with pytest.warns(OutriderWarning, match=r"exit=2 is a guess for tiny; .* outrider tune early_exit"):
        run("early_exit")
    for layers in (2, 3, 30):
        knobs = {k.name: k for k in EarlyExit.knobs(layers)}
        for guess in EarlyExit.guesses(layers):
            assert all(knobs[name].low <= value <= knobs[name].high for name, value in guess.items())


@pytest.mark.parametrize("enabled", [True, False])
def test_what_tuning_found(enabled: bool) -> None:
    fingerprint = tiny.decoder().signature
    found = _tuned.Tuned("early_exit", fingerprint, {"exit": "2", "depth": "1", "floor": "0.000"}, enabled, 0.9)
    _tuned.write(_tuned.place("early_exit", fingerprint), found)
    if enabled:
        assert all(len(r.stats.offered_at) == 1 for r in run("early_exit"))
        return
    with pytest.warns(OutriderWarning, match="no guesses: .* 0.90 times"):
        assert all(r.stats.drafted == 0 for r in run("early_exit"))
    assert all(r.stats.drafted for r in run("early_exit:exit=2,floor=0"))


def test_fp32_scores_have_the_bits_of_plain_decoding() -> None:
    """By rows, states that went part of the way in other company are the same states."""
    own = tiny.Decoder(tiny.model(dtype=torch.float32, hidden_size=64, intermediate_size=1536, seed=4), "fp32")
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=5, logprobs=3)
    told = []
    for spec in ("none", "early_exit:exit=2,floor=0,depth=5", "early_exit:exit=1,floor=0.4", "layer_skip:attention=1,floor=0"):
        told.append([(r.output, r.logprobs) for r in run(spec, params, tiny.World(own=own, by_rows=True))])
    assert all(one == told[0] for one in told)


def test_nobody_gets_it_unasked() -> None:
    assert {"early_exit", "layer_skip"} <= set(registry.names())
    assert pick(registry.names())[0] not in ("early_exit", "layer_skip")
