"""From a name to a loaded model: what names mean, the cache of dequantised copies, damaged files."""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import BadWeights, ModelNotFound, OutriderWarning, UnsupportedModel
from outrider.models import embedded, weight_cache, weights
from outrider.models.weights import EMBEDDED, Loaded, Source, cache_dir, entries, load, resolve
from tests.models.tiny_gguf import Tiny

IDS = torch.tensor([[1, 70, 71, 99, 5, 5, 263, 8]])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    Tiny(kind="Q4_1").write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def directory(file: Path, tmp_path: Path) -> Path:
    """A model directory as save_pretrained writes it."""
    load(resolve(file))
    shutil.copytree(entries()[0].path, tmp_path / "model")
    (tmp_path / "model" / "outrider.json").unlink()
    return tmp_path / "model"


def logits(loaded: Loaded) -> torch.Tensor:
    with torch.no_grad():
        return loaded.model(IDS).logits


def same(a: Loaded, b: Loaded) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))


# Names


def test_what_names_mean(file: Path, directory: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "weights.bin"
    shutil.copy(file, renamed)
    assert resolve(str(file)) == Source("gguf", "tiny.gguf", file)
    assert resolve(renamed) == Source("gguf", "weights.bin", renamed), "by content, not by name"
    assert resolve(directory) == Source("directory", "model", directory)
    assert resolve("some-org/some.model-1") == Source("hub", "some-org/some.model-1")
    assert resolve(EMBEDDED) == Source("embedded", EMBEDDED, embedded.find())
    assert weights.DEFAULT_MODEL == EMBEDDED


@pytest.mark.parametrize("name", ["", "nonsense", "a/b/c", "/no/such/dir", "org/file.gguf", "~nobody-here/x", "a\0b", "../x"])
def test_names_of_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # nobody knows what lies beside the project
    with pytest.raises(ModelNotFound):
        resolve(name)


def test_close_names_are_offered(file: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"did you mean {EMBEDDED}"):
        resolve("smollm2-135m-instuct")
    with pytest.raises(ModelNotFound, match=f"did you mean {file}"):
        resolve(file.with_name("tinny.gguf"))


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not weights at all")
    with pytest.raises(BadWeights, match=r"model.gguf is not a GGUF file \(18 bytes\)"):
        resolve(path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(BadWeights, match="give its directory"):
        resolve(path)


def test_hub_failure_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match=r"org/name: .*ConnectionError: no route.*network.*directory") as caught:
        load(resolve("org/name"))
    assert "\n" not in str(caught.value)


def test_hub_download_is_loaded_as_a_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(directory))
    loaded = load(resolve("org/name"))
    assert loaded.name == "org/name"
    assert same(loaded, load(resolve(directory)))


# The cache


