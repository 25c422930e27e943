"""`outrider generate`: what reaches the engine, what is shown, and every way to get it wrong."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import BadInput, BadWeights, OutOfMemory, OutriderWarning
from tests.cli.conftest import Round, summary

STATS = {
    "tokens", "rounds", "drafted", "accepted", "tokens_per_round", "acceptance_rate", "acceptance_by_position",
    "draft_seconds", "verify_seconds", "seconds", "tokens_per_second", "drafter", "accept", "lossless", "controller",
    "speedup", "losing",
}  # fmt: skip


def test_text_on_stdout_all_else_on_stderr(run, script):
    result = run("generate", "hi")
    assert result.exit_code == 0
    assert result.stdout == "Hello!\n"
    for part in (
        "20.0 tok/s",
        "6 tokens",
        "2.00 tokens per round",
        "75% of 4 guesses",
        "drafter ngram",
        "seed 7",
        "first token 0.25 s",
    ):
        assert part in result.stderr
    assert "note: picked something" in result.stderr
    assert script.closed


def test_a_final_newline_is_not_doubled(run, script):
    script.rounds = (Round("", "a\n"),)
    assert run("generate", "hi").stdout == "a\n"


def test_every_option_reaches_its_place(run, script):
    options = (
        "--model m.gguf --draft ngram:max=5 --control adaptive --accept rejection --device cpu --dtype float32 --quantize int8 "
        "--max-model-len 99 --max-tokens 9 "
        "--min-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --seed 3 --stop A --stop B --repetition-penalty 1.1 "
        "--frequency-penalty 0.2 --presence-penalty 0.3 --logit-bias 5=1.5 --logit-bias 7=-2 --bad-word ugly --ignore-eos --raw "
        "--trace t.jsonl --trace-text --trace-mib 2"
    )
    assert run("generate", "hi", *options.split()).exit_code == 0
    assert script.loaded == {
        "model": "m.gguf", "draft": "ngram:max=5", "prefix_cache": True, "kv_tokens": None,
        "control": "adaptive", "accept": "rejection", "device": "cpu",
        "dtype": "float32", "quantize": "int8", "max_model_len": 99,
        "trace": "t.jsonl", "trace_text": True, "trace_mib": 2.0, "rehearse": 1,
    }  # fmt: skip
    [(prompt, params)] = script.asked
    assert prompt == "hi"
    wanted = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 3,
        "stop": ("A", "B"), "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3,
        "logit_bias": {5: 1.5, 7: -2.0}, "bad_words": ("ugly",), "ignore_eos": True,
    }  # fmt: skip
    assert {name: getattr(params, name) for name in wanted} == wanted


def test_defaults_are_greedy_and_exact(run, script):
    run("generate", "hi")
    [(_, params)] = script.asked
    assert (params.temperature, params.max_tokens, params.seed, params.stop) == (0.0, 256, None, ())
    assert script.loaded["accept"] == "coupled"


def test_lists_do_not_leak_from_one_call_into_the_next(run, script):
    run("generate", "hi", "--stop", "A", "--logit-bias", "1=2")
    run("generate", "hi")
    assert script.asked[1][1].stop == ()
    assert script.asked[1][1].logit_bias == {}


@pytest.mark.parametrize(
    ("template", "flag", "chat"), [(True, None, True), (False, None, False), (True, "--raw", False), (True, "--chat", True)]
)
def test_the_template_is_used_where_there_is_one(run, script, template, flag, chat):
    script.template = template
    run("generate", "hi", *([flag] if flag else []))
    assert script.asked[0][0] == ([{"role": "user", "content": "hi"}] if chat else "hi")


def test_threads_are_set(run, script, monkeypatch):
    import torch

    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    assert run("generate", "hi", "--threads", "1").exit_code == 0
    assert seen == [1]


def test_prompt_from_file_and_stdin_unchanged(run, script, tmp_path):
    text = " zwei  Zeilen\r\nünd\n"
    (tmp_path / "p.txt").write_bytes(text.encode())
    run("generate", "--raw", "-f", str(tmp_path / "p.txt"))
    run("generate", "--raw", "--file", "-", input=text.encode())
    assert [prompt for prompt, _ in script.asked] == [text, text]


def test_json_is_one_object_with_the_promised_fields(run, script):
    result = run("generate", "hi", "--json")
    found = json.loads(result.stdout)
    assert set(found) == {"text", "token_ids", "finish_reason", "seed", "lossless", "stats"}
    assert set(found["stats"]) == STATS
    assert found["text"] == "Hello!"
    assert found["token_ids"] == [ord(c) for c in "Hello!"]
    assert found["lossless"] is True
    assert found["stats"]["acceptance_by_position"] == [0.75]
    assert "note:" in result.stderr


def test_losing_is_said(run, script):
    script.result = {"stats": replace(summary(6, 3), speedup=0.91, losing=True)}
    assert "LOSING: 0.91 times" in run("generate", "hi").stderr
    assert json.loads(run("generate", "hi", "--json").stdout)["stats"]["losing"] is True


def test_json_says_lossy(run, script):
    script.result = {"lossless": False}
    assert json.loads(run("generate", "hi", "--json").stdout)["lossless"] is False
    assert "LOSSY" in run("generate", "hi").stderr


BAD = {
    "empty": (["generate", ""], "prompt is empty"),
    "blank": (["generate", " \n"], "prompt is empty"),
    "none": (["generate"], "no prompt"),
    "two prompts": (["generate", "hi", "--file", "x"], "drop one"),
    "no such file": (["generate", "--file", "/nowhere/x"], "No such file"),
    "a directory": (["generate", "--file", "/"], "Is a directory"),
    "not utf-8 argument": (["generate", "a\udcff"], "not valid UTF-8"),
    "unknown drafter": (["generate", "hi", "--draft", "ngrm:max=2"], "did you mean 'ngram'"),
    "temperature": (["generate", "hi", "--temperature", "-1"], "temperature must be in"),
    "nan": (["generate", "hi", "--temperature", "nan"], "finite"),
    "top_p 0": (["generate", "hi", "--top-p", "0"], "top_p must be in"),
    "top_p 2": (["generate", "hi", "--top-p", "2"], "top_p must be in"),
    "max_tokens": (["generate", "hi", "--max-tokens", "0"], "max_tokens must be in"),
    "min > max": (["generate", "hi", "--max-tokens", "2", "--min-tokens", "3"], "larger than max_tokens"),
    "seed": (["generate", "hi", "--seed", "-1"], "seed must be between"),
    "bias": (["generate", "hi", "--logit-bias", "5"], "not ID=VALUE"),
    "bias token": (["generate", "hi", "--logit-bias", "x=1"], "not ID=VALUE"),
    "bias twice": (["generate", "hi", "--logit-bias", "1=1", "--logit-bias", "1=2"], "twice"),
    "bias inf": (["generate", "hi", "--logit-bias", "1=inf"], "finite"),
    "empty stop": (["generate", "hi", "--stop", ""], "non-empty"),
    "conflict": (["generate", "hi", "--json", "--show-draft"], "exclude each other"),
    "no int": (["generate", "hi", "--max-tokens", "many"], "--max-tokens"),
    "threads": (["generate", "hi", "--threads", "0"], "--threads"),
    "unknown option": (["generate", "hi", "--frobnicate"], "--frobnicate"),
    "unknown command": (["generat", "hi"], "generat"),
}


@pytest.mark.parametrize(("args", "said"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_told_and_ends_with_2(run, script, args, said):
    result = run(*args)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert script.loaded == {}, "bad input must be found before the model is loaded"


def test_unknown_drafter_lists_the_known(run, script):
    stderr = run("generate", "hi", "--draft", "nonsense").stderr
    assert all(name in stderr for name in ("ngram", "none"))


def test_draft_help_lists_drafters_and_options(run, script):
    result = run("generate", "--draft", "help")
    assert result.exit_code == 0
    assert "\nngram: " in result.stdout
    assert "max=" in result.stdout


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_prompt_that_is_not_utf8(run, script, tmp_path, source):
    (tmp_path / "p").write_bytes(b"ab\xff")
    result = run("generate", "-f", "-", input=b"ab\xff") if source == "stdin" else run("generate", "-f", str(tmp_path / "p"))
    assert result.exit_code == 2
    assert "not valid UTF-8 (byte 2)" in result.stderr


@pytest.mark.parametrize(
    "error", [BadInput("the prompt has 9 tokens"), BadWeights("m.gguf is truncated"), OutOfMemory("no disk for the cache")]
)
@pytest.mark.parametrize("when", ["fail_load", "fail_start"])
def test_errors_of_the_engine_are_told(run, script, error, when):
    setattr(script, when, error)
    result = run("generate", "hi")
    assert result.exit_code == 2
    assert f"error: {error}" in result.stderr
    assert "Traceback" not in result.stderr


def test_chat_without_a_template(run, script):
    script.template = False
    result = run("generate", "hi", "--chat")
    assert result.exit_code == 2
    assert "--raw" in result.stderr


def test_debug_shows_the_traceback(run, script):
    script.fail_start = BadInput("no")
    result = run("generate", "hi", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "error: no" in result.stderr


def test_a_bug_is_called_a_bug(run, script):
    script.fail_after = (1, KeyError("oops"))
    result = run("generate", "hi")
    assert result.exit_code == 70
    assert "KeyError" in result.stderr
    assert "--debug" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in run("generate", "hi", "--debug").stderr


def test_an_answer_that_failed(run, script):
    script.result = {"finish_reason": "error", "error": "scores were not finite"}
    result = run("generate", "hi")
    assert result.exit_code == 2
    assert "error: scores were not finite" in result.stderr


@pytest.mark.parametrize(("after", "text"), [(0, ""), (1, "H"), (2, "Hell")])
def test_ctrl_c_shows_what_there_is(run, script, after, text):
    script.fail_after = (after, KeyboardInterrupt())
    result = run("generate", "hi")
    assert result.exit_code == 130
    assert result.stdout.strip() == text
    assert "ended by abort" in result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_under_json_gives_the_partial_object(run, script):
    script.fail_after = (1, KeyboardInterrupt())
    result = run("generate", "hi", "--json")
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert (found["text"], found["finish_reason"]) == ("H", "abort")


def test_ctrl_c_shows_text_that_was_held_back(run, script):
    script.rounds = (Round("", "ab", text="a"), Round("", "c"))
    script.fail_after = (1, KeyboardInterrupt())
    assert run("generate", "hi").stdout == "ab\n"


def test_ctrl_c_while_loading(run, script):
    script.fail_load = KeyboardInterrupt()
    result = run("generate", "hi")
    assert result.exit_code == 130
    assert result.stdout == ""


def test_our_warnings_take_one_line_and_others_none(run, script):
    def warn() -> None:
        warnings.warn("the drafter failed", OutriderWarning, stacklevel=1)
        warnings.warn("library chatter", UserWarning, stacklevel=1)

    script.before_round = warn
    result = run("generate", "hi")
    assert "\nwarning: the drafter failed\n" in result.stderr
    assert "chatter" not in result.stderr
    assert "chatter" in run("generate", "hi", "--debug").stderr


def test_show_draft_without_colour(run, script):
    result = run("generate", "hi", "--show-draft")
    assert result.stdout == "H[el]{-x-}l[o]!\n"
    assert "[text]: accepted guess" in result.stderr
    assert "\x1b" not in result.stdout + result.stderr


def test_show_draft_with_colour(run, script, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = run("generate", "hi", "--show-draft")
    assert "\x1b[4;32mel\x1b[0m" in result.stdout
    assert "\x1b[2;9;31m[x]\x1b[0m" in result.stdout
    assert result.stdout.startswith("H")
    assert "green underlined" in result.stderr


def test_no_color_wins(run, script, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert run("generate", "hi", "--show-draft").stdout == "H[el]{-x-}l[o]!\n"


def test_text_alone_never_carries_marks(run, script, monkeypatch):
    script.rounds = (Round("[bold]a", "[/] :smile: \x1b[0m"),)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("generate", "hi").stdout == "[bold]a[/] :smile: \x1b[0m\n"


def test_a_rejected_newline_does_not_break_the_line(run, script):
    script.rounds = (Round("a", "b", "x\ny"),)
    assert run("generate", "hi", "--show-draft").stdout == "[a]{-x\\ny-}b\n"


def test_prompt_file_may_be_a_path_object_with_spaces(run, script, tmp_path):
    file = Path(tmp_path / "a prompt")
    file.write_text("x")
    assert run("generate", "-f", str(file)).exit_code == 0
