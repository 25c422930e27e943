"""EAGLE drafters on disk, in the layouts of two projects.

`safeail`: SafeAILab's, which SpecForge and SGLang share: the layer is `midlayer.*` (version 3) or `layers.0.*` (version 1).
`speculators`: the vLLM project's: `layers.0.*`, and a config in two parts. Both hold `d2t [n]`, which is an *offset*: draft token
i is the target's token i + d2t[i]; and `t2d [V]`, which says of each of the target's tokens whether it can be guessed.

Which of the target's states are fused is counted in two ways. We name the *inputs* of layers, as EAGLE's code, vLLM and
speculators do (`eagle_aux_hidden_state_layer_ids`, by default 2, L//2, L-3); SpecForge and SGLang count *outputs* (the same key
inside `eagle_config`), one less for the same states.

Ours is the first layout; rows borrowed from the target (embeddings always, the head if `outrider.head` says so) are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from ..errors import BadInput, BadWeights, DrafterMismatch
from . import checkpoint as files
from .checkpoint import KEY, Checkpoint
from .eagle_net import EagleNet, Plan

LAYOUTS = ("safeail", "speculators")
DEFAULT_STATES = ("2", "mid", "-3")
"""Inputs of layers 2, L//2 and L-3."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a config tells: the network's `plan`, the target's states it reads as a feature name, and the layout it is in."""

    plan: Plan
    feature: str
    layout: str


