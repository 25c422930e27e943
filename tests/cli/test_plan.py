"""`outrider plan`: for a card one does not have, from a result, and measured on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.plan import cards, formulas, pairs, sizes
from outrider.plan.cards import Estimate
from outrider.plan.fit import day
from tests.models.tiny_gguf import Tiny

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
SMALL = LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
PASSES = {  # docs/performance.md: layers, hidden, intermediate, heads, pairs, vocabulary, tied; milliseconds of 1 and of 16 rows
    "8B": ((32, 4096, 14336, 32, 8, 128256, False), 6.35, 6.58),
    "1.5B": ((28, 1536, 8960, 12, 2, 151936, True), 2.02, 2.12),
    "135M": ((30, 576, 1536, 9, 3, 49152, True), 1.01, 1.04),
}


def described(folder: Path, **values: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | values))
    return str(folder)


@pytest.fixture
def big(tmp_path: Path) -> str:
    return described(tmp_path / "big")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    Tiny(kind="Q4_1").write(tmp_path / "tiny.gguf")
    return str(tmp_path / "tiny.gguf")


def texts(folder: Path) -> str:
    (folder / "short.txt").write_text("one two one two one two\n\na b c a b c a b c\n")
    return str(folder / "short.txt")


def planned(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_sizes_from_config_alone(big: str) -> None:
    found = sizes.size(big)
    assert found.parameters == 8_030_261_248 and found.read == found.parameters - 128256 * 4096
    assert (found.kv, found.layers, found.family, found.vocab) == (2 * 32 * 8 * 128, 32, "llama", 128256)
    assert sizes.size(f"{big}/config.json").parameters == found.parameters


@pytest.mark.parametrize("shape", PASSES)
def test_estimates_against_passes_that_were_measured(shape: str, tmp_path: Path) -> None:
    (layers, hidden, inner, heads, groups, vocab, tied), one, sixteen = PASSES[shape]
    values = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    more = {"num_key_value_heads": groups, "vocab_size": vocab, "tie_word_embeddings": tied}
    found = sizes.size(described(tmp_path / shape, **values, **more))
    estimate = Estimate(cards.find("h100"), found, 2.0 * found.read, context=512)
    assert estimate.verify(1, 1) * 1000 == pytest.approx(one, rel=0.05)
    assert estimate.verify(1, 16) * 1000 == pytest.approx(sixteen, rel=0.08)


def test_a_card_one_does_not_have(run, big: str, tmp_path: Path) -> None:
    draft = f"draft_model:path={described(tmp_path / 'small', **SMALL)}"
    ask = [
        "plan",
        "--model",
        big,
        "--card",
        "H100",
        "--task",
        "code",
        "--draft",
        draft,
        "--load",
        "5e7",
        "--price",
        "2",
        "--json",
    ]
    found = planned(run(*ask))
    [one] = found["outlooks"]
    assert [a["batch"] for a in one["advice"]] == [1, 4, 16, 64] and one["rate"] == pytest.approx(0.6)
    assert 1 <= one["advice"][0]["depth"] <= 4 and 1.2 < one["advice"][0]["speedup"] < 2 and not one["measured_costs"]
    assert [p["draft"] for p in found["picks"]] == [draft] * 4 and found["picks"][0]["depth"] == one["advice"][0]["depth"]
    [pair] = found["pairs"]
    assert not pair["refused"] and pair["share"] == pytest.approx(0.154, abs=0.002)
    plain, drafted = found["memory"]
    assert plain["weights"] == 2 * 8_030_261_248 and plain["fits"] and drafted["most"] < plain["most"]
    assert plain["kv"] == 64 * 1024 * 2 * 2 * 32 * 8 * 128
    first = found["days"][0]
    assert first["saved_money"] == pytest.approx(2 * first["saved_hours"]) and first["saved_hours"] > 0
    assert "Llama-3.2-1B" in found["wanted"]


def test_pairs_too_close_in_size_are_refused(run, big: str, tmp_path: Path) -> None:
    draft = (
        f"draft_model:path={described(tmp_path / 'twin', num_hidden_layers=24, vocab_size=32000, max_position_embeddings=4096)}"
    )
    ask = ["plan", "--model", big, "--card", "H100", "--acceptance", "0.9", "--draft", draft]
    found = planned(run(*ask, "--json"))
    assert found["outlooks"] == [] and found["pairs"][0]["refused"]
    too_close, family, context = found["pairs"][0]["reasons"]
    assert "too close in size" in too_close and "must be right" in too_close
    assert "32,000 tokens" in family and "trained for 4,096" in context
    assert "REFUSED" in run(*ask).stdout and "nothing is left" in run(*ask).stdout


def test_the_drafter_without_a_model_and_the_one_not_named(run, big: str) -> None:
    ask = ["plan", "--model", big, "--card", "L4", "--acceptance", "0.5", "--batch", "1", "--requests", "900"]
    found = run(*ask)
    assert found.exit_code == 0 and "a tenth of the size" in found.stdout and "DOES NOT FIT" in found.stdout
    lookup = planned(run(*ask, "--draft", "ngram", "--json"))
    assert lookup["outlooks"][0]["advice"][0]["speedup"] > 1.8 and len(lookup["memory"]) == 1
    assert run(*ask, "--draft", "layer_skip").exit_code == 2


def test_measured_here(run, tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    short = ["--workload", texts(tmp_path), "--max-tokens", "24", "--depths", "1,4", "--device", "cpu", "--dtype", "float32"]
    result = run("plan", "--model", tiny, "--draft", "ngram", *short, "--output", str(out))
    assert result.exit_code == 0, result.output
    assert "ngram on short" in result.stdout and "costs measured" in result.stdout and "R K + (1-R)" in result.stdout
    [one] = json.loads(out.read_text())["outlooks"]
    assert {p["depth"] for p in one["grid"]} == {1, 4} and all(p["known"] for p in one["grid"])


def test_answers_too_short_to_measure(run, tiny: str, tmp_path: Path) -> None:
    short = ["--workload", texts(tmp_path), "--max-tokens", "2", "--device", "cpu", "--dtype", "float32"]
    result = run("plan", "--model", tiny, "--draft", "ngram", *short)
    assert result.exit_code == 2 and "raise --max-tokens" in result.stderr


def test_a_drafter_that_is_none_is_not_recommended(run, big: str) -> None:
    found = planned(run("plan", "--model", big, "--card", "H100", "--acceptance", "0.6", "--draft", "synthetic", "--json"))
    assert found["outlooks"][0]["synthetic"] and found["picks"] == []


def test_from_a_result_of_the_benchmark(run, tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    short = ["--workload", texts(tmp_path), "--limit", "1", "--max-tokens", "24", "--repeats", "1"]
    drafts = ["--draft", "synthetic:rate=0.8", "--draft", "ngram"]
    assert run("bench", "--model", tiny, *drafts, *short, "--depth", "4", "--output", str(out)).exit_code == 0
    found = planned(
        run("plan", "--model", tiny, "--from", str(out), "--depths", "1-6", "--draft", "synthetic:rate=0.8", "--json")
    )
    [one] = found["outlooks"]
    assert one["measured_costs"] and one["rate"] == pytest.approx(0.8, abs=0.25)
    assert [f["measured"] is not None for f in one["formulas"]] == [False, False, False, True]
    measured = next(f for f in one["formulas"] if f["measured"])
    assert measured["all_or_nothing"] == pytest.approx(formulas.all_or_nothing(one["rate"], 4))
    more = planned(run("plan", "--model", tiny, "--from", str(out), "--draft", "synthetic:rate=0.8", "--batch", "1,64", "--json"))
    assert [p["known"] for p in more["outlooks"][0]["grid"] if p["depth"] == 4] == [True, False]
    assert run("plan", "--model", tiny, "--from", str(out), "--draft", "suffix").exit_code == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--acceptance", "1.5"],
        ["--task", "codes"],
        ["--task", "code", "--acceptance", "0.5"],
        ["--card", "H1000"],
        ["--depths", "0-3"],
        ["--batch", "x"],
        ["--from", "nowhere.json"],
        ["--draft", "nosuch"],
        ["--requests", "4"],
        ["--price", "2"],
        ["--card", "H100", "--task", "code", "--dtype", "int3"],
        ["--card", "H100", "--task", "code", "--draft", "none"],
        ["--card", "H100", "--task", "code", "--length", "1" + "0" * 400],
        ["--card", "H100", "--task", "code", "--load", "inf"],
        ["--card", "H100", "--task", "code", "--load", "5", "--price", "inf"],
        ["--batch", "2000"],
        ["--model", "config.json"],
    ],
)
def test_bad_usage(run, big: str, options: list[str]) -> None:
    result = run("plan", "--model", big, *options)
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize("text", ["", "[]", '{"results": []}', '{"results": 1, "settings": {}, "provenance": {}}'])
def test_files_that_are_no_results(run, big: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    assert run("plan", "--model", big, "--from", str(tmp_path / "other.json")).exit_code == 2


def test_texts_longer_than_the_model_can_read(run, big: str) -> None:
    ask = ["plan", "--model", big, "--card", "H200", "--acceptance", "0.5", "--batch", "1", "--json", "--length"]
    assert not planned(run(*ask, "131072"))["notes"]
    assert "made for texts of 131,072 tokens" in planned(run(*ask, "200000"))["notes"][0]


def test_memory_that_error_correction_takes() -> None:
    """What `nvidia-smi` shows of cards with GDDR6 and ECC, in MiB."""
    for name, seen in (("T4", 15360), ("A10", 23028), ("L4", 23034), ("L40S", 46068), ("A100", 81920), ("H100", 81559)):
        assert cards.find(name).memory * 1024 == pytest.approx(seen, rel=0.005)


def test_what_to_look_for(big: str, tmp_path: Path) -> None:
    odd = sizes.size(described(tmp_path / "odd", vocab_size=5000))
    assert "outrider train" in pairs.wanted(odd) and "5,000" in pairs.wanted(odd)


def test_a_day() -> None:
    assert day(3_600_000, 1000.0, 2000.0, 3.0).saved_money == pytest.approx(1.5) and day(1e6, 10, 10).saved_money is None
