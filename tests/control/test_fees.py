"""What rounds with guesses cost beyond their parts, told apart by how many there are in a row."""

from __future__ import annotations

import pytest

from outrider.control.fees import OLD, Fee, Fees
from outrider.control.foresight import FORGET, KEEP
from outrider.control.prompts import PATIENCE, Prompts
from outrider.control.tally import Tally


def test_a_row_pays_once_and_each_of_its_rounds() -> None:
    fees = Fees()
    assert fees.of(4, 0.8) == Fee(0.4, 0.4), "nothing was seen"
    for rounds in (1, 4, 2, 8, 1, 3):
        fees.add(4, rounds, 0.9 + 0.4 * rounds)
    found = fees.of(4, 0.8)
    assert found.once == pytest.approx(0.9) and found.each == pytest.approx(0.4)
    assert found.entering == pytest.approx(0.4 + 0.9 / (19 / 6))
    other = fees.of(64, 0.8)
    assert other.once == 0.4 and other.each == pytest.approx(0.4), "of other batches no more than is believed"


def test_one_row_that_was_stalled_changes_nothing_and_nothing_is_below_zero() -> None:
    fees = Fees()
    fees.add(1, 2, 50.0)
    assert fees.of(1, 0.8) == Fee(0.4, 0.4), "one tells nothing"
    for rounds in (1, 4, 2, 8, 1, 3, 5):
        fees.add(1, rounds, 0.1 * rounds - 0.3)
    found = fees.of(1, 0.8)
    assert found.once == 0.0 and found.each < 0.3


def test_where_all_rows_are_equally_long_both_parts_are_believed_to_be_alike() -> None:
    fees = Fees()
    for _ in range(3):
        fees.add(16, 1, 1.2)
    assert fees.of(16, 0.8) == Fee(0.6, 0.6, 1.0)


def test_what_was_too_dear_once_is_forgotten_in_time() -> None:
    fees = Fees()
    for _ in range(3):
        fees.add(1, 1, 6.0)
    assert fees.of(1, 0.8).entering == 6.0
    for _ in range(OLD):
        fees.pause(1)
    assert fees.of(1, 0.8) == Fee(0.4, 0.4)


def test_promises_that_are_not_kept_count_less_and_are_believed_again_in_time() -> None:
    tally = Tally()
    assert tally.share(1.0) == 1.0
    for _ in range(100):
        tally.add(8.0, 4, KEEP)
    assert tally.share(1.0) == pytest.approx(0.5, abs=0.01)
    for _ in range(600):
        tally.add(0.0, 0, FORGET)
    assert tally.share(1.0) > 0.8


def test_a_round_after_prompts_waits_unless_all_do() -> None:
    prompts = Prompts()
    told = [prompts.told(reads) for reads in (False, True, False, False, True, True, False)]
    assert told == [False, False, True, False, False, False, True] and not prompts.near
    for number in range(20):
        assert not prompts.told(True) and prompts.near == (number < PATIENCE - 1)
        assert prompts.told(False) == (number < PATIENCE - 1), "one had waited already"
    assert not prompts.told(False) and not prompts.told(True) and prompts.near, "a calm round begins anew"
