"""The page to chat with a model, in headless Chromium; skipped without it and ``selenium``."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..training.command import LONGEST, RunFile
from .test_server import KEY, Server

selenium = pytest.importorskip("selenium.webdriver")
pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed")


@pytest.fixture
def browser() -> Iterator[Any]:
    options = selenium.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--window-size=900,700"):
        options.add_argument(argument)
    driver = selenium.Chrome(options)
    yield driver
    driver.quit()


def until(condition: Any) -> Any:
    end = time.monotonic() + LONGEST
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


def ask(browser: Any, text: str, turns: int) -> list[str]:
    """Write a message, and wait for the answer; the texts on the page."""
    browser.find_element("id", "text").send_keys(text + "\n")
    until(lambda: len(browser.find_elements("css selector", ".turn")) == turns)
    until(lambda: browser.find_element("id", "send").text == "Send")
    return [turn.text for turn in browser.find_elements("css selector", ".turn")]


def test_chat_text_errors_and_keys(browser: Any, chatty: RunFile, tmp_path: Path) -> None:
    server = Server(chatty, tmp_path, "--api-key", KEY)
    try:
        browser.get(server.address)
        until(lambda: browser.find_element("id", "model").text == "needs an API key")
        browser.find_element("id", "key").send_keys(KEY + "\t")
        until(lambda: browser.find_element("id", "model").text == "tiny")
        temperature = browser.find_element("id", "temperature")
        temperature.clear()
        temperature.send_keys("0")
        assert ask(browser, "what?", 2) == ["what?", "fox"]
        assert "tokens, " in browser.find_element("id", "state").text
        browser.save_screenshot(str(tmp_path / "chat.png"))
        temperature.clear()
        temperature.send_keys("-1")
        assert "temperature: found -1" in ask(browser, "what?", 5)[-1]
        browser.find_element("id", "clear").click()
        temperature.clear()
        temperature.send_keys("0")
        browser.find_element("css selector", "#mode option[value=text]").click()
        (text,) = ask(browser, "what", 1)
        assert text.startswith("what") and len(text) > 4
        errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert all("401" in entry["message"] or "400" in entry["message"] for entry in errors), errors
        assert server.stop().status == 0
    finally:
        server.process.end()
