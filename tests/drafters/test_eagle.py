"""EAGLE: what it guesses against a slow reference, its trees, its memory of states, and what training brings."""

from __future__ import annotations

import itertools

import pytest
import torch

from outrider import registry, tree
from outrider.bench.probes import Replay
from outrider.config import SamplingParams
from outrider.drafters._eagle import EaglePupil, EagleTraining
from outrider.drafters._known import KnownKV
from outrider.drafters._past import Past, together
from outrider.drafters._unrolled import Joined, plain, unrolled
from outrider.drafters.eagle import Eagle
from outrider.drafters.hybrid import Hybrid
from outrider.errors import BadInput, DrafterMismatch
from outrider.models import checkpoint, eagle_files
from outrider.models.hf import resolved
from outrider.types import Batch, Budget

from .. import heads, probes, tiny

KINDS = {
    "three": {},
    "few": {"vocab": 20},
    "own": {"rows": "own", "vocab": 30},
    "switches": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "one": {"version": 1},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def states(tokens, feature):
    """The tiny target's states of all tokens, by transformers alone."""
    model = tiny.model()
    out = model.base_model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    named = {str(i): h[0] for i, h in enumerate(out.hidden_states[:-1])} | {"last": out.last_hidden_state[0]}
    return torch.cat([named[part] for part in feature.removeprefix("hidden:").split(",")], -1)


def reference(drafter, tokens, guesses):
    """Logits over the drafter's vocabulary after `tokens + guesses`, all of it run anew: true states as far as there are any,
    then the network's own. One causal pass per guess, no cache."""
    net = drafter.net
    hidden = net.fuse(states(tokens[:-1], drafter.feature))[None]
    for level in range(len(guesses) + 1):
        line = torch.tensor([tokens[1:] + guesses[:level]])
        x, residual = net.enter(hidden, line)
        query, key, value = net.project(x, torch.arange(line.shape[1])[None])
        out = net.leave(residual, unrolled(query, [(key, value)], net.scale))
        hidden = torch.cat([hidden, net.back(out[:, -1:])], 1)
    return net.scores(out)[0, -1]


def favourite(drafter, tokens, guesses):
    best = int(reference(drafter, tokens, guesses).argmax())
    return best if drafter.climber.ids is None else int(drafter.climber.ids[best])


def rounds(drafter, made, world=None, whole=None, **scheduling):
    """Every round's (known tokens, guesses as paths, depth asked for) of every request that had any. `whole`: the drafter that
    has this one as a member."""
    world = world or tiny.World()
    engine = world.engine(whole or drafter, **scheduling)
    seen = []
    propose = drafter.propose

    def spy(batch, budget):
        out = propose(batch, budget)
        paths, depth = tree.path_tokens(out) if out.columns else (None, None)
        for b, request in enumerate(batch.requests):
            mine = [paths[b, s + 1, : depth[b, s + 1]].tolist() for s in range(int(out.sizes[b]))] if out.columns else []
            seen.append((list(request.tokens), mine, budget.depth[b]))
        return out

    drafter.propose = spy
    for request in made:
        engine.add(request)
    while engine.step() is not None:
        pass
    assert engine.drafter.working, engine.drafter.reason
    return [found for found in seen if found[1]]


def ragged(count=3, params=GREEDY, **extra):
    return [tiny.request(p, params, seed=i, **extra) for i, p in enumerate(tiny.prompts(count, seed=5, low=2))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_the_networks_favourite_at_every_step(kind):
    drafter = heads.eagle(width=1, depth=3, **KINDS[kind])
    seen = rounds(drafter, ragged())
    assert len(seen) > 20
    for tokens, paths, _ in seen[::2]:
        chain = max(paths, key=len)
        for level, token in enumerate(chain):
            assert token == favourite(drafter, tokens, chain[:level])


@pytest.mark.parametrize("kind", ["three", "one"])
def test_every_node_of_a_tree_is_scored_along_its_own_path(kind):
    """A node that has children has its likeliest one among them: the reference run along its path says which that is."""
    drafter = heads.eagle(width=3, depth=4, nodes=14, **KINDS[kind])
    checked = 0
    for tokens, paths, depth in rounds(drafter, ragged(2))[::3]:
        assert len({tuple(p) for p in paths}) == len(paths) and (len(paths) == 14 or depth < 4)
        for path in [[], *paths]:
            children = [p[-1] for p in paths if p[:-1] == path and len(p) == len(path) + 1]
            if children:
                assert favourite(drafter, tokens, path) in children
                checked += 1
    assert checked > 30


def test_a_tree_keeps_the_likeliest_of_what_was_offered():
    """Against the same search done by hand."""
    drafter = heads.eagle(width=2, depth=3, nodes=5)
    for tokens, paths, depth in rounds(drafter, ragged(2))[::4]:
        assert sorted(map(tuple, paths)) == sorted(by_hand(drafter, tokens, 2, depth, 5))


def by_hand(drafter, tokens, width, depth, nodes):
    offered, front = {}, {(): 0.0}
    for _ in range(depth):
        level = {}
        for path, total in front.items():
            logp = reference(drafter, tokens, list(path)).log_softmax(-1)
            for token in logp.topk(width).indices.tolist():
                level[(*path, token)] = total + float(logp[token])
        offered |= level
        front = dict(sorted(level.items(), key=lambda item: -item[1])[:width])
    return [p for p, _ in sorted(offered.items(), key=lambda item: -item[1])[:nodes]]


@pytest.mark.parametrize("chunk", [3, 7])
def test_prompts_in_chunks(chunk, monkeypatch):
    monkeypatch.setattr("outrider.scheduler.CHUNK", chunk)
    monkeypatch.setattr("outrider.drafters.eagle._FEW", 2)
    monkeypatch.setattr("outrider.drafters.eagle._CHUNK", 4)
    check_chains(heads.eagle(width=1, depth=2), ragged())


@pytest.mark.parametrize(("wide", "together"), [(1, False), (40, True), (2048, True)])
def test_prompts_of_several_requests_are_read_together(wide, together, monkeypatch):
    monkeypatch.setattr("outrider.drafters._known.WIDE", wide)
    drafter, fed, store = heads.eagle(width=1, depth=2), [], KnownKV._store
    monkeypatch.setattr(KnownKV, "_store", lambda self, chunks: fed.append(len(chunks)) or store(self, chunks))
    made = [tiny.request(p, GREEDY) for p in tiny.prompts(6, seed=2, low=3, high=14)]
    check_chains(drafter, made)
    assert (max(fed) > 1) == together


def check_chains(drafter, made, world=None, least=20, **scheduling):
    seen = rounds(drafter, made, world, **scheduling)
    assert len(seen) >= least
    for tokens, paths, _ in seen[::3]:
        chain = max(paths, key=len)
        assert chain == [favourite(drafter, tokens, chain[:level]) for level in range(len(chain))]


@pytest.mark.parametrize("grain", [0, 8])
def test_preempted_requests_are_drafted_for_as_before(grain):
    params = SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)
    made = [tiny.request(p, params) for p in tiny.prompts(6, seed=3)]
    world = tiny.World(tokens=96)
    world.cache.release, given = (lambda r, f=world.cache.release: (given.append(r.id), f(r))), []
    check_chains(heads.eagle(width=1, depth=2), made, world, least=40, grain=grain)
    assert any(r.taken for r in made) == bool(grain)
    assert len(given) > len(made), "nobody was preempted"


HEAD = [2 + (i * 7) % 40 for i in range(44)]


def kept(drafter, member=True):
    """The drafter alone, or as a member of a hybrid."""
    return Hybrid.of([registry.parse("none"), drafter], merge=True) if member else None


@pytest.mark.parametrize("member", [False, True])
def test_beginnings_that_were_taken_over_have_its_memory(member):
    """Prompts and answers of earlier requests: guesses behind them are those of the whole text."""
    world, drafter = tiny.World(), heads.eagle(width=1, depth=2)
    [answer] = tiny.World().run(registry.parse("none"), [tiny.request(HEAD, GREEDY)])
    made = [tiny.request(p, GREEDY) for p in (HEAD, HEAD, HEAD + answer[:13] + [5, 6])]
    check_chains(drafter, made, world, whole=kept(drafter, member), grain=8, max_requests=1)
    assert [r.taken for r in made] == [0, 40, 56]


def test_what_it_has_not_seen_is_not_shared():
    """It slept through the prompts and has no memory of them: others start anew."""
    drafter = heads.eagle(width=1, depth=2)
    sleeper = probes.Sleeper(drafter, 1)
    sleeper.shared = drafter.shared
    made = [tiny.request(HEAD, GREEDY) for _ in range(2)]
    tiny.World().run(sleeper, made, grain=8, max_requests=1)
    assert sleeper.woken and [r.taken for r in made] == [0, 0]


def test_draws_do_not_depend_on_who_came_before():
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=3)
    made = [tiny.request(HEAD, params, rule="block") for _ in range(2)]
    texts = tiny.World().run(heads.eagle(width=1, depth=2), made, "block", grain=8, max_requests=1)
    assert texts[0] == texts[1] and made[1].taken == 0


