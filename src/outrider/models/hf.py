"""Any transformers decoder-only model over our own KV.

The model runs with `use_cache=False` on packed rows `[1, R]` with explicit positions; its attention calls ours (see
`attention.py`), which reads and writes our cache. No transformers cache class is involved, so the same code serves every release.
What cannot be run exactly is refused at load, with the reason: first by what the config declares, then by running the model
once both ways and comparing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..cache.paged import PagedCache
from ..config import SamplingParams
from ..errors import BadInput, UnsupportedModel
from ..protocols import Cache
from ..types import Batch, PassOutput, Proposal, Request
from .attention import NAME, Pass, attend
from .layout import Layout
from .parts import Cut, Layers, parts_of, signature
from .products import few_plans, pack
from .rows import Rows, anchors, rows_of

AttentionInterface.register(NAME, attend)

_DYNAMIC_ROPE = ("dynamic", "longrope")


class Decoder:
    """A causal LM that scores packed rows. `layers` lists `(kv heads, head dim)` per decoder layer.

    Raises `UnsupportedModel`, naming model and reason, where exactness cannot be kept.
    """

    def __init__(self, model: PreTrainedModel, name: str = "model", check: bool = True) -> None:
        refuse(model, name)
        few_plans()
        self.model, self.name, self.config = model.eval(), name, model.config.get_text_config()
        self.base: Any = model.base_model
        self.field, self.blocks = _blocks(self.base, self.config.num_hidden_layers, name)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.hidden_size = int(self.config.hidden_size)
        self.max_len = int(getattr(self.config, "max_position_embeddings", 0) or 2**31)
        self.signature = signature(model)
        reference = self._reference() if check else None
        model.set_attn_implementation(NAME)
        self.packed = pack(model)
        self.layers = self._probe()
        self.num_layers = len(self.blocks)
        self.ready()
        self._cut = Cut(self.blocks)
        if reference is not None:
            self._compare(*reference)

    def ready(self) -> None:
        """For heirs: prepare weights, before the load-time comparison."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return int(self.config.num_attention_heads) // self.layers[0][0]

    @torch.inference_mode()
    def scored(self, rows: Rows, cache: Cache, wanted: Tensor | None = None, features: dict[str, Tensor] | None = None) -> Tensor:
        """fp32 logits of all rows of a pass on a GPU, or of those that are `wanted`: what a graph captures. `features` takes
        those that it has as keys."""
        state = Pass(None, cache, rows=rows)
        options = {"input_ids": rows.token[None], "position_ids": rows.position[None].long(), "use_cache": False}
        with self._taps(tuple(features or ())) as taps:
            logits: Tensor = self.model(**options, outrider_pass=state).logits[0]
        if features:
            features.update((name, gather(taps, name)) for name in tuple(features))
        return (logits if wanted is None else logits[wanted]).float()

    @torch.inference_mode()
    def forward(
        self,
        layout: Layout,
        cache: Cache,
        features: Sequence[str] = (),
        layers: Layers | None = None,
        hidden: Tensor | None = None,
        by_rows: bool = False,
    ) -> PassOutput:
        """One pass over `layout`'s rows. Logits (fp32, or fp64 for an fp64 model) come for the scored rows; `layers` restricts
        the run to those decoder layers or parts of layers, `hidden [R, H]` starts from states instead of embeddings."""
        state = Pass(layout, cache, by_rows)
        if anchors(cache):
            state.rows = rows_of(layout, cache, self.group, self.max_len)
        # A deep guess may lie past the context. Nothing of it can be kept, but tables of positions end there.
        positions = layout.rows.position.clamp(max=self.max_len - 1)
        options = {"input_ids": layout.tokens[None], "position_ids": positions[None], "use_cache": False, "outrider_pass": state}
        partial = layers is not None
        wanted = [*features, "hidden:out"] if partial else list(features)
        with self._only(layers), self._from(hidden), self._taps(wanted) as taps:
            logits, prompt = self._run(options, layout)
        out = {name: gather(taps, name) for name in features}
        return PassOutput(layout.rows, taps.get("out"), logits, out, prompt=prompt)

    def _run(self, options: dict[str, Any], layout: Layout) -> tuple[Tensor | None, Tensor | None]:
        """Logits of the scored rows, and of the prompt rows that were asked for."""
        wanted, scored = layout.scored, layout.scored.shape[0]
        if layout.prompt:
            wanted = torch.cat([wanted, torch.tensor([row for row, _, _ in layout.prompt], device=wanted.device)])
        count = wanted.shape[0]
        if count == 0:
            self.base(**options)
            return None, None
        if count < layout.tokens.shape[0]:
            options["logits_to_keep"] = wanted
        logits: Tensor = self.model(**options).logits[0]
        if logits.shape[0] != count or (layout.prompt and "logits_to_keep" not in options):
            logits = logits[wanted]  # in another order, or from a model that knows no `logits_to_keep`
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits[:scored] if scored else None, logits[scored:] if layout.prompt else None

    @contextmanager
    def _only(self, layers: Layers | None) -> Iterator[None]:
        """Run only some decoder layers, or parts of them: the others step aside, so that every layer keeps its index."""
        if layers is None:
            yield
            return
        setattr(self.base, self.field, self._cut(parts_of(layers, len(self.blocks))))
        try:
            yield
        finally:
            setattr(self.base, self.field, self.blocks)

    @contextmanager
    def _from(self, hidden: Tensor | None) -> Iterator[None]:
        """Start from states: they replace what enters the first layer, past all that a model does to its embeddings."""
        if hidden is None:
            yield
            return

        def swap(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return ((hidden[None], *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden[None]})

        hook = getattr(self.base, self.field)[0].register_forward_pre_hook(swap, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def _taps(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """Capture named states of the pass; nothing is hooked that nobody asked for."""
        taps: dict[str, Tensor] = {}
        hooks = []
        current = getattr(self.base, self.field)
        for name in {part for n in names for part in taps_of(n)}:
            if name == "last":
                hooks.append(self.base.register_forward_hook(lambda m, a, out: taps.update(last=out.last_hidden_state[0])))
            elif name == "out":
                hooks.append(current[-1].register_forward_hook(lambda m, a, out: taps.update(out=_first(out)[0])))
            else:
                hooks.append(current[int(name)].register_forward_pre_hook(_keep(taps, name), with_kwargs=True))
        try:
            yield taps
        finally:
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def _probe(self) -> list[tuple[int, int]]:
        """Learn every layer's KV shape, and meet its attention arguments, by running two tokens with nothing behind them."""
        state = Pass()
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        self.model(input_ids=ids, position_ids=positions, use_cache=False, outrider_pass=state)
        missing = [i for i in range(len(self.blocks)) if i not in state.heads]
        if missing:
            raise UnsupportedModel(f"{self.name}: layers {missing} do not attend through the registered function")
        return [state.heads[i] for i in range(len(self.blocks))]

    @torch.inference_mode()
    def _reference(self) -> tuple[Tensor, Tensor]:
        """Logits of a short text by transformers' own attention, before anything of ours is in place."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab_size, (1, 12), generator=generator).to(self.device)
        return ids, self.model(input_ids=ids, use_cache=False).logits[0].float()

    @torch.inference_mode()
    def _compare(self, ids: Tensor, expected: Tensor) -> None:
        """Prefill and decoding through our cache must give the reference's logits, within rounding of the dtype."""
        cache = PagedCache(self.layers, 1, 64, dtype=self.dtype, device=self.device)
        request = Request(-1, ids[0].tolist(), 8, SamplingParams(), 0, 0)
        cache.reserve(request, 12)
        got = []
        for computed, pending in ((0, 8), (8, 4)):
            request.computed = computed
            nodes = Proposal.empty(1, self.device)
            layout = Layout.build(Batch((request,), (pending,), (True,), (0,)), nodes, cache)
            every = torch.arange(pending, device=self.device)
            layout = Layout(layout.spans, layout.tokens, layout.write, layout.rows, every, True, nodes, None)
            got.append(self.forward(layout, cache).logits)
        ours = torch.cat([g for g in got if g is not None]).float()
        tolerance = {torch.float64: 1e-6, torch.float32: 2e-3}.get(self.dtype, 0.1)
        error = float((ours - expected).norm() / expected.norm().clamp_min(1e-6))
        if not error <= tolerance:
            raise UnsupportedModel(
                f"{self.name} ({type(self.model).__name__}) gives other logits through this engine than through transformers "
                f"(relative difference {error:.1e}, allowed {tolerance:.0e}); refusing to run it inexactly"
            )


def refuse(model: PreTrainedModel, name: str) -> None:
    """Raise `UnsupportedModel` for what the config already tells cannot be exact."""
    config, kind = model.config.get_text_config(), type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: {kind} is an encoder-decoder model; only decoder-only models are supported so far")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{name}: {kind} does not let its attention be replaced; pick a model that declares attention backends"
        )
    types = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if types:
        raise UnsupportedModel(
            f"{name}: layers of type {', '.join(sorted(types))} are not supported; only full and sliding attention is"
        )
    if any(k.endswith("experts") and isinstance(v, int) and v > 0 for k, v in vars(config).items()):
        raise UnsupportedModel(f"{name}: {kind} is a mixture of experts, whose rows depend on each other; not supported yet")
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [v for v in rope.values() if isinstance(v, dict)] or [rope]
    if any(r.get("rope_type") in _DYNAMIC_ROPE for r in nested):
        raise UnsupportedModel(f"{name}: its RoPE factor depends on the longest row in the pass; set a static rope type")


def truncate(model: PreTrainedModel, layers: int, name: str = "model") -> PreTrainedModel:
    """Keep only the first `layers` decoder layers (0: all). The model itself is changed. `BadInput` if it has fewer."""
    config = model.config.get_text_config()
    if not layers:
        return model
    if layers > config.num_hidden_layers:
        raise BadInput(f"cannot keep {layers} layers of {name}: it has only {config.num_hidden_layers}")
    return keep_layers(model, range(layers), name)


def keep_layers(model: PreTrainedModel, layers: Sequence[int], name: str = "model") -> PreTrainedModel:
    """Keep only these decoder layers, in order, renumbered. The model itself is changed."""
    config = model.config.get_text_config()
    field, blocks = _blocks(model.base_model, config.num_hidden_layers, name)
    kept = nn.ModuleList(blocks[i] for i in layers)
    for i, block in enumerate(kept):
        if hasattr(block, "self_attn") and hasattr(block.self_attn, "layer_idx"):
            block.self_attn.layer_idx = i
    setattr(model.base_model, field, kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in layers]
    config.num_hidden_layers = len(layers)
    return model


def find_blocks(model: PreTrainedModel, name: str = "model") -> nn.ModuleList:
    """The model's decoder layers."""
    return _blocks(model.base_model, model.config.get_text_config().num_hidden_layers, name)[1]


def _blocks(base: nn.Module, count: int, name: str) -> tuple[str, nn.ModuleList]:
    for field, child in base.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return field, child
    raise UnsupportedModel(f"{name}: found no list of {count} decoder layers in {type(base).__name__}")


def resolved(name: str, layers: int) -> str:
    """A feature's name with its layers by number: `mid` is layer L//2, -k counts from the end (`hidden:2,mid,-3`)."""
    kind, _, parts = name.partition(":")
    return f"{kind}:" + ",".join(_layer(part, layers) for part in parts.split(","))


def _layer(part: str, layers: int) -> str:
    if part == "mid":
        return str(layers // 2)
    return str(layers + int(part)) if part.startswith("-") and part[1:].isdecimal() else part


def taps_of(name: str) -> list[str]:
    """Which states a feature is made of: layer numbers, or `last`."""
    return name.removeprefix("hidden:").split(",")


def layers_read(names: Iterable[str]) -> set[int]:
    """Layers whose inputs the features are made of."""
    return {int(part) for name in names for part in taps_of(name) if part.isdecimal()}


def gather(taps: dict[str, Tensor], name: str) -> Tensor:
    """A feature `[R, width]` from the states it names, side by side."""
    return torch.cat([taps[part] for part in taps_of(name)], dim=-1)


def _first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def _keep(taps: dict[str, Tensor], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taps[name] = (args[0] if args else kwargs["hidden_states"])[0]

    return hook
