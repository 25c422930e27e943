"""The nouns. Everything is frozen except `Request`, the one thing with a life.

Shapes: B requests in a batch, N columns of the widest proposal, R rows of a packed pass, V vocabulary. *Slot* 0 of a request is
its last committed token, slot j + 1 is node j of its proposal; row s of any score tensor answers "what follows slot s". Positions
count tokens (depth), never slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from .config import SamplingParams
    from .text import TextStream

ROOT = -1
"""Parent of a node that hangs under the last committed token."""
PROBE = -1
"""`Proposal.source` of a node that is scored but is no guess (lookahead's window); never counted as drafted."""
FORCED = 1 << 16
"""`Proposal.source` of a guess that a request's own processors gave; no drafter has this number."""
NONE = -1
"""Padding in tables of columns and tokens."""

COUPLED = "coupled"
"""The default rule: the only one whose text is fixed by noise keyed by position (see `noise.py`)."""


class Finish(IntEnum):
    """Why a request ended. The names in results are `FINISH_NAMES`."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3
    ABORT = 4


FINISH_NAMES = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ERROR: "error", Finish.ABORT: "abort"}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being written. `tokens` is prompt and output together; `computed` of them have KV in the cache. `key` is
    the 64-bit seed of all its noise (`noise.request_key`) and never changes, whatever is retried or preempted. `rule` names the
    acceptance rule. `index` counts samples of one prompt; `twin` is the first of them, whose prompt KV may be copied. `taken`:
    how many of the first tokens took their KV over from other requests. `failures`:
    what went wrong in custom processors, by the sequence they were given. `flying` bounds the tokens that rounds launched but
    not yet read may add; it is 0 between rounds unless the engine runs ahead. `group` names those who may share
    KV of what they have in common, and whose finished texts may draft for each other where drafters are asked to mind it."""

    id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    key: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    limit: int = 2**31
    rule: str = COUPLED
    lossless: bool = True
    computed: int = 0
    finish: Finish = Finish.RUNNING
    stats: Stats = field(default_factory=lambda: Stats())
    origins: list[int] = field(default_factory=list)
    text: TextStream | None = None
    error: str | None = None
    started: float = 0.0
    index: int = 0
    twin: Request | None = None
    logprobs: list[tuple[Logprob, ...]] = field(default_factory=list)
    processed_logprobs: list[tuple[Logprob, ...]] = field(default_factory=list)
    prompt_logprobs: list[tuple[Logprob, ...]] = field(default_factory=list)
    failures: dict[tuple[int, ...], str] = field(default_factory=dict)
    flying: int = 0
    taken: int = 0
    group: str | None = None

    @property
    def output(self) -> list[int]:
        """Tokens committed so far, without the prompt."""
        return self.tokens[self.prompt_len :]

    @property
    def classical(self) -> bool:
        """Whether the rule is one of those that compare distributions: they need processed scores and draw from streams."""
        return self.rule != COUPLED

    @property
    def sampled(self) -> bool:
        """Whether guesses are draws whose probabilities the rule wants. Then how many are drawn is settled beforehand."""
        return self.classical and not self.params.greedy

    @property
    def pending(self) -> int:
        """Known tokens whose KV is still to be computed; at least 1 while running."""
        return len(self.tokens) - self.computed

    @property
    def room(self) -> int:
        """Tokens that `max_tokens` and the context (`limit` new tokens in all) still allow."""
        most, limit = self.params.max_tokens, self.limit
        return (most if most < limit else limit) - len(self.tokens) + self.prompt_len


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one place: natural log of its probability (computed in fp64, rounded to fp32), its rank (1 for the
    likeliest; tokens of equal score rank by id), and its text (empty without a tokenizer)."""

    token_id: int
    logprob: float
    rank: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one round works on. `pending[b]` tokens of `requests[b]`, from `computed` on, enter this pass;
    `ready[b]` says that they reach the last known token, so the request can be given a next token.
    `room[b]` is how many draft nodes have KV slots reserved. `blind`: the round before is still in flight, so only the device
    knows where the requests stand. `queued`: others wait to be let in, for whom whoever ends makes room."""

    requests: tuple[Request, ...]
    pending: tuple[int, ...]
    ready: tuple[bool, ...]
    room: tuple[int, ...]
    blind: bool = False
    queued: bool = False

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def writes(self) -> bool:
        """Whether everybody feeds one token, the last known one, and is given the next."""
        return all(self.ready) and self.pending.count(1) == len(self)


@dataclass(frozen=True, slots=True)
class Budget:
    """How far to look ahead, per request: `depth` levels and at most `nodes` nodes. 0 means: do not draft."""

    depth: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def any(self) -> bool:
        return any(self.nodes)

    @classmethod
    def none(cls, count: int) -> Budget:
        """Nobody of `count` requests looks ahead."""
        return cls((0,) * count, (0,) * count)


@dataclass(frozen=True, slots=True)
class Slots:
    """Where each of S score rows stands, for processors and noise. `request [S]` indexes `requests`; `position [S]` is the
    position of the token to be chosen (prompt length + tokens written before it); `path [S, D]` the drafted tokens between
    the request's known tokens and this slot, root first, padded with NONE; `depth [S]` how many they are; `slot [S]` the slots
    themselves, where known (streams are keyed by them). All int64."""

    requests: tuple[Request, ...]
    request: Tensor
    position: Tensor
    path: Tensor
    depth: Tensor
    slot: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PassRows:
    """Which row of a packed pass belongs where; all `[R]` int64.
    `request` is the index in the batch, `position` counts tokens from the start of the sequence, `virtual` orders a
    request's rows as its KV does (known tokens first, then nodes), `slot` is the slot a row scores, or -1 for rows
    that only fill the cache (all but the last of several pending tokens)."""

    request: Tensor
    position: Tensor
    virtual: Tensor
    slot: Tensor


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a (partial) run of the target gives: `hidden [R, H]` after the last layer that ran, before the final norm;
    `logits [S, V]` fp32 for the rows that have a slot, in row order, and `slots` where those stand (what a sampler wants to
    know); `features` by name, `[R, width]`; `prompt [E, V]` logits of the prompt rows that were asked for."""

    rows: PassRows
    hidden: Tensor | None
    logits: Tensor | None
    features: dict[str, Tensor]
    slots: Slots | None = None
    prompt: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A decoder layer of which one half may be left out; the residual stream then passes it by."""

    layer: int
    attention: bool = True
    mlp: bool = True


@dataclass(frozen=True, slots=True)
class Resume:
    """States that let verification skip the layers below `layer`: outputs of partial runs with `kv="shared"`. Rows of the pass
    that none of them covers are run through those layers first."""

    layer: int
    parts: tuple[PassOutput, ...]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses for a batch, as forests hanging under each request's last committed token.

    `tokens [B, N]`, `parents [B, N]` (column index of the parent, or ROOT; parents come before children), `sizes [B]`
    (columns in use), `source [B, N]` (which drafter offered the node; PROBE = scored but no guess), all int64 on the target's
    device, or on the host where they were made there. Children of one node carry distinct tokens. `widths` are host-known
    upper bounds of `sizes`, which give the pass its shape. `linear` promises that every request's nodes form one chain. `q
    [B, N + 1, V]`, where a classical rule needs it: row s drew slot s's children, in column order, without replacement. It
    holds probabilities; a row of zeros (and no q at all) says that the children are no draws, but guesses made without
    looking at the rule's randomness."""

    tokens: Tensor
    parents: Tensor
    sizes: Tensor
    source: Tensor
    widths: tuple[int, ...]
    linear: bool = False
    q: Tensor | None = None
    resume: Resume | None = None

    @property
    def columns(self) -> int:
        return self.tokens.shape[1]

    @property
    def unseen(self) -> bool:
        """Whether the guesses are where looking at them would mean waiting."""
        return self.tokens.device.type != "cpu" and self.q is None

    def to(self, device: torch.device | str) -> Proposal:
        """The same guesses on another device."""
        q = None if self.q is None else self.q.to(device)
        tokens, parents, sizes, source = (t.to(device) for t in (self.tokens, self.parents, self.sizes, self.source))
        return replace(self, tokens=tokens, parents=parents, sizes=sizes, source=source, q=q)

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> Proposal:
        """No guesses: the round is plain decoding."""
        none = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        sizes = torch.zeros(batch, dtype=torch.int64, device=device)
        return cls(none, none, sizes, none, (0,) * batch, linear=True)

    @classmethod
    def chains(cls, guesses: list[list[int]], device: torch.device | str = "cpu", source: int = 0) -> Proposal:
        """One chain of guessed tokens per request (an empty list for none)."""
        widths = tuple(map(len, guesses))
        n, count = max(widths, default=0), len(guesses)
        padded = [guess + [0] * (n - len(guess)) for guess in guesses]
        links = np.empty((2, count, n), dtype=np.int64)
        links[0], links[1] = np.arange(-1, n - 1), source
        tables = (np.array(padded, dtype=np.int64).reshape(count, n), links[0], np.array(widths, dtype=np.int64), links[1])
        tokens, parents, sizes, sources = (torch.from_numpy(table).to(device) for table in tables)
        return cls(tokens, parents, sizes, sources, widths, linear=True)

    @classmethod
    def trees(cls, nodes: list[list[tuple[int, int]]], device: torch.device | str = "cpu", source: int = 0) -> Proposal:
        """One tree per request, as `(token, parent column)` pairs with parents first."""
        widths = tuple(len(t) for t in nodes)
        n = max(widths, default=0)
        padded = [t + [(0, ROOT)] * (n - len(t)) for t in nodes]
        tokens, parents = torch.tensor(padded, dtype=torch.int64).reshape(len(nodes), n, 2).to(device).unbind(2)
        sizes = torch.tensor(widths, dtype=torch.int64, device=device)
        return cls(tokens, parents, sizes, torch.full_like(tokens, source), widths)


class Answer(Protocol):
    """A captured round's outcome on its way to the host. `read` waits for it: per request `[accepted, count, finish, N + 1
    tokens, N + 1 columns of the path]`, and `[sizes, tokens, parents, source]` of the guesses; then `seconds` tells the device's
    time."""

    def read(self) -> tuple[list[list[int]], list[Any]]: ...
    def seconds(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Scores:
    """What the target says: `choice [B, N + 1]` int64, the token of every slot (NONE where there is no such slot or no
    valid score); `rows` and `features` for every row of the pass, prompt rows included; `logits` raw fp32 `[S, V]` for the
    rows with a slot, in row order, only if asked for, `slots` where those stand; `prompt [E, V]` likewise of the prompt's tokens
    `prompt_at [E]` (index in the batch, position), which only prompt logprobs ask for. `processed [B, N + 1, V]`: scores whose
    softmax is what a slot's token is to be drawn from (tempered and filtered, -inf where forbidden, one token at T = 0, NaN where
    there is no valid score); only where a request of the batch is `classical`. `verdict`: the rule's, where the pass applied it
    already; then `answer` is what is on its way to the host."""

    choice: Tensor
    rows: PassRows
    features: dict[str, Tensor]
    logits: Tensor | None = None
    slots: Slots | None = None
    prompt: Tensor | None = None
    prompt_at: tuple[tuple[int, int], ...] = ()
    processed: Tensor | None = None
    verdict: Verdict | None = None
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule decided. `path [B, N]`: columns of the accepted nodes from the root down, padded with NONE;
    `accepted [B]` how many; `tokens [B, N + 1]`: what the request commits, padded with NONE; `counts [B]` how many (0 for
    requests that were not ready); `finish [B]`: a `Finish` for end-of-sequence, length and invalid scores."""

    path: Tensor
    accepted: Tensor
    tokens: Tensor
    counts: Tensor
    finish: Tensor


@dataclass(slots=True)
class Stats:
    """Counters of one request or one run. `drafted` and `accepted` count guesses that were offered and kept, after cutting
    at the end of the text; `rounds` counts passes that gave tokens; alpha = accepted / drafted, tau = tokens / rounds."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    offered_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0
    first_token_seconds: float = 0.0


class Committed(NamedTuple):
    """One request's share of a round, on the host: tokens committed, their origins (drafter index, or NONE for the target's
    own), guesses offered and kept per depth, after all cutting. `late`: the request had ended before the round was read."""

    request: Request
    tokens: tuple[int, ...]
    origins: tuple[int, ...]
    drafted: int
    accepted: int
    offered_at: tuple[int, ...]
    rejected: tuple[int, ...]
    text: str
    finish: Finish
    logprobs: tuple[tuple[Logprob, ...], ...] | None = None
    processed_logprobs: tuple[tuple[Logprob, ...], ...] | None = None
    late: bool = False


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What metrics, traces, the benchmark and the controller read after each round. `draft_seconds`: 0 where nobody was asked
    for guesses, so that all but the pass is the rest of such a round; `depths`: how far the controller let each request of the
    round look ahead, in the order of `committed`; `waited`: seconds in which the host did nothing but wait for the device, where
    that is known."""

    committed: tuple[Committed, ...]
    draft_seconds: float
    verify_seconds: float
    seconds: float
    prefill: int
    rows: int
    depths: tuple[int, ...] = ()
    waited: float = 0.0