def test_samples_of_one_prompt_share_its_states():
    params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    prompt = tiny.prompts(1, seed=9, low=30)[0]
    first = tiny.request(prompt, params, seed=1)
    made = [first] + [tiny.request(prompt, params, seed=2 + i, index=i + 1, twin=first) for i in range(2)]
    drafter = heads.eagle(width=1, depth=2)
    pasts = {}
    observe = drafter.observe

    def spy(batch, *rest):
        observe(batch, *rest)
        pasts.update({r.id: drafter._pasts[r.id].base for r in batch.requests})

    drafter.observe = spy
    check_noisy(drafter, made)
    assert pasts == {r.id: 0 for r in made}


def check_noisy(drafter, made):
    """At T > 0 guesses are the best of the network's logits plus the noise that the target will add."""
    world = tiny.World()
    for tokens, paths, _ in rounds(drafter, made, world)[::2]:
        owners = [r for r in made if r.tokens[: len(tokens)] == tokens]
        chain = max(paths, key=len)
        assert any(chain == noisy(world, drafter, r, tokens, len(chain)) for r in owners)


def noisy(world, drafter, request, tokens, count):
    from outrider.sampling import TextSampler
    from outrider.types import Slots

    twin = tiny.request(tokens, request.params)
    twin.key, twin.prompt_len = request.key, request.prompt_len
    sampler, chain = TextSampler(tiny.VOCAB), []
    for level in range(count):
        one = torch.ones(1, dtype=torch.int64)
        slots = Slots((twin,), 0 * one, (len(tokens) + level) * one, torch.tensor([chain], dtype=torch.int64), level * one)
        chain.append(int(sampler.choose(reference(drafter, tokens, chain)[None], slots)))
    return chain


