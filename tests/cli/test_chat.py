"""`outrider chat`: history, commands, a context that fills up, Ctrl-C."""

from __future__ import annotations

import builtins

import pytest

import outrider.cli.chat as chat_command
from outrider.cli.chat import Conversation, react
from outrider.cli.options import Display
from outrider.config import SamplingParams
from outrider.errors import BadInput
from tests.cli.conftest import fake_llm


@pytest.fixture
def talk(script):
    llm = fake_llm(script)("m", progress=lambda line: None)
    return Conversation(llm, SamplingParams(max_tokens=10), Display())


def test_history_goes_through_the_template(run, script):
    result = run("chat", "--system", "Be kind.", input="one\n\ntwo\n")
    assert result.exit_code == 0
    assert result.stdout == "Hello!\nHello!\n"
    assert result.stderr.count("tok/s") == 2
    assert len(script.asked) == 2


def test_a_conversation_remembers(talk, script):
    talk.ask("one")
    talk.ask("two")
    assert [m["content"] for m in talk.messages] == ["one", "Hello!", "two", "Hello!"]
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2


def test_chat_samples_by_default(run, script):
    run("chat", input="hi\n")
    assert script.asked[0][1].temperature == 0.7


def test_reset_keeps_the_system_message(script):
    llm = fake_llm(script)("m", progress=lambda line: None)
    talk = Conversation(llm, SamplingParams(), Display(), "Be kind.")
    talk.ask("one")
    react(talk, "/reset", True)
    assert [m["content"] for m in talk.messages] == ["Be kind."]


def test_seed_is_set_and_unset(run, script):
    result = run("chat", input="/seed 5\na\n/seed\nb\n")
    assert result.exit_code == 0
    assert [params.seed for _, params in script.asked] == [5, None]


def test_draft_is_toggled(run, script):
    assert run("chat", input="/draft\na\n/draft\nb\n").stdout == "H[el]{-x-}l[o]!\nHello!\n"


def test_help_and_exit(run, script):
    result = run("chat", input="/help\n/exit\nnever asked\n")
    assert result.exit_code == 0
    assert "/reset" in result.stderr
    assert script.asked == []


@pytest.mark.parametrize(
    ("line", "said"), [("/sed 5", "unknown command"), ("/seed five", "whole number"), ("/seed -1", "seed must be")]
)
def test_bad_commands_end_a_pipe_and_not_a_talk(run, talk, script, capsys, line, said):
    result = run("chat", input=f"{line}\nhi\n")
    assert result.exit_code == 2
    assert said in result.stderr
    assert react(talk, line, interactive=True)
    assert said in capsys.readouterr().err


def test_not_utf8_on_a_pipe(run, script):
    result = run("chat", input=b"hi\n\xff\n")
    assert result.exit_code == 2
    assert "line 2" in result.stderr


def test_the_oldest_turns_go_when_the_context_is_full(talk, script, capsys):
    script.context = talk.llm.max_model_len = 40  # the stand-in counts a character as a token; 10 are kept for the answer
    for text in ("a" * 10, "b" * 10):
        talk.ask(text)
    assert "outgrew" not in capsys.readouterr().err
    talk.ask("c" * 10)
    assert [m["content"][0] for m in talk.messages] == ["b", "H", "c", "H"]
    assert "the oldest turn forgotten" in capsys.readouterr().err


def test_one_message_that_is_too_long_is_refused_and_not_remembered(talk, script, capsys):
    talk.ask("one")
    script.fail_start = BadInput("the prompt is too long")
    assert react(talk, "x" * 5000, interactive=True)
    assert "too long" in capsys.readouterr().err
    assert [m["content"] for m in talk.messages] == ["one", "Hello!"]


def test_ctrl_c_keeps_the_partial_answer(talk, script, capsys):
    script.fail_after = (1, KeyboardInterrupt())
    assert react(talk, "one", interactive=True), "the talk goes on"
    assert [m["content"] for m in talk.messages] == ["one", "H"]
    assert "ended by abort" in capsys.readouterr().err


def test_ctrl_c_in_a_pipe_ends_with_130(run, script):
    script.fail_after = (1, KeyboardInterrupt())
    result = run("chat", input="one\ntwo\n")
    assert result.exit_code == 130
    assert result.stdout == "H\n"


def test_ctrl_c_and_ctrl_d_at_the_prompt(monkeypatch, capsys):
    typed = iter([KeyboardInterrupt(), "hi", EOFError()])

    def fake_input(prompt):
        value = next(typed)
        if isinstance(value, BaseException):
            raise value
        return value

    monkeypatch.setattr(builtins, "input", fake_input)
    assert list(chat_command.typed_lines()) == ["hi"]


def test_a_model_without_a_template(run, script):
    script.template = False
    result = run("chat", input="hi\n")
    assert result.exit_code == 2
    assert "chat template" in result.stderr