def test_second_load_comes_from_the_cache_and_is_the_same(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = load(resolve(file), progress=said.append)
    assert len(said) == 1
    assert "dequantising tiny.gguf" in said[0]
    assert str(cache) in said[0]
    monkeypatch.setattr(weights, "read_header", None)  # dequantising again would fail
    second = load(resolve(file), progress=said.append)
    assert len(said) == 1
    assert same(first, second)
    assert torch.equal(logits(first), logits(second))
    assert first.fingerprint == second.fingerprint
    text = "hello  12 <s>"
    assert first.tokenizer.encode(text) == second.tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    assert first.tokenizer.chat(messages) == second.tokenizer.chat(messages)
    for loaded in (first, second):
        assert loaded.chat
        assert loaded.tokenizer.eos_ids == {2}
        assert not loaded.model.training
        assert not any(p.requires_grad for p in loaded.model.parameters())
        assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert [e.name for e in entries()] == ["tiny.gguf"]
    assert entries()[0].bytes == sum(f.stat().st_size for f in entries()[0].path.iterdir())


def test_options_reach_the_model(file: Path) -> None:
    for _ in range(2):  # fresh and cached
        loaded = load(resolve(file), torch.float64, attn_implementation="eager")
        assert loaded.model.dtype == torch.float64
        assert loaded.model.config._attn_implementation == "eager"
    assert load(resolve(file), torch.bfloat16).model.dtype == torch.bfloat16


def test_all_ends_that_the_file_names(tmp_path: Path) -> None:
    path = tmp_path / "ends.gguf"
    Tiny(extra={"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 9}).write(path)
    for _ in range(2):  # fresh and cached
        assert load(resolve(path)).tokenizer.eos_ids == {2, 3, 9}


def test_changed_file_is_another_entry(file: Path, tmp_path: Path) -> None:
    first = load(resolve(file))
    changed = np.full((64, 32), 0.5, np.float32)
    Tiny(kind="Q4_1", tensors={"blk.0.ffn_up.weight": changed}).write(file)
    second = load(resolve(file))
    assert not same(first, second)
    assert first.fingerprint != second.fingerprint
    assert len(entries()) == 2


def damage_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "weights gone": lambda p: (p / "model.safetensors").unlink(),
    "weights cut": lambda p: os.truncate(p / "model.safetensors", 1000),
    "one bit": lambda p: damage_bit(p / "model.safetensors"),
    "tokenizer gone": lambda p: (p / "tokenizer.json").unlink(),
    "config empty": lambda p: (p / "config.json").write_text(""),
    "manifest gone": lambda p: (p / "outrider.json").unlink(),
    "manifest garbage": lambda p: (p / "outrider.json").write_text("{]"),
    "manifest of another kind": lambda p: (p / "outrider.json").write_text('{"name": "x", "files": {"config.json": 3}}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_rebuilt(damage: str, file: Path) -> None:
    first, said = load(resolve(file)), []
    place = entries()[0].path
    DAMAGE[damage](place)
    assert same(first, load(resolve(file), progress=said.append))
    assert len(said) == 1, "the damage was not seen"
    assert same(first, load(resolve(file), progress=said.append))
    assert len(said) == 1, "the entry was not rebuilt"
    assert [p.name for p in place.parent.iterdir()] == [place.name], "something was left behind"


def test_touched_but_equal_entry_is_kept(file: Path) -> None:
    load(resolve(file))
    for path in entries()[0].path.iterdir():
        os.utime(path, (1, 1))
    said: list[str] = []
    load(resolve(file), progress=said.append)
    assert said == []


def test_no_place_for_the_cache_warns_and_loads(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(resolve(file))
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "plain" / "sub"))
    with pytest.warns(OutriderWarning, match=r"plain/sub.*Set OUTRIDER_CACHE"):
        assert same(first, load(resolve(file)))
    assert entries() == []


def test_full_disk_warns_and_leaves_nothing(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(file.parent)
    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.warns(OutriderWarning, match=r"0 MiB are free.*OUTRIDER_CACHE"):
        load(resolve(file))
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))

    def no_space(converted: Any, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "_write", no_space)
    with pytest.warns(OutriderWarning, match="No space left"):
        load(resolve(file))
    assert [p for p in cache.rglob("*") if p.is_file()] == []


def test_two_writers_race(cache: Path) -> None:
    ready, results = threading.Barrier(4), []

    def write(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        ready.wait()

    def one() -> None:
        results.append(weight_cache.store("m", "k" * 24, 10, write))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads = [threading.Thread(target=one) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [weight_cache.find("m", "k" * 24)] * 4
    assert [p.name for p in results[0].parent.iterdir()] == [results[0].name]


def test_an_entry_that_appears_at_the_last_moment_wins(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, other = os.replace, []

    def late(source: Path, target: Path) -> None:
        shutil.copytree(source, target)
        other.append((target / "f").stat().st_ino)
        rename(source, target)

    monkeypatch.setattr(weight_cache.os, "replace", late)
    place = weight_cache.store("m", "k", 10, lambda directory: (directory / "f").write_text("x") and None)
    assert place is not None
    assert [(place / "f").stat().st_ino] == other
    assert [p.name for p in place.parent.iterdir()] == ["m-k"]


def test_leftovers_of_killed_processes_are_swept(cache: Path) -> None:
    root = cache / "models" / "v1"
    for name, age in ((".tmp-old", 100_000), (".tmp-new", 10)):
        (root / name).mkdir(parents=True)
        old = weight_cache.time.time() - age
        os.utime(root / name, (old, old))
    weight_cache.store("m", "k", 10, lambda directory: (directory / "f").write_text("x") and None)
    assert sorted(p.name for p in root.iterdir()) == [".tmp-new", "m-k"]


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("OUTRIDER_CACHE", "~/here")
    assert cache_dir() == Path("/home/me/here")
    monkeypatch.setenv("OUTRIDER_CACHE", "")
    assert cache_dir() == Path("/xdg/outrider")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path("/home/me/.cache/outrider")


# Directories


def refuse(directory: Path, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        load(resolve(directory))
    assert str(directory) in str(caught.value)


def test_directories_without_something(directory: Path, file: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "t")
    refuse(directory, ModelNotFound, "tokenizer")
    (directory / "t").rename(directory / "tokenizer.json")
    (directory / "model.safetensors").rename(directory / "model.bin")
    refuse(directory, UnsupportedModel, "pickled")
    (directory / "model.bin").unlink()
    refuse(directory, ModelNotFound, "no weights")
    shutil.copy(file, directory)
    (directory / "config.json").unlink()
    refuse(directory, ModelNotFound, "no config.json; it holds tiny.gguf")


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ("{", BadWeights, "config.json cannot be read"),
        ("[]", BadWeights, "not a JSON object"),
        ('{"model_type": "no_such_model"}', UnsupportedModel, "no_such_model"),
        ('{"model_type": "t5"}', UnsupportedModel, "'t5' is not a decoder-only"),
        ('{"model_type": "vit"}', UnsupportedModel, "'vit' is not a decoder-only"),
    ],
)
def test_bad_configurations(content: str, error: type[Exception], words: str, directory: Path) -> None:
    (directory / "config.json").write_text(content)
    refuse(directory, error, words)


def test_damaged_safetensors(directory: Path) -> None:
    path = directory / "model.safetensors"
    data = path.read_bytes()
    for damaged, words in [
        (data[:-1], f"promises {len(data):,} bytes, it has {len(data) - 1:,}"),
        (data + b"x", f"promises {len(data):,} bytes, it has {len(data) + 1:,}"),
        (data[:5], "cut off in its header"),
        (data[:100], "cut off in its header"),
        (b"\xff" * 8 + data[8:], "no safetensors file"),
        (data[:8] + b"}" + data[9:], "corrupt safetensors header"),
        (data[:8] + b"[1]".ljust(int.from_bytes(data[:8], "little")) + data[-100:], "corrupt safetensors header"),
    ]:
        path.write_bytes(damaged)
        refuse(directory, BadWeights, words)


def test_missing_misshapen_infinite_and_unused_tensors(directory: Path) -> None:
    path = directory / "model.safetensors"
    state, name = load_file(path), "model.layers.1.mlp.up_proj.weight"
    good = state[name].clone()
    for value, words in [
        (None, f"1 tensors are missing.*{name}"),
        (good[:, :16].contiguous(), f"wrong shape, first {name}"),
        (torch.where(torch.arange(32) == 3, torch.nan, good), f"{name} holds NaN"),
        (torch.where(torch.arange(32) == 3, torch.inf, good), f"{name} holds NaN or inf"),
    ]:
        save_file({k: v for k, v in {**state, name: value}.items() if v is not None}, path, {"format": "pt"})
        refuse(directory, BadWeights, words)
    save_file({**state, "model.layers.2.mlp.up_proj.weight": good}, path, {"format": "pt"})
    with pytest.warns(OutriderWarning, match=r"1 tensors are not used.*layers.2"):
        load(resolve(directory))


def test_shards(directory: Path) -> None:
    whole = load(resolve(directory))
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    halves = (sorted(state)[::2], sorted(state)[1::2])
    table = {name: f"part{i}.safetensors" for i, names in enumerate(halves) for name in names}
    for i, names in enumerate(halves):
        save_file({n: state[n] for n in names}, directory / f"part{i}.safetensors", {"format": "pt"})
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": table}))
    assert same(whole, load(resolve(directory)))
    (directory / "part1.safetensors").unlink()
    refuse(directory, BadWeights, "lacks 1 of 2 weight files, first part1.safetensors")
    index.write_text('{"weight_map": {}}')
    refuse(directory, BadWeights, "names no weight files")


def test_loading_is_silent_and_keeps_transformers_settings(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    logging.enable_progress_bar()
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    assert before[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(resolve(directory))
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
