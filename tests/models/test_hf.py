"""Any decoder over our own KV gives transformers' logits, or is refused with a reason."""

from __future__ import annotations

from functools import cache as memo
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from outrider import oracle
from outrider.cache.slots import SlotCache
from outrider.errors import BadInput, UnsupportedModel
from outrider.models import attention
from outrider.models.attention import Pass, attend
from outrider.models.hf import Decoder, refuse, truncate
from outrider.models.layout import Layout
from outrider.types import ROOT, Batch, Proposal, Request

from .. import tiny

SHAPE: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.35,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64, "n_inner": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
    "Gemma": {},
    "Gemma3Text": {"sliding_window": 4, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "Phi": {"partial_rotary_factor": 0.5},
    "Phi3": {"sliding_window": 6},
    "Granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "Cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "Cohere2": {"logit_scale": 0.25, "sliding_window": 5},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 5},
    "GPTNeoX": {"rotary_pct": 0.5},
    "GPT2": GPT2,
    "GPTBigCode": GPT2,
    "Starcoder2": {"sliding_window": 5},
    "SmolLM3": {},
    "Glm4": {},
    "Exaone4": {"sliding_window": 5, "sliding_window_pattern": 2},
    "SeedOss": {},
    "Ernie4_5": {},
}
SCALED = ("Gemma", "Gemma3Text", "Granite", "GPT2")
"""Models that change their embeddings on the way to the first layer."""


def make(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **FAMILIES.get(kind, {}), **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" not in name:
            parameter.normal_(0, 0.3)  # biases start at zero, which would hide that one is missing
    return model


@memo
def reference(kind: str) -> Any:
    return make(kind)


@memo
def ours(kind: str) -> Decoder:
    return Decoder(make(kind), kind)


TREE = [(5, ROOT), (9, ROOT), (6, 0), (7, 0), (5, 1), (8, 2), (3, 5), (4, 6)]
TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 3, 8, 46, 2]


