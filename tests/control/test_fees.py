"""What rounds with guesses cost beyond their parts, told apart by how many there are in a row."""

from __future__ import annotations

import pytest

from outrider.control.fees import Fee, Fees
from outrider.control.foresight import FORGET, KEEP
from outrider.control.tally import Tally


def test_a_row_pays_once_and_each_of_its_rounds() -> None:
    fees = Fees()
    assert fees.of(4) is None
    for rounds in (1, 4, 2, 8, 1, 3):
        fees.add(4, rounds, 0.9 + 0.4 * rounds)
    found = fees.of(4)
    assert found is not None and found.once == pytest.approx(0.9) and found.each == pytest.approx(0.4)
    assert found.entering == pytest.approx(0.4 + 0.9 / (19 / 6))
    assert fees.of(64) == found, "nothing was seen of batches as large"


def test_one_row_that_was_stalled_changes_nothing_and_nothing_is_below_zero() -> None:
    fees = Fees()
    for rounds in (1, 4, 2, 8, 1, 3, 5):
        fees.add(1, rounds, 0.1 * rounds - 0.3)
    fees.add(1, 2, 50.0)
    found = fees.of(1)
    assert found is not None and found.once == 0.0 and found.each < 0.3


def test_where_all_rows_are_equally_long_both_parts_are_believed_to_be_alike() -> None:
    fees = Fees()
    for _ in range(3):
        fees.add(16, 1, 1.2)
    assert fees.of(16) == Fee(0.6, 0.6, 1.0)


def test_promises_that_are_not_kept_count_less_and_are_believed_again_in_time() -> None:
    tally = Tally()
    assert tally.share(1.0) == 1.0
    for _ in range(100):
        tally.add(8.0, 4, KEEP)
    assert tally.share(1.0) == pytest.approx(0.5, abs=0.01)
    for _ in range(600):
        tally.add(0.0, 0, FORGET)
    assert tally.share(1.0) > 0.8
