"""`outrider demo`: the comparison must be able to fail, and its sentence to admit a loss."""

from __future__ import annotations

import ast

import pytest

from outrider.cli.demo import CODE

TEXT = "same answer"


def test_equal_and_faster(run, script):
    script.by_depth = {0: (TEXT, 10.0), None: (TEXT, 25.0)}
    result = run("demo")
    assert result.exit_code == 0
    assert result.stdout.count(TEXT) == 2
    assert "2.50 times as fast" in result.stdout
    for part in ("3 of 4 (75%)", "10.0", "25.0"):
        assert part in result.stdout
    assert result.stdout.split("same tokens")[1].split()[0] == "yes"


def test_plain_comes_first_and_both_are_warmed_up(run, script):
    script.by_depth = {0: (TEXT, 10.0), None: (TEXT, 25.0)}
    run("demo", "--max-tokens", "50")
    assert [(p.depth, p.max_tokens) for _, p in script.asked] == [(0, 8), (None, 8), (0, 50), (None, 50)]
    assert len({str(prompt) for prompt, _ in script.asked}) == 1
    assert all(p.temperature == 0 for _, p in script.asked)


@pytest.mark.parametrize(("other", "at"), [("same amswer", 7), ("same", 5), (TEXT + "s", 12)])
def test_a_difference_is_a_failure(run, script, other, at):
    script.by_depth = {0: (TEXT, 10.0), None: (other, 25.0)}
    result = run("demo")
    assert result.exit_code == 1
    assert f"NO, from token {at} on" in result.stdout
    assert "must never happen" in result.stdout
    assert "as fast" not in result.stdout


@pytest.mark.parametrize(("speed", "said"), [(8.0, "slower"), (10.2, "no faster and no slower")])
def test_a_loss_is_admitted(run, script, speed, said):
    script.by_depth = {0: (TEXT, 10.0), None: (TEXT, speed)}
    result = run("demo")
    assert result.exit_code == 0
    assert said in result.stdout
    assert "as fast." not in result.stdout


def test_ctrl_c(run, script):
    script.fail_after = (1, KeyboardInterrupt())
    assert run("demo").exit_code == 130


def test_the_code_to_fix_has_one_error():
    with pytest.raises(SyntaxError):
        ast.parse(CODE)
    ast.parse(CODE.replace("if quantity <= 0\n", "if quantity <= 0:\n"))
