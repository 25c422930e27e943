"""What the target sees in a text: one pass per batch, without gradients, and the states that a pupil asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..errors import DrafterMismatch, OutOfMemory, UnsupportedModel
from ..models.hf import find_blocks
from ..models.weights import Loaded
from ..protocols import Lesson, Teacher
from ..trained import write_bytes
from .corpus import Corpus

LAST = "hidden:last"


class Capture:
    """The target as a source of lessons. `features`: names as in `protocols.Needs`. `cache`: a directory that keeps features in
    bf16 (8 kB a token for 4,096 numbers), so that texts seen again cost no pass of the target; `keep`: bytes of the device's
    memory for the same, in the target's own type, for texts that are always cut alike; once they are full, texts that are not
    kept are passed through the target again.

    Raises `DrafterMismatch` for features that the target lacks, `UnsupportedModel` where its head does more than is known."""

    def __init__(self, loaded: Loaded, features: Sequence[str] = (LAST,), cache: Path | None = None, keep: int = 0) -> None:
        self.loaded, self.model, self.features = loaded, loaded.model, tuple(dict.fromkeys((LAST, *features)))
        self.device = next(self.model.parameters()).device
        config: Any = self.model.config.get_text_config()
        self.blocks = find_blocks(self.model, loaded.name)
        for name in self.features:
            for part in name.removeprefix("hidden:").split(","):
                if part != "last" and not (part.isdigit() and int(part) < len(self.blocks)):
                    raise DrafterMismatch(f"{loaded.name} has no feature {name!r}: it has {len(self.blocks)} layers")
        self.cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
        self.cache = None if cache is None else cache / _key(loaded.fingerprint, self.features)
        self.kept: dict[int, dict[str, Tensor]] | None = {} if keep else None
        self.room = keep
        self._check()

    def size(self, corpus: Corpus, most: int) -> int:
        """Bytes of the features of all texts, each cut to `most` tokens."""
        parts = sum(len(name.removeprefix("hidden:").split(",")) for name in self.features)
        width = parts * int(self.model.config.get_text_config().hidden_size) * next(self.model.parameters()).dtype.itemsize
        return width * int(corpus.lengths.clamp(max=most).sum())

    @property
    def vocabulary(self) -> int:
        first: Any = self.model.get_input_embeddings()
        return int(first.weight.shape[0])

    def teacher(self, counts: Tensor) -> Teacher:
        """The target for those who build a pupil. `counts [V]`, or fewer, which are filled up."""
        first: Any = self.model.get_input_embeddings()
        last: Any = self.model.get_output_embeddings()
        counts = nn.functional.pad(counts, (0, first.weight.shape[0] - len(counts)))
        config = self.model.config.get_text_config().to_dict()
        rows = (first.weight.detach(), last.weight.detach())
        return Teacher(self.loaded.name, config, *rows, counts.to(self.device), self.loaded.fingerprint, self.model)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 scores `[..., V]` of states `[..., H]` that enter the head."""
        head: Any = self.model.get_output_embeddings()
        with torch.autocast(self.device.type, enabled=False):
            out: Tensor = head(hidden.to(head.weight.dtype)).float()
        if self.scale != 1.0:
            out = out * self.scale
        return (out / self.cap).tanh() * self.cap if self.cap else out

    def lesson(self, corpus: Corpus, indices: Sequence[int], most: int) -> Lesson:
        """The texts side by side, cut to `most` tokens, padded on the right (which no causal model looks at)."""
        rows = [corpus.text(i)[:most].long() for i in indices]
        lengths = torch.tensor([len(r) for r in rows])
        tokens = _padded(rows)
        at = torch.arange(tokens.shape[1])
        real = at < lengths[:, None]
        taught = real & (at >= corpus.prompts[list(indices)][:, None])
        found = (tokens, taught, real, *taught.nonzero(as_tuple=True))
        tokens, taught, real, *places = (self._sent(x) for x in found)
        return Lesson(tokens, taught, real, self._remembered(tokens, rows, indices), self.logits, (places[0], places[1]))

    def _sent(self, x: Tensor) -> Tensor:
        """On its way to the device, without waiting for what that is doing."""
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x.to(self.device)

    def _remembered(self, tokens: Tensor, texts: Sequence[Tensor], indices: Sequence[int]) -> dict[str, Tensor]:
        """Features of texts by their number, which are kept if that was asked for."""
        if self.kept is None:
            return self._features(tokens, texts)
        known = {i: self.kept[i] for i in indices if i in self.kept}
        new = [(i, text) for i, text in zip(indices, texts, strict=True) if i not in known]
        if new:
            found = self._features(self._sent(_padded([t.long() for _, t in new])) if known else tokens, [t for _, t in new])
            fresh = {i: {n: x[row, : len(text)] for n, x in found.items()} for row, (i, text) in enumerate(new)}
            for i, states in fresh.items():
                self._keep(i, states)
            if not known:
                return found
            known |= fresh
        return {name: _padded([known[i][name] for i in indices]) for name in self.features}

    def _keep(self, index: int, states: Mapping[str, Tensor]) -> None:
        """Keep a text's states, if there is room for them."""
        size = sum(x.nbytes for x in states.values())
        if self.kept is not None and size <= self.room:
            self.room -= size
            self.kept[index] = {name: x.clone() for name, x in states.items()}

    def _features(self, tokens: Tensor, texts: Sequence[Tensor]) -> dict[str, Tensor]:
        if self.cache is None:
            return self.run(tokens)
        dtype = next(self.model.parameters()).dtype
        paths = [self.cache / f"{hashlib.sha256(t.numpy().tobytes()).hexdigest()[:32]}.safetensors" for t in texts]
        if all(path.is_file() for path in paths):
            kept = [load_file(path) for path in paths]
            return {n: _padded([k[n] for k in kept]).to(self.device, dtype) for n in self.features}
        found = {k: v.to(torch.bfloat16) for k, v in self.run(tokens).items()}
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            for row, (path, text) in enumerate(zip(paths, texts, strict=True)):
                write_bytes(path, save({k: v[row, : len(text)].cpu().contiguous() for k, v in found.items()}), sync=False)
        except OSError as error:
            raise OutOfMemory(
                f"features cannot be kept in {self.cache} ({error.strerror or error}); without --cache they are computed anew"
            ) from error
        return {k: v.to(dtype) for k, v in found.items()}

    @torch.no_grad()
    def run(self, tokens: Tensor) -> dict[str, Tensor]:
        """Features `[B, T, width]` of tokens `[B, T]`."""
        taps: dict[str, Tensor] = {}
        wanted = {part for name in self.features for part in name.removeprefix("hidden:").split(",")} - {"last"}
        with ExitStack() as hooks:
            for part in wanted:
                hook = self.blocks[int(part)].register_forward_pre_hook(_keeper(taps, part), with_kwargs=True)
                hooks.callback(hook.remove)
            taps["last"] = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return {name: torch.cat([taps[p] for p in name.removeprefix("hidden:").split(",")], -1) for name in self.features}

    @torch.no_grad()
    def _check(self) -> None:
        """The scores of a few tokens must be those that the model gives by itself."""
        ids = torch.arange(2, 10, device=self.device)[None]
        want = self.model(input_ids=ids, use_cache=False).logits.float()
        error = float((self.logits(self.run(ids)[LAST]) - want).norm() / want.norm().clamp_min(1e-6))
        if not error < 0.02:
            raise UnsupportedModel(
                f"{self.loaded.name} ({type(self.model).__name__}) does something to its scores that training does not know "
                f"(relative difference {error:.1e}); drafters cannot be trained for it yet"
            )


