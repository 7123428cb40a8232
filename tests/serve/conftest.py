"""One model, one server and one browser for the tests of a session."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import eyas
from eyas import tiny
from serving import Running, running, small_llm


@pytest.fixture(scope="session")
def llm() -> eyas.LLM:
    """The embedded model."""
    if not (tiny.FOLDER / tiny.PACKED).exists():
        pytest.skip("the embedded model's weights are not in this checkout")
    return small_llm()


@pytest.fixture(scope="session")
def server(llm: eyas.LLM) -> Iterator[Running]:
    """A server of it."""
    with running(llm, rows=4) as one:
        yield one


@pytest.fixture(autouse=True)
def _closed_clients(request: pytest.FixtureRequest) -> Iterator[None]:
    """No client stays connected after its test."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").close_clients()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A running Chromium, the system's own. Skips where there is none: nothing is downloaded.

    While playwright's driver runs, this thread has a running event loop, and `asyncio.run` fails in
    it: so not for the session.
    """
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the page is tested by playwright, which is not installed"
    )
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("the page is tested in a real Chromium, and there is none on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address: `open_page(url, width=..., color_scheme=...)`. No test may leave an error
    in the console (`open_page.errors`)."""
    contexts, errors = [], list[str]()

    def note(message: Any) -> None:
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            errors.append(message.text)

    def go(url: str, width: int = 1280, height: int = 900, **settings: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **settings)
        contexts.append(context)
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    go.errors = errors  # type: ignore[attr-defined]
    yield go
    for context in contexts:
        context.close()
    assert errors == []
