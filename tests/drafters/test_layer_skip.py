"""layer_skip: what is left out is left out, where chains end, what tuning found is used, and the search keeps to its share."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from outrider import registry
from outrider.config import SamplingParams
from outrider.drafters import _tuned
from outrider.drafters._search import SHARE, Doses, Search, worth
from outrider.drafters.layer_skip import LayerSkip, many, usual
from outrider.errors import BadInput, DrafterMismatch, OutriderWarning
from outrider.models.hf import Decoder
from outrider.models.layout import Layout
from outrider.models.quantize import quantize
from outrider.models.target import View
from outrider.types import Batch, Part, Proposal

from .. import tiny
from ..contract.test_rules import LOSSLESS, p_value

PROMPTS = tiny.prompts(3, seed=5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def run(spec: str, params: SamplingParams = GREEDY, **options) -> list:
    made = [tiny.request(p, params) for p in PROMPTS]
    tiny.World().run(registry.parse(spec), made, **options)
    return made


def logits(decoder: Decoder, layers: list[Part] | None) -> torch.Tensor:
    world, request = tiny.World(own=decoder), tiny.request(list(range(2, 22)))
    world.cache.reserve(request, 20)
    layout = Layout.build(Batch((request,), (20,), (True,), (0,)), Proposal.empty(1), world.cache)
    found = decoder.forward(layout, world.cache, layers=layers).logits
    assert found is not None
    return found


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_what_is_left_out_adds_nothing(family: str) -> None:
    """The same scores as from weights with which those halves give zero."""
    whole = tiny.model(family)
    whole.model.layers[1].self_attn.o_proj.weight.zero_()
    whole.model.layers[2].mlp.down_proj.weight.zero_()
    for name in ("o_proj", "down_proj"):
        part = whole.model.layers[0].self_attn if name == "o_proj" else whole.model.layers[0].mlp
        getattr(part, name).weight.zero_()
    cut = [Part(1, attention=False), Part(2, mlp=False)]
    own = tiny.decoder(family)
    before = logits(own, None)
    assert (logits(own, cut) - logits(Decoder(whole, family), None)).abs().max() < 1e-9
    assert torch.equal(logits(own, None), before), "the decoder itself must stay whole"
    assert not torch.allclose(logits(own, cut), before)


def test_parts_out_of_place_are_a_mistake() -> None:
    for wrong in ([Part(1), Part(0)], [Part(1), 1], [Part(3)], [-1]):
        with pytest.raises(ValueError, match="distinct and in order"):
            logits(tiny.decoder(), wrong)  # type: ignore[arg-type]


def test_nothing_left_out_is_always_right() -> None:
    for request in run("layer_skip:attention=none,mlp=none,floor=0,depth=3"):
        assert (request.stats.drafted, request.stats.accepted) == (15, 15)


def test_a_chain_ends_where_the_draft_is_not_sure() -> None:
    drafted = [sum(r.stats.drafted for r in run(f"layer_skip:attention=1,floor={f}")) for f in (0, 0.5, 0.9)]
    assert drafted[0] > drafted[1] > drafted[2] > 0
    rates = [sum(r.stats.accepted for r in run(f"layer_skip:attention=1,floor={f}")) for f in (0, 0.5, 0.9)]
    assert rates[0] / drafted[0] < rates[1] / drafted[1] < rates[2] / drafted[2]


@pytest.mark.parametrize("accept", LOSSLESS)
def test_a_chain_that_ends_keeps_the_law(accept: str) -> None:
    """Whether there is a guess must not depend on what it would be."""
    drafter = registry.parse("layer_skip:attention=1,mlp=2,floor=0.3,depth=2")
    assert p_value(drafter, accept, count=1536) > 1e-4


def test_a_whole_batch_and_parts_of_it() -> None:
    made = [
        tiny.request(p, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))
        for p, n in zip(PROMPTS, (2, 9, 30), strict=True)
    ]
    plain = [tiny.request(r.tokens, r.params) for r in made]
    assert tiny.World().run(registry.parse("layer_skip:attention=1,depth=5"), made) == tiny.World().run(
        registry.parse("none"), plain
    )


@pytest.mark.parametrize("spec", ["depth=0", "floor=1", "floor=-0.1", "window=1", "attention=x", "mlp=1+", "attention=1-3"])
def test_bad_options(spec: str) -> None:
    with pytest.raises(BadInput, match="layer_skip"):
        registry.parse(f"layer_skip:{spec}")


def test_layers_that_are_not_there() -> None:
    with pytest.raises(DrafterMismatch, match="layer 3: tiny has layers 0 to 2"):
        run("layer_skip:attention=3")


def test_an_untuned_set_is_named() -> None:
    with pytest.warns(OutriderWarning, match=r"a guess for tiny: attention=1,mlp=none; .* outrider tune layer_skip"):
        run("layer_skip")
    for layers in (1, 2, 3, 4, 12, 30, 80):
        for skipped in (usual(layers), many(layers)):
            assert all(0 <= i < layers for half in skipped for i in half)
        names = {k.name for k in LayerSkip.knobs(layers)}
        assert all(set(guess) == names for guess in LayerSkip.guesses(layers))


def test_values_become_options() -> None:
    values = LayerSkip.guesses(12)[0] | {"attention.10": 1, "mlp.9": 1, "mlp.3": 1, "depth": 2, "floor": 0.25}
    assert LayerSkip.options(values) == {"attention": "2+5+8+10", "mlp": "3+9", "depth": "2", "floor": "0.250"}


def tuned(enabled: bool, speedup: float | None = 1.25) -> _tuned.Tuned:
    options = {"attention": "none", "mlp": "none", "depth": "3", "floor": "0.000"}
    return _tuned.Tuned("layer_skip", tiny.decoder().signature, options, enabled, speedup)


def test_what_tuning_found_is_used() -> None:
    _tuned.write(_tuned.place("layer_skip", tiny.decoder().signature), tuned(True))
    assert all((r.stats.drafted, r.stats.accepted) == (15, 15) for r in run("layer_skip"))
    assert all(r.stats.drafted == 0 or r.stats.accepted < r.stats.drafted for r in run("layer_skip:attention=0+1"))
    assert [r.stats.offered_at for r in run("layer_skip:depth=1")] == [[10]] * 3


def test_what_loses_is_not_used_unless_asked_for(cache: Path) -> None:
    file = cache / "mine.json"
    _tuned.write(file, tuned(False, 0.83))
    with pytest.warns(OutriderWarning, match=r"gives no guesses: the best that tuning found on tiny is 0.83 times"):
        assert all(r.stats.drafted == 0 for r in run(f"layer_skip:path={file}"))
    assert all(r.stats.drafted for r in run(f"layer_skip:path={file},attention=1,floor=0"))


def test_what_was_tuned_elsewhere_warns(cache: Path) -> None:
    file = cache / "mine.json"
    _tuned.write(file, dataclasses.replace(tuned(True), fingerprint="0" * 16))
    with pytest.warns(OutriderWarning, match=r"mine.json was tuned on another model than tiny"):
        assert all(r.stats.drafted for r in run(f"layer_skip:path={file}"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        ("{", "no file of tuned options"),
        ("[]", "no file of tuned options"),
        ('{"format": 1}', "no file of tuned options"),
        ({"format": 9}, "format 9"),
        ({"method": "early_exit"}, "options of early_exit"),
        ({"options": {"exit": "1"}}, "no key exit"),
        ({"options": {"depth": "x"}}, "depth must be int"),
    ],
)
def test_damaged_files(cache: Path, content: object, words: str) -> None:
    file = cache / "mine.json"
    if isinstance(content, str):
        file.write_text(content)
    elif isinstance(content, dict):
        _tuned.write(file, tuned(True))
        file.write_text(json.dumps(json.loads(file.read_text()) | content))
    with pytest.raises(BadInput, match=words):
        run(f"layer_skip:path={file}")


def test_models_have_signatures_of_their_own() -> None:
    assert Decoder(tiny.model(), "a").signature == Decoder(tiny.model(), "b").signature == tiny.decoder().signature
    others = {Decoder(tiny.model(**change), "c").signature for change in ({"seed": 1}, {"dtype": torch.float32})}
    assert len(others | {tiny.decoder().signature}) == 3


def test_quantised_models_have_signatures_of_their_own() -> None:
    pytest.importorskip("torchao")
    found = set()
    for scheme in ("none", "int8", "int4"):
        model = tiny.model(dtype=torch.float32, intermediate_size=64)
        if scheme != "none":
            quantize(model, scheme, "cpu")
        found.add(Decoder(model, scheme).signature)
    assert len(found) == 3


# The search while texts are written


def test_the_search_finds_what_was_planted() -> None:
    """Blocks of even number can be left out for nothing, each other one costs a tenth of the guesses."""
    layers = 24

    def value(skipped) -> float:
        return worth(max(0.0, 0.95 - 0.1 * sum(i % 2 for half in skipped for i in half)), skipped, layers)

    found = []
    for seed in range(3):
        search = Search(usual(layers), layers, seed)
        while not search.done:
            candidate = search.candidate()
            search.tell(candidate, value(candidate), value(search.best))
        found.append(value(search.best))
    ideal = frozenset(range(2, 23, 2))
    assert min(found) > 0.9 * value((ideal, ideal)) > 1.2 * value(usual(layers))


def test_the_search_keeps_to_its_share() -> None:
    now, spent = [0.0], [0.0]

    class Slow:
        num_layers = 6

        def recall(self, request, layers, count):
            now[0] += 0.5
            spent[0] += 0.5
            return torch.zeros(count, tiny.VOCAB)

    request = tiny.request([1, 2, 3])
    request.tokens += [4] * 40
    doses = Doses(Search(usual(6), 6), Slow(), 8, clock=lambda: now[0])  # type: ignore[arg-type]
    taken = 0
    for _ in range(2000):
        now[0] += 0.1
        if doses.due(request):
            doses.take(request)
            taken += 1
    assert taken > 5 and spent[0] <= SHARE * 200 + 1.0


def test_idle_time_is_not_writing() -> None:
    now = [0.0]
    doses = Doses(Search(usual(6), 6), None, 8, clock=lambda: now[0])  # type: ignore[arg-type]
    request = tiny.request([1, 2, 3])
    for _ in range(3):
        now[0] += 1000.0
        doses.due(request)
    assert doses.writing <= 3.0


def test_a_search_changes_the_set_and_not_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    world, drafter = tiny.World(), registry.parse("layer_skip:search=yes,window=12,attention=0,mlp=0,floor=0,depth=2")
    engine = world.engine(drafter)
    assert isinstance(drafter, LayerSkip) and drafter._doses is not None
    doses = drafter._doses
    monkeypatch.setattr(doses, "_clock", lambda: 0.0)
    request = tiny.request(PROMPTS[0], params)
    engine.add(request)
    while engine.step() is not None:
        pass
    assert engine.drafter.working, engine.drafter.reason
    assert doses.search.tries > 10 and doses.search.best != (frozenset({0}), frozenset({0}))
    assert world.cache.free() == world.cache.capacity
    assert tiny.World().run(registry.parse("none"), [tiny.request(PROMPTS[0], params)])[0] == request.output


def test_no_memory_no_search() -> None:
    world = tiny.World(tokens=40)
    doses = Doses(Search(usual(3), 3), View(world.target), 8)
    request = tiny.request(list(range(2, 42)))
    world.cache.reserve(request, 40)
    request.computed = 39
    assert not doses.take(request) and doses.search.tries == 0