@torch.inference_mode()
def true_logits(model: Any, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


class Runner:
    """One request over a cache of its own."""

    def __init__(self, decoder: Decoder, tokens: list[int]) -> None:
        self.decoder, self.request = decoder, tiny.request(tokens)
        self.cache = SlotCache(decoder.layers, 1, 64, decoder.dtype)
        self.cache.reserve(self.request, 64)

    def layout(self, pending: int, nodes: Proposal | None = None, start: int = 0) -> tuple[Batch, Layout]:
        ready = self.request.computed + pending == len(self.request.tokens)
        batch = Batch((self.request,), (pending,), (ready,), (16,))
        return batch, Layout.build(batch, nodes or Proposal.empty(1), self.cache, start)

    def run(self, pending: int, nodes: Proposal | None = None, **options: Any) -> Any:
        out = self.decoder.forward(self.layout(pending, nodes)[1], self.cache, **options)
        self.request.computed += pending
        return out


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_prefill_decoding_and_tree_give_transformers_logits(kind: str, by_rows: bool) -> None:
    runner, model = Runner(ours(kind), TEXT[:13]), reference(kind)
    assert runner.run(9, by_rows=by_rows).logits is None
    assert (runner.run(4, by_rows=by_rows).logits[0] - true_logits(model, TEXT[:13])).abs().max() < 1e-9
    runner.request.tokens += TEXT[13:]
    for end in (14, 15):
        got = runner.run(1, by_rows=by_rows)
        assert got.logits is None and len(runner.request.tokens) > end
    out = runner.run(1, Proposal.trees([TREE]), by_rows=by_rows)
    parents = [p for _, p in TREE]
    for slot in range(len(TREE) + 1):
        tail = [TREE[c][0] for c in oracle.path_to(parents, slot - 1)] if slot else []
        error = (out.logits[slot] - true_logits(model, TEXT + tail)).abs().max()
        assert error < 1e-9, f"slot {slot}: {error}"


def test_windows_matter_in_these_tests() -> None:
    """Negative control: without its window a model gives other logits here."""
    for kind in ("Mistral", "Gemma3Text", "Cohere2", "Olmo3"):
        wide = make(kind, sliding_window=63)
        assert (true_logits(wide, TEXT) - true_logits(reference(kind), TEXT)).abs().max() > 1e-3, kind


@pytest.mark.parametrize("kind", FAMILIES)
def test_features_are_the_states_of_transformers(kind: str) -> None:
    runner = Runner(ours(kind), TEXT)
    out = runner.run(16, features=("hidden:last", "hidden:2,0", "hidden:1"))
    with torch.inference_mode():
        states = reference(kind)(input_ids=torch.tensor([TEXT]), use_cache=False, output_hidden_states=True).hidden_states
    assert (out.features["hidden:last"] - states[-1][0]).abs().max() < 1e-9
    assert (out.features["hidden:2,0"] - torch.cat([states[2][0], states[0][0]], -1)).abs().max() < 1e-9
    assert (out.features["hidden:1"] - states[1][0]).abs().max() < 1e-9
    assert not ours(kind).base._forward_hooks, "a hook was left behind"


@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text", "GPTNeoX", "Cohere2", *SCALED])
def test_partial_runs_compose_to_the_whole(kind: str) -> None:
    """Layer by layer, each run starting from the states of the one before, over prompt, chain and tree."""
    whole, partly = Runner(ours(kind), TEXT), Runner(ours(kind), TEXT)
    for nodes, pending in ((None, 8), (None, 7), (Proposal.trees([TREE]), 1)):
        want, hidden = whole.run(pending, nodes, features=("hidden:1", "hidden:2")), None
        for layer in range(3):
            _, layout = partly.layout(pending, nodes)
            out = partly.decoder.forward(layout, partly.cache, layers=(layer,), hidden=hidden)
            hidden = out.hidden
            if layer < 2:
                assert torch.equal(hidden, want.features[f"hidden:{layer + 1}"])
        partly.request.computed += pending
        assert (out.logits is None) == (want.logits is None)
        assert want.logits is None or torch.equal(out.logits, want.logits)
    blocks = partly.decoder.blocks
    assert getattr(partly.decoder.base, partly.decoder.field) is blocks and not any(b._forward_pre_hooks for b in blocks)


def test_a_head_after_the_first_layer() -> None:
    """An early exit: first layers, final norm, head, by hand."""
    decoder, model = ours("Llama"), reference("Llama")
    runner = Runner(decoder, TEXT)
    out = runner.run(16, layers=(0, 1))
    with torch.inference_mode():
        state = model(input_ids=torch.tensor([TEXT]), use_cache=False, output_hidden_states=True).hidden_states[2][0]
        want = model.lm_head(model.model.norm(state))[-1]
    assert (out.hidden - state).abs().max() < 1e-9 and (out.logits[0] - want).abs().max() < 1e-9


@pytest.mark.parametrize("layers", [(1, 0), (0, 0), (2, 1)])
def test_layers_out_of_order_are_a_mistake(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="distinct and in order"):
        Runner(ours("Llama"), TEXT).run(16, layers=layers)
    assert Runner(ours("Llama"), TEXT).run(16).logits is not None, "the model is whole again"


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_guesses_past_the_context_do_no_harm(kind: str) -> None:
    """A table of positions ends with the context; a deep guess past it must not bring the pass down, nor change other rows."""
    text = [t % 48 for t in range(63)]
    runner = Runner(ours(kind), text)
    runner.cache = SlotCache(runner.decoder.layers, 1, 80, torch.float64)
    runner.cache.reserve(runner.request, 80)
    runner.run(62)
    out = runner.run(1, Proposal.chains([[4, 5, 6, 7]]))
    assert (out.logits[0] - true_logits(reference(kind), text)).abs().max() < 1e-9
    assert (out.logits[1] - true_logits(reference(kind), [*text, 4])).abs().max() < 1e-9


def test_logits_to_keep_is_no_requirement() -> None:
    """A model that computes all logits whatever it is asked is served all the same."""
    model = make("Llama")
    decoder = Decoder(model, "all-rows")
    forward = model.forward

    def every_row(*args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = every_row
    out = Runner(decoder, TEXT).run(16)
    assert out.logits.shape[0] == 1 and (out.logits[0] - true_logits(reference("Llama"), TEXT)).abs().max() < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_load_and_give_fp32_logits(dtype: torch.dtype) -> None:
    decoder = Decoder(make("Llama", dtype), "typed")
    out = Runner(decoder, TEXT).run(16)
    assert out.logits.dtype == torch.float32 and decoder.dtype == dtype
    assert decoder.packed == (3 * 7 + 1 if dtype == torch.float32 else 0)
    want = true_logits(make("Llama", dtype), TEXT).float()
    assert (out.logits[0] - want).norm() / want.norm() < (1e-4 if dtype == torch.float32 else 0.1)


# Refusals


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("Mixtral", {"num_local_experts": 4}, "mixture of experts"),
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 8}, "mixture of experts"),
        ("Olmoe", {"num_experts": 4}, "mixture of experts"),
        ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_intermediate_size": 8}, "mixture of experts"),
        ("Gemma2", {}, r"softcap, which this engine does not implement exactly"),
        ("RecurrentGemma", {}, "linear_attention are not supported"),
        ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "conv are not supported"),
        ("StableLm", {}, "does not let its attention be replaced"),
        ("Nemotron", {}, "does not hand its extra arguments"),
        ("DiffLlama", {}, "gives other logits through this engine than through transformers"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "longest row in the pass"),
        (
            "Phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32,
                    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "partial_rotary_factor": 1.0,
                },
                "original_max_position_embeddings": 32,
            },
            "longest row in the pass",
        ),
    ],
)  # fmt: skip
def test_refusals_name_the_reason(kind: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        Decoder(make(kind, **changes), kind)


def test_dynamic_rope_of_one_layer_type_is_found() -> None:
    model = reference("Gemma3Text")
    config = model.config
    saved = config.rope_parameters
    config.rope_parameters = {**saved, "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    try:
        with pytest.raises(UnsupportedModel, match="longest row"):
            refuse(model, "gemma")
    finally:
        config.rope_parameters = saved
    refuse(model, "gemma")


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_static_rope_is_fine(rope: str) -> None:
    parameters = {
        "rope_type": rope, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }  # fmt: skip
    allowed = {"linear": 3, "yarn": 4, "llama3": 6}[rope]
    Decoder(make("Llama", rope_parameters=dict(list(parameters.items())[:allowed])), rope)


def test_encoder_decoders_are_refused_as_such() -> None:
    config = transformers.T5Config(vocab_size=48, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        Decoder(transformers.T5ForConditionalGeneration(config), "t5")


class Wrong(nn.Module):
    """Stands in for a layer's attention, and gets it slightly wrong."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = self.inner(*args, **kwargs)
        return (out * 1.01 if self.inner.config._attn_implementation == attention.NAME else out), weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_comparison_at_load_catches_wrong_attention(dtype: torch.dtype) -> None:
    model = make("Llama", dtype)
    model.model.layers[1].self_attn = Wrong(model.model.layers[1].self_attn)
    with pytest.raises(UnsupportedModel, match=r"\(LlamaForCausalLM\) gives other logits.*refusing to run it inexactly"):
        Decoder(model, "wrong")


@pytest.mark.parametrize("plant", ["window", "scale", "mask"])
def test_the_comparison_at_load_catches_planted_faults(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, visible = attention._options, Layout.visible

    def wrong(module: nn.Module, given: dict[str, object]) -> Any:
        state, window, scale = options(module, given)
        return state, (3 if plant == "window" else window), (0.3 if plant == "scale" else scale)

    monkeypatch.setattr(attention, "_options", wrong)
    if plant == "mask":
        monkeypatch.setattr(Layout, "visible", lambda self, span, window=None: (visible(self, span, window) is None) or None)
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        Decoder(make("Llama"), "planted")


def test_nan_weights_do_not_pass_the_comparison() -> None:
    model = make("Llama")
    model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        Decoder(model, "nan")


@pytest.mark.parametrize(
    ("options", "mask", "reason"),
    [
        ({"s_aux": torch.zeros(4)}, None, "asks attention for s_aux"),
        ({"softcap": 50.0}, None, "asks attention for softcap"),
        ({"position_bias": torch.zeros(1)}, None, "position_bias"),
        ({"is_causal": False}, None, "is_causal"),
        ({}, torch.zeros(1, 1, 2, 2), "a mask of its own"),
    ],
)
def test_unknown_attention_arguments_are_refused(options: dict[str, Any], mask: Tensor | None, reason: str) -> None:
    module = nn.Module()
    module.layer_idx = 0
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(UnsupportedModel, match=reason):
        attend(module, q, q, q, mask, outrider_pass=Pass(), scaling=1.0, **options)
    attend(module, q, q, q, None, outrider_pass=Pass(), scaling=1.0, softcap=None, sliding_window=None, dropout=0.0)
    with pytest.raises(UnsupportedModel, match="does not hand its extra arguments"):
        attend(module, q, q, q, None, scaling=1.0)
    module.is_causal = False
    with pytest.raises(UnsupportedModel, match="is not causal"):
        attend(module, q, q, q, None, outrider_pass=Pass(), scaling=1.0)


# Truncation


def test_truncate_keeps_the_first_layers() -> None:
    model = truncate(make("Gemma3Text"), 2)
    decoder = Decoder(model, "short")
    assert decoder.num_layers == 2 == len(model.config.layer_types)
    assert truncate(make("Llama"), 0).config.num_hidden_layers == 3
    with pytest.raises(BadInput, match="cannot keep 4 layers of big: it has only 3"):
        truncate(make("Llama"), 4, "big")


def test_rows_of_several_requests_do_not_mix() -> None:
    """Two requests in one pass, one with a tree, against each alone."""
    decoder = ours("Cohere2")
    cache = SlotCache(decoder.layers, 2, 64, torch.float64)
    requests: list[Request] = [tiny.request(TEXT[:7]), tiny.request(TEXT)]
    for r in requests:
        cache.reserve(r, 40)
    trees = Proposal.trees([TREE, []])
    layout = Layout.build(Batch(tuple(requests), (7, 16), (True, True), (9, 9)), trees, cache)
    out = decoder.forward(layout, cache)
    model, parents = reference("Cohere2"), [p for _, p in TREE]
    for slot in range(len(TREE) + 1):
        tail = [TREE[c][0] for c in oracle.path_to(parents, slot - 1)] if slot else []
        assert (out.logits[slot] - true_logits(model, TEXT[:7] + tail)).abs().max() < 1e-9
    assert (out.logits[-1] - true_logits(model, TEXT)).abs().max() < 1e-9
