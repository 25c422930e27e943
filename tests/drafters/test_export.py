"""Layouts of trained drafters: what is written is read back, offsets and layers are counted as each project counts them, and
files that do not fit are refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import SamplingParams
from outrider.drafters import _export
from outrider.drafters.eagle import Eagle
from outrider.drafters.medusa import Medusa
from outrider.errors import BadInput, BadWeights, DrafterMismatch, ModelNotFound, OutriderWarning
from outrider.loading import start_for
from outrider.models import checkpoint, eagle_files, medusa_heads

from .. import heads, tiny

FULL = {"rows": "own", "vocab": 20, "fc_norm": True, "norm_output": True, "norm_before_residual": True}
EAGLES = {"three": {}, "few": {"vocab": 20}, "full": FULL, "one": {"version": 1}}


def target() -> _export.Target:
    made = heads.teacher()
    return _export.Target("tiny", made.embeddings, made.head, 3, ("LlamaForCausalLM",))


def rows() -> eagle_files.Rows:
    made = heads.teacher()
    return eagle_files.Rows(made.embeddings, made.head)


def logits(path, dtype=torch.float32):
    """The network's scores over two steps on fixed states and tokens, and the tokens they are of."""
    net, ids = eagle_files.build(checkpoint.read(path), rows(), dtype, "tiny")
    generator = torch.Generator().manual_seed(4)
    plan = net.plan
    width = plan.states * plan.target if plan.version == 3 else plan.target
    hidden, tokens = net.fuse(torch.randn(1, 6, width, generator=generator)), torch.arange(3, 9)[None]
    out = []
    for _ in range(2):
        x, residual = net.enter(hidden, tokens)
        query, key, value = net.project(x, torch.arange(6)[None])
        seen = torch.ones(6, 6, dtype=torch.bool).tril()[None]
        from outrider.models.eagle_net import attend

        mixed = net.leave(residual, attend(query, key, value, seen, net.scale))
        out.append(net.scores(mixed))
        hidden = net.back(mixed)
    return torch.stack(out), ids


def same(one, two):
    (a, ids_a), (b, ids_b) = one, two
    assert torch.allclose(a, b, atol=1e-6, rtol=0)
    assert (ids_a is None and ids_b is None) or torch.equal(ids_a, ids_b)


@pytest.mark.parametrize(
    ("kind", "layout"), [(k, w) for k in EAGLES for w in eagle_files.LAYOUTS if not (k == "one" and w == "speculators")]
)
def test_an_exported_drafter_is_the_same_drafter(kind, layout, tmp_path):
    source = heads.eagle_directory(**EAGLES[kind])
    _export.export_eagle(source, tmp_path / "out", layout, target())
    same(logits(source), logits(tmp_path / "out"))
    _export.export_eagle(tmp_path / "out", tmp_path / "again", "safeail", target())
    same(logits(source), logits(tmp_path / "again"))


@pytest.mark.parametrize("layout", eagle_files.LAYOUTS)
def test_an_exported_drafter_guesses_the_same(layout, tmp_path):
    source = heads.eagle_directory(**FULL)
    _export.export_eagle(source, tmp_path / "out", layout, target())
    found = []
    for path in (source, tmp_path / "out"):
        made = [tiny.request(p, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)) for p in tiny.prompts(3, seed=5)]
        tiny.World().run(Eagle(Eagle.Config(path=str(path), depth=3, width=2, nodes=6)), made)
        found.append([(r.output, r.stats.rounds, r.stats.accepted) for r in made])
    assert found[0] == found[1]


def test_names_and_facts_of_the_first_layout(tmp_path):
    _export.export_eagle(heads.eagle_directory(**FULL), tmp_path, "safeail", target())
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    wanted = {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
        "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight",
    }
    wanted |= {f"midlayer.self_attn.{p}_proj.weight" for p in "qkvo"} | {
        f"midlayer.mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    }
    assert wanted <= tensors.keys() and "embed_tokens.weight" not in tensors
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    assert config["vocab_size"] == tiny.VOCAB and config["draft_vocab_size"] == 20
    assert config["rope_theta"] == 10000.0 and config["norm_before_residual"] is True
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64) and tensors["fc.weight"].shape == (32, 96)


