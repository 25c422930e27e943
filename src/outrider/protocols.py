"""The seams: stubs and contracts only. Anything that honours one of these can take its place.

Third parties implement `Drafter` (one file, see examples/); the rest is for those who bring a model, a cache or a
controller of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from .config import SamplingParams
from .types import Batch, Budget, Part, PassOutput, Proposal, Request, Scores, Slots, StepEvent, Verdict


@dataclass(frozen=True, slots=True)
class KVNeed:
    """KV memory a drafter wants in the target's pool, under the target's own block ids."""

    layers: int
    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter asks of the engine. Declared once, never sniffed; what is not asked for is not captured.

    `features`: `"hidden:last"` (what enters the vocabulary head), `"hidden:2,15,27"` (inputs of those decoder layers, side by
    side; `mid` is layer L//2, -3 is L - 3: rounds then show it by number), each `[R, width]` for every row of every pass,
    prompt rows included. `logits`: raw fp32 logits of the scored rows. `kv`: pool memory. `target`: a `TargetView`, handed to
    `start`. `gaps`: a prompt's beginning may be taken over from earlier requests; its rows (`Request.taken`) are never shown."""

    features: tuple[str, ...] = ()
    logits: bool = False
    kv: KVNeed | None = None
    target: bool = False
    gaps: bool = False

    @property
    def every(self) -> bool:
        """Whether every prompt row must be shown."""
        return bool(self.features) and not self.gaps


class Cache(Protocol):
    """KV memory of one model. Virtual index i of a request is its i-th known token, or, past them, a draft node.

    `reserve` makes `room` for virtual indices below `length`, or returns False and changes nothing. `slots` maps virtual
    indices to pool slots. `keys(layer)` and `values(layer)` are `[slots, heads, dim]`. `move` copies virtual `source` to `start,
    start + 1, ...` in every layer (also of attached drafter memory), reading everything before it writes; `copy` does so between
    pool slots. `scrub` zeroes what a request wrote. `price` tells how much free memory `reserve` would take. A cache may
    share blocks within a `Request.group`. `find` gives those that hold the beginning of some tokens, `head` those of a
    running request; a request that `adopt`s them begins with their tokens, and must not write there. `publish` notes that the
    KV of a request's first tokens is final, so that others may find it, even after its release. `attach`ed memory shares the
    slots, so that attaching forgets all that was published; `detach` gives it back."""

    capacity: int
    block_size: int
    scratch_slot: int

    def reserve(self, request: Request, length: int) -> bool: ...
    def room(self, request: Request) -> int: ...
    def slots(self, request: Request, start: int, end: int) -> Tensor: ...
    def table(self, requests: Sequence[Request]) -> Tensor: ...
    def view(self, layer: int, request: Request, length: int) -> tuple[Tensor, Tensor]: ...
    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None: ...
    def move(self, request: Request, source: Tensor, start: int) -> None: ...
    def copy(self, source: Tensor, target: Tensor) -> None: ...
    def trim(self, request: Request, length: int) -> None: ...
    def release(self, request: Request) -> None: ...
    def scrub(self, request: Request) -> None: ...
    def free(self) -> int: ...
    def price(self, request: Request, length: int, blocks: tuple[int, ...] = ()) -> int: ...
    def find(self, tokens: Sequence[int], most: int, grain: int, group: str | None = None) -> tuple[int, ...]: ...
    def head(self, request: Request, length: int) -> tuple[int, ...]: ...
    def adopt(self, request: Request, blocks: tuple[int, ...]) -> None: ...
    def publish(self, request: Request, length: int) -> None: ...
    def attach(self, need: KVNeed) -> PoolView: ...
    def detach(self, pool: object) -> None: ...
    def reattach(self, pool: object) -> None: ...