def batches(corpus: Corpus, indices: Sequence[int], tokens: int, most: int) -> list[list[int]]:
    """Texts of like length together, at most `tokens` per batch with padding (but at least one text), each cut to `most`."""
    lengths = corpus.lengths[list(indices)].tolist()
    made: list[list[int]] = []
    for length, i in sorted(zip(lengths, indices, strict=True)):
        width = min(length, most)
        if not made or (len(made[-1]) + 1) * width > tokens:
            made.append([])
        made[-1].append(i)
    return made


def shuffled(corpus: Corpus, indices: Sequence[int], limits: tuple[int, int], seed: tuple[int, int]) -> Iterator[list[int]]:
    """One epoch of batches in random order. `limits` as in `batches`; `seed`: of the run, and which epoch. Texts are dealt into
    stretches first, so that batches differ from epoch to epoch."""
    generator = torch.Generator().manual_seed(seed[0] * 1_000_003 + seed[1])
    order = [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]
    size = max(1, 64 * limits[0] // max(1, int(corpus.lengths.float().mean())))
    made = [b for start in range(0, len(order), size) for b in batches(corpus, order[start : start + size], *limits)]
    yield from (made[i] for i in torch.randperm(len(made), generator=generator).tolist())


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _keeper(taps: dict[str, Tensor], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taps[name] = args[0] if args else kwargs["hidden_states"]

    return hook


def _key(fingerprint: str, features: Sequence[str]) -> str:
    return hashlib.sha256(f"{fingerprint} {features}".encode()).hexdigest()[:16]
