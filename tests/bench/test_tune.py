"""The search for options: better than chance at equal cost, resumable, and honest about what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.bench import tune
from outrider.bench.numbers import Speedup
from outrider.bench.tune import Search, Sizes, Tuner
from outrider.bench.workloads import Prompt, Workload
from outrider.drafters.layer_skip import LayerSkip
from outrider.errors import BadInput, OutriderError
from outrider.protocols import Knob

Score = Callable[[Mapping[str, float]], float]
LAYERS = 18


def planted(seed: int) -> Score:
    """Like a real set of left-out blocks: every block has its own price or gain, some pairs add to it, depth and floor have
    their best values."""
    random = np.random.default_rng(seed)
    names = [k.name for k in LayerSkip.knobs(LAYERS) if "." in k.name]
    single, pairs = random.normal(0, 1, len(names)), random.normal(0, 0.5, (len(names),) * 2)
    pairs *= random.random(pairs.shape) < 3 / len(names)

    def score(values: Mapping[str, float]) -> float:
        x = np.array([values[name] for name in names])
        return float(single @ x + x @ pairs @ x - 4 * (values["floor"] - 0.7) ** 2 - 0.1 * abs(values["depth"] - 5))

    return score


def best_of_random(score: Score, count: int, seed: int) -> float:
    random = np.random.default_rng(seed)

    def draw(knob: Knob) -> float:
        return random.integers(knob.low, knob.high + 1) if knob.whole else random.uniform(knob.low, knob.high)

    return max(score({k.name: draw(k) for k in LayerSkip.knobs(LAYERS)}) for _ in range(count))


@pytest.mark.parametrize("seed", range(5))
def test_the_search_beats_200_random_sets_with_half_as_many_trials(seed: int) -> None:
    score = planted(seed)
    search = Search(LayerSkip.knobs(LAYERS), "planted", seed=seed)
    for _ in range(100):
        search.trial(score)
    assert search.best is not None and search.best.trials == 100
    assert search.best.score >= best_of_random(score, 200, 1000 + seed)
    assert score(search.best.values) == search.best.score


def test_a_search_goes_on_from_its_journal(tmp_path: Path) -> None:
    knobs, journal, score = (
        (Knob("x", 0, 1), Knob("y", 1, 9), Knob("z", 0.0, 1.0, False)),
        tmp_path / "a" / "b.journal",
        lambda v: v["y"],
    )
    first = Search(knobs, "one", journal)
    assert first.best is None
    first.suggest([{"x": 1, "y": 9, "z": 0.5}])
    first.trial(score)
    for _ in range(11):
        first.trial(score)
    with pytest.raises(KeyboardInterrupt):
        first.trial(interrupt)
    again = Search(knobs, "one", journal)
    again.suggest([{"x": 0, "y": 1, "z": 0.0}])
    assert again.best == first.best and again.best.values == {"x": 1, "y": 9, "z": 0.5} and again.best.trials == 12
    again.trial(score)
    assert again.best.trials == 13 and Search(knobs, "other", journal).best is None


@pytest.mark.parametrize("content", ["what is this\n", '{"op": 1}\n', "[]\n"])
def test_a_damaged_journal(tmp_path: Path, content: str) -> None:
    (tmp_path / "j").write_text(content)
    with pytest.raises(BadInput, match=r"cannot go on from the journal .* delete it"):
        Search([Knob("x", 0, 1)], "one", tmp_path / "j")


def interrupt(values: Mapping[str, float]) -> float:
    raise KeyboardInterrupt


def test_without_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(OutriderError, match=r'pip install "outrider\[tune\]"'):
        tune.optuna()


def workload(name: str, count: int) -> Workload:
    return Workload(name, "built-in", tuple(Prompt(({"role": "user", "content": f"{name} {i}"},)) for i in range(count)))


def test_halves_share_no_prompt_and_mix_the_workloads() -> None:
    search, held = tune.halves([workload("a", 3), workload("b", 9)], 7)
    said = [[p.messages[0]["content"] for p in half.prompts] for half in (search, held)]
    assert said == [["a 0", "a 1", "a 2", "b 3"], ["b 0", "b 1", "b 2"]]
    with pytest.raises(BadInput, match="two prompts or more"):
        tune.halves([workload("a", 1)], 8)


def test_what_can_be_tuned() -> None:
    assert tune.tunable("layer_skip") is LayerSkip
    with pytest.raises(BadInput, match="no options to search for; those that have: early_exit, layer_skip"):
        tune.tunable("ngram")
    with pytest.raises(BadInput, match="at least 1 trial"):
        Sizes(trials=0)
    assert tune.quick(Sizes(trials=500, prompts=2)) == Sizes(trials=10, prompts=2, max_tokens=24, repeats=2)


def row(ratios: list[float], equal: int = 4) -> SimpleNamespace:
    speedup = Speedup.of(ratios)
    return SimpleNamespace(speedup=speedup, verdict=speedup.verdict, tau=1.5, alpha=0.5, equal=equal, compared=4)


@pytest.mark.parametrize(
    ("ratios", "equal", "enabled"),
    [([1.2, 1.3, 1.25], 4, True), ([0.9, 0.95, 0.92], 4, False), ([1.0, 1.0, 1.0], 4, False), ([1.2, 1.3, 1.25], 3, False)],
)
def test_only_what_wins_on_held_out_prompts_is_enabled(ratios: list[float], equal: int, enabled: bool) -> None:
    tuner = Fake()
    tuner.answers = lambda spec, workload, repeats: row(ratios, equal)
    found = tuner.verdict(tune.Best({"exit": 2, "depth": 3, "floor": 0.25}, 9.0, 5))
    assert (found.enabled, found.options) == (enabled, {"exit": "2", "depth": "3", "floor": "0.250"})
    assert found.speedup == sorted(ratios)[1] and found.more["search"]["speedup"] == 9.0
    assert tuner.asked == [("early_exit:exit=2,depth=3,floor=0.250", "held-out", 3)]


class Fake(Tuner):
    """A tuner whose measurements are made up."""

    fingerprint = "0" * 16
    layers = 6

    def __init__(self, **sizes: object) -> None:
        super().__init__(SimpleNamespace(name="fake"), "early_exit", tune.halves([workload("a", 4)], 4), Sizes(**sizes))  # type: ignore[arg-type]
        self.asked: list[tuple[str, str, int]] = []
        self.answers: Callable[..., SimpleNamespace] = lambda spec, workload, repeats: row([1.0])

    def measure(self, spec, workload, repeats):
        self.asked.append((spec, workload.name, repeats))
        return self.answers(spec, workload, repeats)


def test_as_many_trials_as_asked_for_earlier_ones_included(tmp_path: Path) -> None:
    tuner = Fake(trials=5)
    tuner.run(tuner.search(tmp_path / "j"))
    assert len(tuner.asked) == 5 and all(w == "search" and n == 1 for _, w, n in tuner.asked)
    assert tuner.asked[0][0] == "early_exit:exit=5,depth=4,floor=0.600"
    more = Fake(trials=7)
    more.run(more.search(tmp_path / "j"))
    assert len(more.asked) == 2
    assert more.run(more.search(tmp_path / "j")).trials == 7 and len(more.asked) == 2


def test_time_is_up(tmp_path: Path) -> None:
    now = [0.0]
    tuner = Fake(trials=100, minutes=2)
    tuner.clock = lambda: now[0]

    def answers(*args: object) -> SimpleNamespace:
        now[0] += 50.0
        return row([1.0])

    tuner.answers = answers
    assert tuner.run(tuner.search(tmp_path / "j")).trials == 3


def test_too_few_layers(tmp_path: Path) -> None:
    tuner = Fake()
    tuner.layers = 1  # type: ignore[misc]
    with pytest.raises(BadInput, match="fake has too few layers"):
        tuner.search(tmp_path / "j")