def test_guesses_carry_the_targets_noise():
    check_noisy(heads.eagle(width=1, depth=3), ragged(2, SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True)))


@pytest.mark.parametrize("merge", [False, True])
def test_as_a_member_it_learns_from_others_guesses(merge, monkeypatch):
    """Tokens that somebody else guessed right have states, too."""
    monkeypatch.setattr("outrider.drafters.hybrid._EXPLORE", 2)  # ask everybody in every other round,
    monkeypatch.setattr("outrider.drafters._members._LOOKS", 1e9)  # whatever time it takes
    params = SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)
    plain = ragged(params=params)
    tiny.World().run(registry.parse("none"), plain)
    answers = {tuple(r.tokens[: r.prompt_len]): r.output for r in plain}
    drafter = heads.eagle(width=1, depth=2)
    other = Replay(answers, depth=4, spoil=0.3)
    whole = Hybrid.of([other, drafter], merge)
    made = ragged(params=params)
    check_chains(drafter, made, whole=whole, least=8)
    assert sum(r.stats.accepted for r in made) > 10


@pytest.mark.parametrize("nap", [2, 5])
def test_rounds_without_guesses_leave_no_hole(nap, monkeypatch):
    """A controller that rests between rounds: states seen meanwhile are read when guessing goes on."""
    monkeypatch.setattr("outrider.drafters.eagle._CHUNK", 4)
    world = tiny.World()
    counter = itertools.count()

    class Resting:
        def __init__(self, drafter):
            from outrider.control import Fixed

            self.inner = Fixed(drafter)

        def budget(self, batch):
            return self.inner.budget(batch) if next(counter) % (nap + 1) == 0 else Budget.none(len(batch))

        def __getattr__(self, name):
            return getattr(self.inner, name)

    world.control = Resting
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    check_chains(heads.eagle(width=1, depth=2), ragged(2, params), world, least=8)