class Sampler(Protocol):
    """From logits to tokens: the request's processors and its noise (see `sampling.py`).

    `scores` gives `[S, V]` perturbed scores, -inf where a processor forbids a token: their argmax is the token, their best few
    are a tree's children. `choose` is that argmax, without the work of scores nobody reads; NONE where no token is allowed or
    the logits are not finite. `law` gives the unnormalised log-probabilities it draws from, `[S, at most V]`. `check`
    raises `BadInput` for ids outside the vocabulary. `logits [S, V]` are not changed."""

    def scores(self, logits: Tensor, slots: Slots) -> Tensor: ...
    def choose(self, logits: Tensor, slots: Slots) -> Tensor: ...
    def law(self, logits: Tensor, slots: Slots) -> Tensor: ...
    def check(self, params: SamplingParams, bad_words: Sequence[Sequence[int]] = ()) -> None: ...
    def release(self, request: Request) -> None: ...


class DraftSampler(Sampler, Protocol):
    """The sampler lent to drafters. For requests under a classical rule its noise is the draft stream's, and it remembers what
    each slot's children were drawn from; for the rest it is the target's.

    A drafter that took slot s's children from its scores of slot s, the best ones in falling order, their number settled before
    it looked (`Request.sampled`), says so with `attach`, which puts those probabilities into `Proposal.q`. One that does not is
    as exact, and its guesses are accepted as often as the target would draw them by itself."""

    def attach(self, batch: Batch, proposal: Proposal) -> Proposal: ...


class PoolView(Protocol):
    """A drafter's own KV in the target's pool: layers numbered from 0, slots shared with the target's block tables."""

    block_size: int

    def keys(self, layer: int) -> Tensor: ...
    def values(self, layer: int) -> Tensor: ...
    def table(self, requests: Sequence[Request]) -> Tensor: ...
    def view(self, layer: int, request: Request, length: int) -> tuple[Tensor, Tensor]: ...
    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None: ...
    def slots(self, request: Request, start: int, end: int) -> Tensor: ...


class TargetView(Protocol):
    """The target, lent to drafters that asked for it.

    `run` feeds the slots from `start` on (slot 0 stands for all pending tokens) through `layers` of the target, in
    order, at their true positions; a `Part` stands for a layer without its attention or its MLP. The batch may be some of the
    round's requests. `hidden` continues from states of an earlier run instead of embeddings. KV goes where verification will
    put it: `"scratch"` will be overwritten by the pass, `"shared"` promises that the layers ran are a prefix of the model, so
    that `Proposal.resume` may skip them. Slots before `start` must have been run in this round.

    `recall` reads the last `count` known tokens of a request once more through `layers`, over a copy of the KV, and gives raw
    logits `[count, V]` of what follows each; None where memory does not allow it. `signature` tells models, dtypes and kinds of
    device apart, for what is measured on one and remembered. A drafter's own states of `kv="shared"` count until a run with
    `"scratch"` writes over them.

    `rows` gives the weights of embeddings and vocabulary head, `[V, H]` each, for drafters that store none of their own. `stage`
    is where a drafter's work can be captured (`models.replay.Stage`), None where it cannot."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    max_len: int
    device: torch.device
    sampler: DraftSampler
    signature: str
    stage: Any

    def run(
        self,
        batch: Batch,
        nodes: Proposal,
        layers: Sequence[int | Part],
        start: int = 0,
        hidden: Tensor | None = None,
        kv: Literal["scratch", "shared"] = "scratch",
    ) -> PassOutput: ...

    def rows(self) -> tuple[Tensor, Tensor]: ...
    def recall(self, request: Request, layers: Sequence[int | Part], count: int) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class Start:
    """What a drafter is given once, before the first round: facts about the target, and what it declared it needs. `vocab` maps
    token strings to ids, where the `tokenizer` is known; `kv_tokens` is how many tokens the target's KV pool holds, in blocks of
    `kv_block`; `usable`: ids below it can be chosen. `fingerprint` tells the target's weights apart (empty: not known). `alone`:
    all guesses of a round are its own."""

    name: str
    vocab_size: int
    max_len: int
    device: torch.device
    dtype: torch.dtype
    sampler: DraftSampler
    vocab: Mapping[str, int] | None = None
    view: TargetView | None = None
    pool: PoolView | None = None
    kv_tokens: int = 0
    kv_block: int = 64
    usable: int = 0
    tokenizer: Tokenizer | None = None
    fingerprint: str = ""
    alone: bool = True


class Target(Protocol):
    """The model that decides. `admits`: `score` will itself put right what could not be in guesses on the device. `place` puts
    guesses where `score` wants them. `score` runs one pass over pending tokens and guesses; `keep` makes the accepted path's KV
    the sequence's and forgets the rest; `release` forgets a request."""

    vocab_size: int
    max_len: int
    device: torch.device
    cache: Cache
    sampler: Sampler
    watched: bool

    def admits(self, batch: Batch, proposal: Proposal) -> bool: ...
    def place(self, batch: Batch, proposal: Proposal) -> Proposal: ...
    def score(self, batch: Batch, proposal: Proposal) -> Scores: ...
    def keep(self, batch: Batch, proposal: Proposal, verdict: Verdict) -> None: ...
    def release(self, request: Request) -> None: ...


