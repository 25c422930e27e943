"""The page at `/`: what it is made of, and, where there is a browser, that it works."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM

from .conftest import Running, running

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
PHONE = {"width": 390, "height": 844}


def test_the_page_asks_nobody_else(server: Running, load: Callable[..., LLM]) -> None:
    response = server.client.get("/")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    assert not re.findall(r"""(?:src|href)=["'](?!data:)|https?://|@import|url\(""", response.text)
    assert len(response.text.splitlines()) <= 400
    with running(load(), page=False) as other:
        assert other.client.get("/").status_code == 404


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no Chromium here: install Debian's package `chromium`")
    with driver.sync_playwright() as play:
        one = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield one
        one.close()


@pytest.fixture
def open_page(browser: Any, server: Running) -> Iterator[Callable[..., Any]]:
    """Open the page; nothing may be written to the console as an error, and nobody else may be asked."""
    contexts, complaints, asked = [], [], []

    def make(**options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url)
        until(page, "document.getElementById('about').textContent.includes('drafter')")
        return page

    yield make
    for context in contexts:
        context.close()
    assert not [text for text in complaints if "status of 400" not in text]
    assert all(url.startswith((server.url, "data:")) for url in asked)


def until(page: Any, condition: str, seconds: float = 15) -> None:
    """Wait for a condition. (The browser's own way needs `eval`, which the page's policy forbids.)"""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(20)


def send(page: Any, text: str = "hello", answers: int = 1, **fields: Any) -> str:
    """Ask, wait for the end of the answer, and give its text."""
    for name, value in {"most": 60, "temperature": 1, **fields}.items():
        page.fill(f"#{name}", str(value))
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    until(page, f"document.querySelectorAll('.foot').length === {answers} && document.getElementById('stop').disabled")
    return answer(page)


def answer(page: Any) -> str:
    script = "[...document.querySelectorAll('.turn:last-child .text span:not(.rejected)')].map(s => s.textContent).join('')"
    return page.evaluate(script)


@pytest.mark.slow
def test_a_conversation(open_page: Callable[..., Any]) -> None:
    page = open_page()
    text = send(page, seed=5, temperature=0, most=40)
    origins = page.evaluate("[...new Set([...document.querySelectorAll('.text span')].map(s => s.className))]")
    assert {"draft", "target"} <= set(origins)
    assert page.evaluate("document.querySelectorAll('.text span[title^=rejected]').length") > 0
    assert page.text_content("#used") == "5" and page.text_content("#speed") != "–" and "×" in page.text_content("#gain")
    assert "%" in page.text_content("#positions") and page.text_content("#said") == text
    page.check("#rejects")
    assert page.is_visible(".text .rejected")
    page.uncheck("#colours")
    assert page.evaluate("getComputedStyle(document.querySelector('.text .target')).backgroundColor") == "rgba(0, 0, 0, 0)"
    page.click("#fresh")
    assert page.evaluate("document.querySelectorAll('.turn').length") == 0


@pytest.mark.slow
def test_replay_by_seed_without_speculation(open_page: Callable[..., Any]) -> None:
    page = open_page()
    text = send(page, seed="", temperature=1, most=20)  # a text that was drawn may take twice as many tokens to read
    assert int(page.text_content("#used")) < 2**53
    page.uncheck("#speculate")
    page.click("text=Replay with this seed")
    page.wait_for_selector("text=Same text as before.")
    assert answer(page) == text
    assert page.evaluate("document.querySelectorAll('.turn:last-child .draft').length") == 0
    page.select_option("#depth", "3")
    page.check("#speculate")
    send(page, "he", answers=3, most=5)
    assert page.evaluate("state.messages.length") == 4, page.text_content(".turn:last-child")


@pytest.mark.slow
def test_errors_are_shown_and_focus_comes_back(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.fill("#prompt", "x" * 600)
    page.keyboard.press("Enter")
    page.wait_for_selector(".foot .error")
    assert "context" in page.text_content(".foot .error")
    until(page, "document.activeElement.id === 'prompt'")
    assert page.evaluate("state.messages.length") == 0, "what failed is no part of the conversation"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, {"width": 1200, "height": 800}])
def test_themes_and_widths(open_page: Callable[..., Any], scheme: str, size: dict[str, int], tmp_path: Path) -> None:
    page = open_page(color_scheme=scheme, viewport=size)
    send(page, seed=5)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], "nothing sticks out"
    page.screenshot(path=str(tmp_path / f"{scheme}-{size['width']}.png"), full_page=True)
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") != scheme
    unnamed = """[...document.querySelectorAll('input, select, textarea, button')]
        .filter(e => !(e.labels && e.labels.length) && !e.textContent.trim()).map(e => e.id)"""
    assert page.evaluate(unnamed) == [], "everything has a name for screen readers"