def test_guessing_twice_gives_the_same():
    """A round that is lost is done again."""
    drafter = heads.eagle()
    world = tiny.World()
    engine = world.engine(drafter)
    request = tiny.request([3, 5, 7, 9], GREEDY)
    engine.add(request)
    for _ in range(4):
        engine.step()
    world.cache.reserve(request, len(request.tokens) + 9)
    batch = Batch((request,), (1,), (True,), (9,))
    first, second = (drafter.propose(batch, Budget((4,), (9,))) for _ in range(2))
    assert first.columns and torch.equal(first.tokens, second.tokens) and torch.equal(first.parents, second.parents)


def test_the_past_is_kept_in_order():
    past = Past()
    line = torch.arange(40.0)[:, None]
    past.add(0, line[:8])
    assert past.rows(2, 6).tolist() == line[2:6].tolist() and past.rows(6, 9) is None
    past.read(5)
    assert past.computed == 5 and past.rows(4, 8).tolist() == line[4:8].tolist() and past.unread(8) == 3
    past.add(6, line[6:12])  # of the round before only two rows were accepted
    past.add(7, line[7:9])
    assert past.rows(4, 9).tolist() == line[4:9].tolist() and past.base == 0
    past.add(20, line[20:22])  # a gap
    assert (past.base, past.computed, past.rows(8, 21)) == (20, 20, None)
    past.add(0, line[:3])  # computed anew
    assert (past.base, past.computed) == (0, 0) and past.rows(0, 3).tolist() == line[:3].tolist()


# Training


def lessons(pupil, rows=24, length=24):
    return heads.lesson(pupil.features, rows, length)


def trained(steps=60, lr=3e-3, **options):
    torch.manual_seed(0)
    pupil = EaglePupil(heads.teacher(), EagleTraining(**({"steps": 3} | options)))
    seen = lessons(pupil)
    optimiser = torch.optim.AdamW([p for p in pupil.module.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss, figures = pupil.loss(seen)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return pupil, losses, figures


@pytest.mark.parametrize("options", [*KINDS.values(), {"loss": "tv"}, {"loss": "hybrid", "vocab": 20}], ids=str)
def test_training_brings_it_closer(options):
    _, losses, figures = trained(30, **options)
    assert losses[-1] < 0.85 * losses[0]
    assert figures["acceptance"].shape == figures["overlap"].shape == (3,)


def test_what_was_trained_is_accepted(tmp_path):
    pupil, _, figures = trained(100, lr=5e-3)
    assert float(figures["acceptance"].min()) > 0.5
    pupil.save(tmp_path / "trained")
    EaglePupil(heads.teacher(), EagleTraining()).save(tmp_path / "fresh")
    prompts, rate = lessons(pupil).tokens[:8, :4].tolist(), {}
    for name in ("trained", "fresh"):
        made = [tiny.request(p, GREEDY) for p in prompts]
        tiny.World().run(Eagle(Eagle.Config(path=str(tmp_path / name), depth=3, width=2, nodes=6)), made)
        rate[name] = sum(r.stats.accepted for r in made) / sum(r.stats.rounds for r in made)
    assert rate["trained"] > rate["fresh"] + 0.7, rate


@pytest.mark.parametrize("kind", KINDS)
def test_training_sees_what_drafting_does(kind):
    """The unrolled steps give, at every index, the logits that a fresh run along the same tokens gives."""
    drafter = heads.eagle(width=1, **KINDS[kind])
    tiny.World().engine(drafter)
    tokens = tiny.prompts(1, seed=8, low=12)[0]
    net = drafter.net
    pupil = EaglePupil.__new__(EaglePupil)
    pupil.net = net
    hidden, past = net.fuse(states(tokens, drafter.feature)[:-1])[None], []
    for k in range(3):
        line = torch.nn.functional.pad(torch.tensor([tokens[1 + k :]]), (0, k))
        out = pupil._step(hidden, line, past)
        for t in range(1, len(tokens) - 1 - k):
            want = reference(drafter, tokens[: t + 2], tokens[t + 2 : t + 2 + k])
            assert torch.allclose(net.scores(out)[0, t], want, atol=1e-5), (k, t)
        hidden = net.back(out)


def test_recomputed_attention_gives_the_same_gradients(monkeypatch):
    found = []
    for limit in (2**26, 1):
        monkeypatch.setattr("outrider.drafters._unrolled._SCORES", limit)
        torch.manual_seed(0)
        pupil = EaglePupil(heads.teacher(), EagleTraining(steps=3))
        loss, _ = pupil.loss(lessons(pupil, 3, 12))
        loss.backward()
        found.append(pupil.net.midlayer.self_attn.k_proj.weight.grad)
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_fused_kernels_way_is_that_of_the_definition(steps):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 9, 6, 8, generator=generator).requires_grad_()
    flat = [torch.randn(2, 9, 2, 8, generator=generator).requires_grad_() for _ in range(2 * steps)]
    weights = torch.randn(2, 9, 6, 8, generator=generator)
    found, wanted = Joined.apply(0.3, query, *flat), plain(query, list(zip(flat[::2], flat[1::2], strict=True)), 0.3)
    assert torch.allclose(found, wanted, atol=1e-5)
    slopes = [torch.autograd.grad(x, [query, *flat], weights) for x in (found, wanted)]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*slopes, strict=True))


