"""The page: what it says, that it needs nothing else, and, where there is a browser, that it can be read everywhere."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.bench import words
from outrider.bench.charts import axis
from outrider.bench.page import page
from outrider.bench.plan import Point
from outrider.bench.report import Divergence
from tests.bench.reports import EVEN, FAST, MIXED, SLOW, report, rows

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
SWEEP = report(
    *(rows("code", "guess", FAST, Point(t, b), depth) for t in (0.0, 1.0) for b in (1, 4) for depth in (1, 3)),
    *(rows("code", "guess", SLOW, Point(0.0, None, r), 1) for r in (1.0, 2.0)),
)


def text_of(html: str) -> str:
    """Without scripts, styles and tags."""
    visible = re.sub(r"<(script|style).*?</\1>", " ", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", visible))


def test_the_headline() -> None:
    assert words.headline(report(rows("code", "guess", FAST))).text == "guess answers 2.0× as fast, same text"
    assert words.headline(report(rows("code", "guess", SLOW))).text == "guess answers at 0.80× the plain speed, same text"
    assert "no difference beyond noise" in words.headline(report(rows("code", "guess", EVEN))).text
    both = report(rows("code", "sure", FAST), rows("code", "lucky", (101.0, 900.0, 300.0)))
    assert words.headline(both).text == "sure answers 2.0× as fast, same text"
    assert "too much to be sure" in words.headline(report(rows("code", "guess", (101.0, 300.0)))).text
    assert "in the one pair of runs" in words.headline(report(rows("code", "guess", FAST[:1]))).text
    below = words.headline(MIXED).below
    assert "from 0.80× on creative to 2.0× on code" in below and "greedy, one request at a time" in below


def test_texts_that_differ_come_before_any_speed() -> None:
    wrong = replace(MIXED, rows=(replace(MIXED.rows[1], equal=8), *MIXED.rows))
    assert words.headline(wrong).text == "The texts differ" and words.headline(wrong).below.startswith("1 answers")
    divergence = Divergence("code", "guess", 2, 5, 7, 8, False, 0.5)
    assert "DIFFERENT TEXT (FAULT): code, guess, prompt 2: token 5 is 8 instead of 7" in text_of(
        page(replace(wrong, divergences=(divergence,)))
    )


def test_the_headline_tells_variants_of_one_drafter_apart() -> None:
    found = report(rows("code", "guess:max=3", FAST), rows("code", "guess:max=6", SLOW))
    assert words.headline(found).text == "guess:max=3 answers 2.0× as fast, same text"


def test_a_loss_that_only_the_average_shows() -> None:
    """The headline and what is said below it must not contradict each other."""
    pairs = [rows(name, "guess", speeds) for name, speeds in (("a", (80.0, 101.0, 102.0)), ("b", (99.0, 79.0, 98.0)))]
    pairs.append(rows("c", "guess", (101.0, 99.0, 79.0)))
    found = report(*pairs)
    assert {r.verdict for pair in pairs for r in pair[1:]} == {"unclear"} and words.headline(found).verdict == "loses"
    assert words.losses(found)[0].startswith("Over all 3 kinds of text together, guess is slower: 0.9")


def test_losses_in_words() -> None:
    said = words.losses(MIXED)
    assert said[0].startswith("On creative, guess is slower than plain decoding: 0.80 times its speed")
    assert "Its 1.25 tokens per pass do not pay" in said[0]
    slow = next(r for r in MIXED.rows if r.verdict == "loses")
    for changes, why in (
        ({"drafted": 0}, "It made no guesses"),
        ({"draft_seconds": slow.seconds / 2}, "Drafting took 50% of the time"),
        ({"alpha": 0.1}, "Only 10% of its guesses were right"),
    ):
        assert why in words.losses(replace(MIXED, rows=(replace(slow, **changes),)))[0]
    assert words.losses(report(rows("code", "guess", FAST))) == ["No drafter was slower than plain decoding beyond doubt."]


def test_the_page_says_it_all_and_asks_nobody() -> None:
    html = page(MIXED)
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)|https?://|@import|url\(""", html)
    text = text_of(html)
    for said in ("Speed-up by kind of text", "▲ 2.00×", "▼ 0.80×", "Where speculation loses", "How often guesses are right",
                 "Where the time goes", "How long a reader waits", "not measured (no GPU)", "c0ffee", "outrider bench --quick",
                 "27 of 27 answers"):  # fmt: skip
        assert said in text, said
    found = re.search(r'<script type="application/json" id="result">(.*?)</script>', html, re.DOTALL)
    assert found is not None and json.loads(found[1]) == json.loads(json.dumps(MIXED.as_json()))


def test_curves_only_where_something_was_swept() -> None:
    assert "What changes it" not in text_of(page(MIXED))
    text = text_of(page(SWEEP))
    for by in ("guesses ahead", "temperature", "prompts answered together", "requests per second"):
        assert f"By {by}" in text
    assert "T = 1, batch 4: 2.0× with guess, depth" in text


def test_names_cannot_break_the_page() -> None:
    bad = "</script><b>&"
    html = page(report(rows(bad, bad, FAST)))
    assert bad not in html and "&lt;/script&gt;" in html


@pytest.mark.parametrize("most", [0.0, 0.003, 1.0, 2.9, 47.0, 1234.5])
def test_axes_have_round_numbers(most: float) -> None:
    scale = axis(most, "x", 1.0)
    assert scale.end >= max(most, 1.0) and 1 <= len(scale.ticks) <= 500 and scale.ticks[0] == 0
    assert scale.at(-1) == "0.00%" and scale.at(1e9) == "100.00%"


def test_plain_decoding_alone_has_a_page(tmp_path: Path) -> None:
    alone = replace(MIXED, rows=tuple(r for r in MIXED.rows if r.speedup is None))
    assert "No drafter was compared with plain decoding" in text_of(page(alone))


def test_in_a_browser(tmp_path: Path) -> None:
    """No sideways scrolling on a phone, themes that switch by keyboard, nothing asked of anybody, no complaints."""
    driver = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no Chromium here: install Debian's package `chromium`")
    with driver.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        try:
            for width, found in ((1280, MIXED), (390, MIXED), (390, SWEEP)):
                file = tmp_path / "result.html"
                file.write_text(page(found), encoding="utf-8")
                _read(browser.new_context(viewport={"width": width, "height": 800}, color_scheme="light").new_page(), file)
        finally:
            browser.close()


def _read(tab: Any, file: Path) -> None:
    complaints: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(file.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= tab.evaluate("document.documentElement.clientWidth")
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.keyboard.press("Tab")  # the link to the result
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "theme" and tab.text_content("#theme") == "Dark theme"
    tab.keyboard.press("Enter")
    assert (
        tab.evaluate("getComputedStyle(document.body).backgroundColor") != light and tab.text_content("#theme") == "Light theme"
    )
    for fold in tab.query_selector_all("summary"):
        fold.focus()
        tab.keyboard.press("Enter")
    assert tab.evaluate("[...document.querySelectorAll('details')].every(d => d.open)")
    assert tab.evaluate("document.documentElement.scrollWidth") <= tab.evaluate("document.documentElement.clientWidth")
    assert not complaints and all(url.startswith(("file:", "data:")) for url in asked)
