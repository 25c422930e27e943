"""`outrider export`: what it writes can be drafted with, what it prints can be run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from safetensors import SafetensorError

from outrider.drafters.eagle import Eagle

from .. import heads, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model as a directory, with a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    tiny.model(dtype=torch.float32).save_pretrained(path)
    letters = Tokenizer(models.WordLevel({f"t{i}": i for i in range(tiny.VOCAB)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="t1", unk_token="t0").save_pretrained(path)
    return str(path)


def test_eagle(run, model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = heads.eagle_directory(vocab=20)
    result = run("export", str(source), "--out", str(out), "--model", model, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["layout"] == "safeail" and set(told["commands"]) == {"vllm", "sglang"}
    words = shlex.split(told["commands"]["vllm"])
    assert words[:3] == ["vllm", "serve", model]
    assert json.loads(words[-1]) == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 5}
    assert "--speculative-algorithm EAGLE3" in told["commands"]["sglang"] and str(out) in told["commands"]["sglang"]
    request = tiny.request([3, 5, 7])
    tiny.World().run(Eagle(Eagle.Config(path=str(out))), [request])
    assert request.stats.drafted > 0


@pytest.mark.parametrize("layout", ["speculators", "safeail"])
def test_eagle_for_people(run, model: str, tmp_path: Path, layout: str) -> None:
    result = run("export", str(heads.eagle_directory()), "--out", str(tmp_path / "out"), "--model", model, "--layout", layout)
    assert result.exit_code == 0 and f"({layout} layout)" in result.stdout and "vllm serve" in result.stdout


def test_medusa(run, model: str, tmp_path: Path) -> None:
    result = run("export", str(heads.medusa_directory()), "--out", str(tmp_path / "out"), "--model", model)
    assert result.exit_code == 0 and '"method": "medusa"' in result.stdout and "sglang" not in result.stdout


def test_a_full_disk(run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    eagle = heads.eagle_directory()
    monkeypatch.setattr("outrider.models.checkpoint.save_file", full)
    result = run("export", str(eagle), "--out", str(tmp_path / "out"), "--model", model)
    assert result.exit_code == 2 and "cannot write to" in result.output and "No space left" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--out", "{tmp}/x"], "no directory"),
        (["{eagle}", "--out", "{eagle}"], "not empty"),
        (["{eagle}", "--out", "{tmp}/x", "--layout", "gguf"], "safeail or speculators"),
        (["{eagle}", "--out", "{tmp}/x", "--dtype", "int8"], "unknown dtype"),
        (["{eagle}", "--out", "/dev/null/x"], "cannot write"),
    ],
)
def test_bad_input(run, model: str, tmp_path: Path, arguments: list[str], words: str) -> None:
    given = [a.format(tmp=tmp_path, eagle=heads.eagle_directory()) for a in arguments]
    result = run("export", *given, "--model", model)
    assert result.exit_code == 2 and words in result.stderr and "Traceback" not in result.output
