"""The page in a real browser, on a real server of the embedded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import eyas
from serving import PROMPTS, Running

pytestmark = pytest.mark.slow


def test_chat_of_the_embedded_model(open_page: Callable[..., Any], server: Running, llm: eyas.LLM) -> None:
    """The page shows the text of `LLM.generate`, each character in a token of a cycle, and as many
    cycles: what the server sends and what the page reads fit together."""
    page = open_page(server.url)
    page.get_by_text("Settings").click()
    page.get_by_label("Max tokens").fill("24")
    page.get_by_label("Message").fill(PROMPTS[0])
    page.keyboard.press("Enter")
    page.locator("#send:visible").wait_for()
    own = llm.generate(PROMPTS[0], max_new_tokens=24)
    assert page.locator(".answer").text_content() == own.text
    assert "".join(page.locator(".answer .token").all_text_contents()) == own.text
    figures = f"{len(own.token_ids)} tokens \u00b7 {own.stats.cycles} cycles \u00b7 tau {own.stats.tau:.2f}"
    assert figures in page.locator(".figures").inner_text()
    page.locator(".answer .token.drafted").first.click()
    panel = page.get_by_label("The selected cycle")
    first = page.locator(".answer .selected").all_text_contents()
    assert f"{len(first)}\n" in panel.locator(".facts").inner_text()
    accepted = panel.locator("svg.tree g.accepted .token").all_text_contents()
    assert "".join(accepted) == "".join(first[: len(accepted)]).replace(" ", "\u00b7")
    assert panel.locator("svg.tree g").count() > len(first)


def test_live_view_of_the_embedded_model(open_page: Callable[..., Any], server: Running) -> None:
    """The page shows the figures of a request. It shows those of the last ten seconds, so it is opened before the
    request is sent."""
    page = open_page(f"{server.url}/#live")
    page.get_by_text("of 4 rows, 0 waiting").wait_for()
    server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": PROMPTS[1]}], max_tokens=24
    )
    page.get_by_text("depth 1").wait_for()
    assert "by the method's options" in page.locator("#live-view").inner_text()
