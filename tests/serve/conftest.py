"""One model, one server and one browser for the tests of a session.

Where EYAS_SERVER_URL names a server (`make scale`: a fleet of replicas), the tests of the server that all share are
run against that one, and the others, which make servers of their own, are left out."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import eyas
from eyas import tiny
from serving import URL_VARIABLE, Remote, Running, running, small_llm, tooled_llm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests that do not use the shared server out, where that is another one."""
    if os.environ.get(URL_VARIABLE):
        items[:] = [item for item in items if _shares_server(item)]


def _shares_server(item: pytest.Item) -> bool:
    """Return whether a test uses this file's `server`, and changes nothing in its process."""
    if "monkeypatch" in getattr(item, "fixturenames", ()):
        return False
    fixtures = item._fixtureinfo.name2fixturedefs.get("server", ())  # type: ignore[attr-defined]
    return bool(fixtures) and fixtures[-1].func.__module__ == __name__


@pytest.fixture(scope="session")
def llm() -> eyas.LLM:
    """The embedded model."""
    if not (tiny.FOLDER / tiny.PACKED).exists():
        pytest.skip("the embedded model's weights are not in this checkout")
    return small_llm()


@pytest.fixture(scope="session")
def server(llm: eyas.LLM) -> Iterator[Remote]:
    """A server of it."""
    if url := os.environ.get(URL_VARIABLE):
        yield Remote(url)
        return
    with running(llm, rows=4) as one:
        yield one


@pytest.fixture(scope="session")
def tooled(llm: eyas.LLM) -> Iterator[Running]:
    """A server whose model has tools and reasons; it remembers three responses."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    with running(tooled_llm(), rows=2, remembered=3) as one:
        yield one


@pytest.fixture(autouse=True)
def _closed_clients(request: pytest.FixtureRequest) -> Iterator[None]:
    """No client stays connected after its test."""
    yield
    for name in {"server", "tooled"} & {*request.fixturenames}:
        request.getfixturevalue(name).close_clients()


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