def describe(path: Path, config: Mapping[str, Any]) -> Description:
    """Read a config of either layout. Raises `BadWeights` for what is no EAGLE drafter, or one with several layers."""
    speculators = "transformer_layer_config" in config
    inner = config.get("transformer_layer_config", config)
    if speculators and config.get("speculators_model_type") not in (None, "eagle3"):
        raise BadWeights(f"{path}: speculators of type {config.get('speculators_model_type')!r} are not supported, only eagle3")
    if not isinstance(inner, Mapping) or "hidden_size" not in inner:
        raise BadWeights(f"{path / 'config.json'} tells no hidden_size: this is no directory of an EAGLE drafter")
    layer = Checkpoint(path, inner, {})
    layers = inner.get("num_hidden_layers", 1)
    if layers != 1:
        raise BadWeights(
            f"{path} has {layers} decoder layers, an EAGLE drafter has 1: this looks like a whole model (--draft draft_model)"
        )
    version = 3 if speculators or _third(config) else 1
    hidden, heads = layer.number("hidden_size"), layer.number("num_attention_heads")
    extra = config.get("eagle_config")
    switches = {**(extra if isinstance(extra, Mapping) else {}), **config}
    states = _states(config, speculators)
    vocabulary = layer.number("vocab_size")
    drafted = config.get("draft_vocab_size") or vocabulary
    if not isinstance(drafted, int):
        raise BadWeights(f"{path / 'config.json'}: draft_vocab_size must be a number, it is {drafted!r}")
    plan = Plan(
        version,
        hidden,
        int(config.get("target_hidden_size") or hidden),
        heads,
        layer.number("num_key_value_heads", heads),
        layer.number("head_dim", max(1, hidden // heads)) if inner.get("head_dim") else hidden // heads,
        layer.number("intermediate_size"),
        drafted,
        len(states) if version == 3 else 1,
        float(inner.get("rms_norm_eps") or 1e-6),
        str(inner.get("hidden_act") or "silu"),
        layer.number("max_position_embeddings", 2048),
        _rope(inner),
        bool(config.get("bias", True)) if version == 1 else False,
        bool(inner.get("attention_bias", False)),
        bool(switches.get("norm_before_residual", speculators)),
        bool(switches.get("norm_before_fc", False)),
        bool(switches.get("fc_norm", False)),
        bool(switches.get("norm_output", False)),
    )
    if plan.act not in ACT2FN:
        raise BadWeights(f"{path / 'config.json'}: hidden_act {plan.act!r} is not known; known are {', '.join(sorted(ACT2FN))}")
    feature = "hidden:" + ",".join(states) if version == 3 else "hidden:last"
    return Description(plan, feature, "speculators" if speculators else "safeail")


def _third(config: Mapping[str, Any]) -> bool:
    own = config.get(KEY)
    if isinstance(own, Mapping) and "version" in own:
        return bool(own["version"] == 3)
    names = " ".join(str(n) for n in config.get("architectures") or ())
    return "draft_vocab_size" in config or "eagle_config" in config or "Eagle3" in names


def _states(config: Mapping[str, Any], speculators: bool) -> tuple[str, ...]:
    """The inputs of layers whose states are fused."""
    plain = config.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(plain, Sequence) and plain:
        return tuple(str(int(i)) for i in plain)
    inner = config.get("eagle_config")
    outputs = inner.get("eagle_aux_hidden_state_layer_ids") if isinstance(inner, Mapping) else None
    if isinstance(outputs, Sequence) and outputs and not speculators:
        return tuple(str(int(i) + 1) for i in outputs)
    return DEFAULT_STATES


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` from the new key, or from the two old ones."""
    found = config.get("rope_parameters")
    if isinstance(found, Mapping) and "rope_theta" in found:
        return dict(found)
    scaling = config.get("rope_scaling")
    scaled = {("rope_type" if k == "type" else k): v for k, v in scaling.items()} if isinstance(scaling, Mapping) else {}
    kind = scaled.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise BadWeights(
            f"the drafter's RoPE is of type {kind!r}, whose factor depends on the length; only static ones are supported"
        )
    return {"rope_type": kind, **scaled, "rope_theta": float(config.get("rope_theta") or 10000.0)}


@dataclass(frozen=True, slots=True)
class Rows:
    """The target's weights that a drafter may share: `embeddings` and `head`, `[V, d]`."""

    embeddings: Tensor
    head: Tensor


def build(made: Checkpoint, rows: Rows, dtype: torch.dtype, name: str) -> tuple[EagleNet, Tensor | None]:
    """The network on the target's device, and the ids `[n]` of the tokens it guesses (None: all). Raises `BadWeights` for damaged
    files, `DrafterMismatch` for those of another target than `name`."""
    found = describe(made.path, made.config)
    plan, (vocabulary, width) = found.plan, rows.head.shape
    files.same_width(made, plan.target, width, name)
    tensors = {_plain(k): v for k, v in made.tensors.items()}
    made = Checkpoint(made.path, made.config, tensors)
    ids = _ids(made, plan, vocabulary, name)
    borrows = "lm_head.weight" not in tensors
    if "embed_tokens.weight" in tensors:
        rows = Rows(made.take("embed_tokens.weight", -1, plan.hidden).to(rows.head.device), rows.head)
    elif rows.embeddings.shape[1] != plan.hidden:
        raise DrafterMismatch(
            f"{made.path.name} is {plan.hidden} wide but stores no embeddings, and those of {name} have {width}"
        )
    if borrows and (plan.hidden != width or (plan.version == 3 and made.own.get("head") != "target" and ids is not None)):
        made.take("lm_head.weight", plan.vocab, plan.hidden)
    head = None if not borrows else (rows.head if ids is None else rows.head[ids]).to(dtype)
    device = rows.head.device
    with torch.device("meta"):  # nothing is made before its shape is found to be right
        net = EagleNet(plan, rows.embeddings.to(dtype), head)
    wanted = {k: tuple(p.shape) for k, p in net.named_parameters() if not (borrows and k.startswith("lm_head"))}
    net.load_state_dict({k: made.take(k, *shape).to(device, dtype) for k, shape in wanted.items()}, strict=False, assign=True)
    net.rotary = plan.rotary().to(device)
    return net.requires_grad_(False).eval(), None if ids is None else ids.to(device)


def _plain(name: str) -> str:
    """A tensor's name as our network calls it."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _ids(made: Checkpoint, plan: Plan, vocabulary: int, name: str) -> Tensor | None:
    """The tokens that the draft's head stands for, from the offsets `d2t`."""
    whole = made.config.get("vocab_size") or made.config.get("transformer_layer_config", {}).get("vocab_size")
    if isinstance(whole, int) and abs(whole - vocabulary) > 256:
        raise DrafterMismatch(
            f"{made.path.name} was trained for a vocabulary of {whole} tokens, {name} has {vocabulary}: use its own target"
        )
    if "d2t" not in made.tensors:
        if plan.version == 3 and plan.vocab != whole:
            made.take("d2t", plan.vocab)
        return None
    offsets = made.take("d2t", plan.vocab).long()
    ids = files.known_ids(made, offsets + torch.arange(len(offsets)), vocabulary, name)
    if len(set(ids.tolist())) != len(ids):
        raise BadWeights(f"{made.path}: d2t names some tokens twice; it must hold offsets (token id minus draft id), not ids")
    return ids if len(ids) < vocabulary or bool(offsets.any()) else None


def tensors(net: EagleNet, ids: Tensor | None, vocabulary: int, layout: str, whole: bool) -> dict[str, Tensor]:
    """The network under a layout's names. `whole`: with the head, even if it is borrowed."""
    first = "layers.0." if layout == "speculators" or net.plan.version == 1 else "midlayer."
    out = {k.replace("midlayer.", first): v for k, v in net.state_dict().items() if whole or not (net.borrows and "lm_head" in k)}
    if net.plan.version == 1:
        return {k: v for k, v in out.items() if "lm_head" not in k}
    kept = torch.arange(net.plan.vocab) if ids is None else ids.cpu()
    out["d2t"] = (kept - torch.arange(len(kept))).to(torch.int64)
    out["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, kept, True)
    return out


def config(net: EagleNet, facts: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """A layout's `config.json`. `facts`: `vocabulary`, `target`, `feature` with layers by number, and what else ours says."""
    plan = net.plan
    layer = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": plan.hidden,
        "intermediate_size": plan.inner,
        "num_attention_heads": plan.heads,
        "num_key_value_heads": plan.pairs,
        "head_dim": plan.dim,
        "hidden_act": plan.act,
        "rms_norm_eps": plan.eps,
        "attention_bias": plan.attention_bias,
        "max_position_embeddings": plan.longest,
        "rope_parameters": dict(plan.rope),
        "rope_theta": plan.rope.get("rope_theta", 10000.0),
        "rope_scaling": None if plan.rope.get("rope_type", "default") == "default" else _unscaled(plan.rope),
        "vocab_size": facts["vocabulary"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if plan.version == 1:
        return layer | {"architectures": ["EagleLlamaForCausalLM"], "bias": plan.fc_bias}
    inputs = [int(i) for i in str(facts["feature"]).removeprefix("hidden:").split(",")]
    switches = {"norm_before_residual": plan.norm_before_residual, "norm_before_fc": plan.norm_before_fc}
    switches |= {"fc_norm": plan.fc_norm, "norm_output": plan.norm_output}
    common: dict[str, Any] = {"draft_vocab_size": plan.vocab, **switches}
    if plan.target != plan.hidden or layout == "speculators":
        common["target_hidden_size"] = plan.target if plan.target != plan.hidden else None
    if layout == "safeail":
        outputs = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in inputs], "use_aux_hidden_state": True}
        named = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": outputs, "num_aux_hidden_states": plan.states}
        return layer | common | named | {"eagle_aux_hidden_state_layer_ids": inputs}
    proposal = {"proposal_type": "greedy", "speculative_tokens": int(facts.get("steps", 5)), "accept_tolerance": 0.0}
    return common | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": inputs,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"verifier_accept_k": 1} | proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": facts["target"], "architectures": facts.get("architectures", [])},
        },
    }


def _unscaled(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in rope.items() if k != "rope_theta"}


def save(path: Path, net: EagleNet, ids: Tensor | None, facts: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write our own directory: the first layout, without what is the target's."""
    own = dict(facts) | {"version": net.plan.version, "head": "target" if net.borrows else "own"}
    named = tensors(net, ids, int(facts["vocabulary"]), "safeail", whole=False)
    named.pop("t2d", None)
    files.write(path, config(net, facts, "safeail") | {KEY: own}, _stored(named, dtype))


def export(
    path: Path, net: EagleNet, ids: Tensor | None, facts: Mapping[str, Any], layout: str, embeddings: Tensor | None = None
) -> None:
    """Write a directory that others can serve, in the network's dtype. `embeddings`: the drafter's own, if it has any. Raises
    `BadInput` for what a layout cannot hold."""
    if layout not in LAYOUTS:
        raise BadInput(f"layout must be {' or '.join(LAYOUTS)}, got {layout!r}")
    if net.plan.version != 3 and layout == "speculators":
        raise BadInput("the speculators layout is for EAGLE-3; export this EAGLE-1 drafter with layout safeail")
    kind = next(net.midlayer.parameters()).dtype
    named = tensors(net, ids, int(facts["vocabulary"]), layout, whole=True)
    if embeddings is not None:
        named["embed_tokens.weight"] = embeddings
    files.write(path, config(net, facts, layout), _stored(named, kind))


def _stored(named: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in named.items()}