def test_names_and_facts_of_the_second_layout(tmp_path):
    _export.export_eagle(heads.eagle_directory(vocab=20), tmp_path, "speculators", target())
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert "layers.0.self_attn.q_proj.weight" in tensors and not any("midlayer" in name for name in tensors)
    assert tensors["lm_head.weight"].shape == (20, 32)
    assert config["speculators_model_type"] == "eagle3" and config["transformer_layer_config"]["vocab_size"] == tiny.VOCAB
    assert config["norm_before_residual"] is False, "a missing key would mean True there"
    assert config["speculators_config"]["verifier"] == {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("layout", eagle_files.LAYOUTS)
def test_d2t_is_an_offset(layout, tmp_path):
    _export.export_eagle(heads.eagle_directory(vocab=20), tmp_path, layout, target())
    tensors = load_file(tmp_path / "model.safetensors")
    _, ids = logits(tmp_path)
    kept = tensors["t2d"].nonzero()[:, 0]
    assert tensors["d2t"].dtype is torch.int64 and tensors["t2d"].dtype is torch.bool
    assert torch.equal(tensors["d2t"] + torch.arange(20), kept) and torch.equal(ids, kept)
    assert tiny.EOS in kept.tolist() and not torch.equal(tensors["d2t"], kept)
    assert torch.equal(tensors["lm_head.weight"], heads.teacher().head[kept])


def test_fused_layers_are_counted_as_each_project_counts_them(tmp_path):
    """Inputs of layers 1, 2 and 0 are the outputs of layers 0, 1 and -1 (the embeddings)."""
    _export.export_eagle(heads.eagle_directory(states="1+2+0"), tmp_path / "a", "safeail", target())
    _export.export_eagle(heads.eagle_directory(states="1+2+0"), tmp_path / "b", "speculators", target())
    one, two = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert one["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, -1]
    assert two["eagle_aux_hidden_state_layer_ids"] == [1, 2, 0]
    del one["eagle_aux_hidden_state_layer_ids"]
    assert eagle_files.describe(tmp_path, one).feature == eagle_files.describe(tmp_path, two).feature == "hidden:1,2,0"


def test_layers_that_a_config_leaves_out_are_eagles_own():
    world = tiny.World(own=tiny.decoder("llama", 3))
    config = json.loads((heads.eagle_directory() / "config.json").read_text())
    for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "outrider"):
        del config[key]
    assert eagle_files.describe(heads.eagle_directory(), config).feature == "hidden:2,mid,-3"
    drafter = heads.eagle()
    drafter.needs = type(drafter.needs)(("hidden:2,mid,-3",), kv=drafter.needs.kv, target=True)
    start_for(world.target, drafter, "tiny", None)
    assert world.target.needs.features == ("hidden:2,1,0",)


def test_llama3_rope_is_read_from_old_and_new_keys(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    config = json.loads((heads.eagle_directory() / "config.json").read_text())
    del config["rope_parameters"]
    old = config | {"rope_theta": 5e5, "rope_scaling": scaling}
    new = config | {"rope_parameters": scaling | {"rope_theta": 5e5}}
    tables = [eagle_files.describe(tmp_path, c).plan.rotary().inv_freq for c in (old, new, config)]
    assert torch.equal(tables[0], tables[1]) and not torch.allclose(tables[0], tables[2])
    with pytest.raises(BadWeights, match="dynamic"):
        eagle_files.describe(tmp_path, config | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})


def test_a_public_file_of_version_1(tmp_path):
    """As SafeAILab published them: `layers.0.*` in a pickle, embeddings beside, a bias in the map."""
    source = heads.eagle_directory(version=1)
    tensors = load_file(source / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in tensors and "fc.bias" in tensors
    torch.save(tensors | {"embed_tokens.weight": heads.teacher().embeddings}, tmp_path / "pytorch_model.bin")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "outrider"}))
    assert eagle_files.describe(tmp_path, checkpoint.config_of(tmp_path)).plan.version == 1
    same(logits(source), logits(tmp_path))