@runtime_checkable
class Drafter(Protocol):
    """Guesses. Nothing it does can change the text: a wrong guess costs time, a crash switches it off.
    `depth` and `nodes` say how far it would like to look ahead; the controller may give less. `start` is called once.
    `propose` returns guesses for `batch` within `budget` and must not change the batch; a request with
    `budget.nodes[b] == 0` gets none. `observe` runs every round, prefill included, after the verdict and before the committed
    tokens appear in `request.tokens`, which tell the whole truth; a drafter may have been idle for any number of rounds."""

    name: str
    depth: int = 8
    nodes: int = 8
    needs: Needs = Needs()

    def follows(self, requests: Sequence[Request], guessing: bool = True) -> bool:
        """Whether neither its notes of these requests nor (if `guessing`) its guesses need a round to be read."""
        return not guessing and not self.needs.features

    def memory(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of the device that `start` will take: once, and for each token of the target's KV pool (beside `needs.kv`)."""
        return 0, 0

    def start(self, start: Start) -> None:
        """Learn what the target is; raise `DrafterMismatch` if the two do not fit."""

    def renew(self) -> bool:
        """Forget all texts, as if just started (see `Learning`); False where that cannot be: another is made. No request runs."""
        return False

    def propose(self, batch: Batch, budget: Budget) -> Proposal: ...

    def preview(self, request: Request, most: int) -> list[int] | None:
        """A chain of up to `most` tokens that `propose` would guess now, where that costs the device nothing and the host hardly
        anything; else None, for every request."""
        return None

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        """See what became of the round's guesses. The next round writes over what `scores` shows: copy what is to stay."""

    def release(self, request: Request) -> None:
        """Forget a request."""


@runtime_checkable
class Isolating(Protocol):
    """A drafter that learns from finished texts, and can keep those of one `Request.group` from drafting for another's: from the
    call of `isolate` on. Without it, all share."""

    def isolate(self) -> None: ...


@runtime_checkable
class Learning(Protocol):
    """A drafter that learns how often guesses come true, as a controller does, and keeps that when it is renewed: `learned` is a
    copy of it, `relearn` puts one in the place of what was learned since."""

    def learned(self) -> Any: ...
    def relearn(self, learned: Any) -> None: ...


@runtime_checkable
class Sharing(Protocol):
    """A drafter whose own KV in the target's pool goes to whoever begins alike, together with the target's: that of the `shared`
    first tokens of a request, by now."""

    def shared(self, request: Request) -> int: ...


@runtime_checkable
class Replayer(Protocol):
    """A drafter that is told answers beforehand and plays them back: a measuring instrument, no drafting method. Whoever shows
    what it reached must say so; nothing picks it by itself. Without a recording of a request it guesses nothing."""

    def record(self, prompt: Sequence[int], params: SamplingParams, answer: Sequence[int]) -> None:
        """Remember the plain answer to a prompt under these parameters. `BadInput` if it cannot be replayed."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target as a trained drafter's builder sees it: its config (as in `config.json`), the fp32 or bf16 weights `[V, H]` of
    embeddings and vocabulary head, how often each token was written (`counts [V]`, int64), a hash of the weights, and the module
    itself for those who change it (see `Renewal`)."""

    name: str
    config: Mapping[str, Any]
    embeddings: Tensor
    head: Tensor
    counts: Tensor
    fingerprint: str
    model: torch.nn.Module | None = None


@dataclass(frozen=True, slots=True)
class Lesson:
    """Texts as the target saw them. `tokens [B, T]` int64; `taught [B, T]` bool: tokens a loss may be asked to predict (answers,
    not prompts or padding); `real [B, T]` bool: no padding; `features` by name `[B, T, width]`; `logits` turns rows of
    `hidden:last` `[..., H]` into the target's fp32 scores `[..., V]`; `places`: see `where`."""

    tokens: Tensor
    taught: Tensor
    real: Tensor
    features: Mapping[str, Tensor]
    logits: Callable[[Tensor], Tensor]
    places: tuple[Tensor, Tensor] | None = None

    def where(self) -> tuple[Tensor, Tensor]:
        """Row and column `[N]` of every taught token. Asking `taught` would wait for the device; the loop knows without."""
        return self.places or self.taught.nonzero(as_tuple=True)  # type: ignore[return-value]


class Pupil(Protocol):
    """A drafter's weights while they are being trained. A drafter class that can be trained has a class method
    `pupil(teacher, options)` beside `propose`, where `options` are its training options by name, typed and complete if it has a
    nested frozen dataclass `Training` of them. `loss` gives a scalar and figures to show by name, of which `acceptance` (the
    share of guesses that are the target's own, or one by position `[K]`) decides how long training goes on; `save` writes a
    directory, which the drafter's `path` option accepts, of safetensors and `config.json` alone. A pupil may have a `rate`, the
    learning rate that suits it."""

    module: torch.nn.Module
    features: tuple[str, ...]

    def loss(self, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]: ...
    def save(self, directory: Path) -> None: ...


@runtime_checkable
class Renewal(Protocol):
    """A pupil that changes the target as it learns: a new target comes out, and a drafter of that one alone. `save_target` writes
    its weights and config; `rename` tells the pupil its name and the hash of its weights before `save`. The options' dataclass
    (`Training`) says so beforehand by a true `changes_target`."""

    def save_target(self, directory: Path) -> None: ...
    def rename(self, name: str, fingerprint: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Knob:
    """An option to be searched for, from `low` to `high`, both included; `whole` numbers only, or any. 0 or 1 is a switch."""

    name: str
    low: float
    high: float
    whole: bool = True


@runtime_checkable
class Forcing(Protocol):
    """A logits processor that can tell what comes next: `forced` gives up to `most` tokens that the sequence `tokens` (prompt
    included) must go on with, or nearly so. They are guesses like any other: wrong ones cost time and change nothing."""

    def __call__(self, tokens: Sequence[int], scores: Tensor) -> Tensor: ...
    def forced(self, tokens: Sequence[int], most: int) -> Sequence[int]: ...


class AcceptanceRule(Protocol):
    """Decides which guesses are kept. A pure function of its arguments. Randomness comes from streams keyed by (request key,
    purpose, round start, slot); what a rule compares comes from `Scores.choice` (coupled) or `Scores.processed` (the rest)."""

    name: str
    lossless: bool

    def __call__(self, proposal: Proposal, scores: Scores, batch: Batch) -> Verdict: ...


class Controller(Protocol):
    """Decides how far to look ahead, and learns from what came of it. `budget` comes before drafting and may use past rounds
    only. Where it is `resting`, nobody would get guesses in the next round, whatever the last one brings: then `rest` may stand
    for `budget` before that one was read. `cut` comes after drafting and may drop guesses, but none that a classical rule draws.
    `explain` says in one line what was done, and why."""

    name: str

    @property
    def resting(self) -> bool: ...
    def rest(self, batch: Batch) -> Budget: ...
    def budget(self, batch: Batch) -> Budget: ...
    def cut(self, batch: Batch, proposal: Proposal) -> Proposal: ...
    def observe(self, event: StepEvent) -> None: ...
    def explain(self) -> str: ...


class Sink(Protocol):
    """Anything that wants to hear of every round."""

    def __call__(self, event: StepEvent) -> None: ...


class Tokenizer(Protocol):
    """The little that text handling needs of a tokenizer."""

    def encode(self, text: str, special: bool = True) -> list[int]: ...
    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str: ...