def test_layers_by_name():
    assert resolved("hidden:2,mid,-3", 32) == "hidden:2,16,29" and resolved("hidden:last", 32) == "hidden:last"
    assert EaglePupil(heads.teacher(), EagleTraining()).features == ("hidden:2,1,0", "hidden:last")
    assert EaglePupil(heads.teacher(), EagleTraining(states="1+-1")).features[0] == "hidden:1,2"
    with pytest.raises(BadInput, match="does not have"):
        EaglePupil(heads.teacher(), EagleTraining(states="2+9"))


@pytest.mark.parametrize(
    "wrong",
    [{"version": 2}, {"steps": 0}, {"rows": "some"}, {"loss": "mse"}, {"decay": 2.0}, {"version": 1, "fc_norm": True}],
    ids=str,
)
def test_bad_training_options(wrong):
    with pytest.raises(BadInput):
        EagleTraining(**wrong)


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"width": 0}, {"nodes": 0}], ids=str)
def test_bad_options(wrong):
    with pytest.raises(BadInput, match=next(iter(wrong))):
        heads.eagle(**wrong)


def test_texts_too_short_are_refused():
    pupil = EaglePupil(heads.teacher(), EagleTraining(steps=6))
    with pytest.raises(BadInput, match="too short"):
        pupil.loss(heads.lesson(pupil.features, 2, 5))


def test_it_must_be_started_by_an_engine():
    world, drafter = tiny.World(), heads.eagle()
    from dataclasses import replace

    from outrider.loading import start_for

    start = start_for(world.target, drafter, "tiny", None)
    with pytest.raises(DrafterMismatch, match="pool"):
        drafter.start(replace(start, pool=None))
    assert checkpoint.KEY == "outrider" and eagle_files.LAYOUTS


def test_what_is_read_together_is_bounded():
    made = [tiny.request([1]) for _ in range(7)]
    lengths = [10, 9, 5, 4, 3, 1, 30]
    chunks = [(r, torch.zeros(n, 1), n) for r, n in zip(made, lengths, strict=True)]
    found = [[len(states) for _, states, _ in some] for some in together(chunks, 20)]
    assert found == [[10, 9], [5, 4, 3, 1], [30]], "in order, at most so many rows, or one request"