@pytest.mark.parametrize("options", [{}, {"vocab": 20}, {"rows": "own"}, {"rows": "own", "vocab": 20, "layers": 2}], ids=str)
@pytest.mark.parametrize("layout", _export.MEDUSA_LAYOUTS)
def test_exported_heads_are_the_same_heads(layout, options, tmp_path):
    source = heads.medusa_directory(**options)
    _export.export_medusa(source, tmp_path, layout, target())
    (a, ids), (b, some) = (
        medusa_heads.build(checkpoint.read(p), heads.teacher().head, torch.float32, "tiny") for p in (source, tmp_path)
    )
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    one, two = a(hidden), b(hidden)
    two = two if ids is None or some is not None else two[..., ids]
    assert torch.allclose(one, two, atol=1e-6, rtol=0)
    made = Medusa(Medusa.Config(path=str(tmp_path)))
    request = tiny.request([3, 5, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    tiny.World().run(made, [request])
    assert request.stats.drafted > 0


# What does not fit


def damaged(tmp_path, change, **options):
    shutil.copytree(heads.eagle_directory(**options), tmp_path, dirs_exist_ok=True)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Eagle.Config(path=str(tmp_path))


def narrow(tensors, config):
    config |= {"hidden_size": 16}
    tensors["fc.weight"] = torch.zeros(16, 48)


BAD = {
    "missing": (lambda t, c: t.pop("midlayer.mlp.up_proj.weight"), BadWeights, "up_proj.weight is missing"),
    "nan": (lambda t, c: t["fc.weight"].fill_(float("nan")), BadWeights, "NaN"),
    "shape": (lambda t, c: t.update({"norm.weight": torch.zeros(3)}), BadWeights, "shape"),
    "hidden": (narrow, DrafterMismatch, "states of size 16"),
    "vocabulary": (lambda t, c: c.update({"vocab_size": 128256}), DrafterMismatch, "128256 tokens"),
    "layers": (lambda t, c: c["outrider"].update({"layers": 30}), DrafterMismatch, "30 layers"),
    "states": (lambda t, c: c.update({"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}), DrafterMismatch, "hidden:2,15,27"),
    "ids for offsets": (lambda t, c: t["d2t"].add_(torch.arange(20)), DrafterMismatch, "offsets belong"),
    "twice": (lambda t, c: t["d2t"].copy_(-torch.arange(20)), BadWeights, "offsets"),
    "no d2t": (lambda t, c: t.pop("d2t"), BadWeights, "d2t is missing"),
    "whole model": (lambda t, c: c.update({"num_hidden_layers": 30}), BadWeights, "30 decoder layers"),
    "config": (lambda t, c: c.pop("hidden_size"), BadWeights, "no hidden_size"),
    "heads": (lambda t, c: c.update({"num_attention_heads": "many"}), BadWeights, "num_attention_heads"),
    "other speculators": (
        lambda t, c: c.update({"transformer_layer_config": dict(c), "speculators_model_type": "dflash"}),
        BadWeights,
        "dflash",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_drafters_that_do_not_fit_are_refused_by_name(name, tmp_path):
    change, error, words = BAD[name]
    with pytest.raises(error, match=words):
        tiny.World().engine(Eagle(damaged(tmp_path, change, vocab=20)))


def test_a_head_that_is_missing_is_no_head_to_borrow(tmp_path):
    """Only a drafter that says so borrows the target's head over a reduced vocabulary."""

    def change(tensors, config):
        del config["outrider"], tensors["lm_head.weight"]

    with pytest.raises(BadWeights, match=r"lm_head\.weight is missing"):
        tiny.World().engine(Eagle(damaged(tmp_path, change, vocab=20, rows="own")))


def test_another_revision_is_told(tmp_path):
    world, drafter = tiny.World(), heads.eagle()
    world.target.fingerprint = "another"
    with pytest.warns(OutriderWarning, match="other weights"):
        drafter.start(start_for(world.target, drafter, "tiny", None))


def test_a_hub_id_is_fetched(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **how: asked.append((name, how)) or heads.eagle_directory()
    )
    assert Eagle(Eagle.Config(path="some/eagle")).path == heads.eagle_directory()
    assert asked[0][0] == "some/eagle" and "*.bin" in asked[0][1]["allow_patterns"]

    def fail(name, **how):
        raise OSError("no network\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelNotFound, match="hub gave nothing"):
        Eagle(Eagle.Config(path="some/eagle"))


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ModelNotFound, match="no directory"):
        Eagle(Eagle.Config(path=str(tmp_path / "nowhere")))
    shutil.copytree(heads.eagle_directory(), tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "more.safetensors")
    with pytest.raises(BadInput, match="2 files of weights"):
        tiny.World().engine(Eagle(Eagle.Config(path=str(tmp_path))))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelNotFound, match="no weights"):
        tiny.World().engine(Eagle(Eagle.Config(path=str(tmp_path))))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(BadWeights):
        tiny.World().engine(Eagle(Eagle.Config(path=str(tmp_path))))


def test_unknown_layouts_are_refused(tmp_path):
    with pytest.raises(BadInput, match="safeail or speculators"):
        _export.export_eagle(heads.eagle_directory(), tmp_path / "x", "gguf", target())
    with pytest.raises(BadInput, match="EAGLE-3"):
        _export.export_eagle(heads.eagle_directory(version=1), tmp_path / "x", "speculators", target())
    with pytest.raises(BadInput, match="medusa or vllm"):
        _export.export_medusa(heads.medusa_directory(), tmp_path / "x", "safeail", target())
    assert not (tmp_path / "x").exists()
