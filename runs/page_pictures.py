"""Take the pictures of the server's page in docs/pictures, with a real Chromium.

eyas serve --tree.nodes 24 --tree.depth 6 --tree.branch 4
python runs/page_pictures.py http://127.0.0.1:8000 --only light dark narrow
eyas serve
python runs/page_pictures.py http://127.0.0.1:8000 --only live
"""

from __future__ import annotations

import json
import shutil
import threading
import urllib.request
from pathlib import Path
from typing import Any

from _common import parser

PROMPTS = (
    "I want to book a table for two in San Jose tonight.",
    "At seven o'clock, please. Somewhere with Italian food.",
)
STORY = "Tell me a story about a young hawk."
LOAD_SECONDS = 25  # before the picture of the live view
CLIENTS = 3


def ask(page: Any, text: str) -> None:
    """Send a message and wait for its answer."""
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    page.locator("#send:visible").wait_for()


def best_cycle(page: Any) -> None:
    """Select the cycle of the last answer that emitted most tokens."""
    page.evaluate("""() => {
        const spans = [...[...document.querySelectorAll(".answer")].at(-1).querySelectorAll(".token")];
        const size = (span) => spans.filter((other) => other.dataset.cycle === span.dataset.cycle).length;
        const best = spans.reduce((a, b) => (size(b) > size(a) ? b : a));
        best.click();
        best.blur();
    }""")


def keep_busy(url: str, stop: threading.Event) -> None:
    """A client that asks again and again."""
    body = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 200, "temperature": 0.8, "ignore_eos": True}
    place, head = f"{url}/v1/chat/completions", {"content-type": "application/json"}
    request = urllib.request.Request(place, json.dumps(body).encode(), head)
    while not stop.is_set():
        with urllib.request.urlopen(request) as response:
            response.read()


class Camera:
    """Opens the page and takes its pictures."""

    def __init__(self, browser: Any, url: str, folder: Path) -> None:
        self.browser, self.url, self.folder = browser, url, folder

    def open(self, width: int, height: int, color_scheme: str = "light") -> Any:
        """The page, once it knows the model."""
        page = self.browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=color_scheme, reduced_motion="reduce"
        )
        page.goto(self.url)
        page.locator("#model").filter(has_text="e").wait_for(state="attached")
        return page

    def take(self, page: Any, name: str) -> None:
        """Write page_NAME.png."""
        page.screenshot(path=self.folder / f"page_{name}.png")


def light(camera: Camera) -> None:
    page = camera.open(1280, 800)
    for prompt in PROMPTS:
        ask(page, prompt)
    best_cycle(page)
    camera.take(page, "light")


def dark(camera: Camera) -> None:
    page = camera.open(1280, 800, "dark")
    ask(page, STORY)
    best_cycle(page)
    camera.take(page, "dark")


def narrow(camera: Camera) -> None:
    page = camera.open(390, 844)
    ask(page, PROMPTS[0])
    best_cycle(page)
    camera.take(page, "narrow")


def live(camera: Camera) -> None:
    stop = threading.Event()
    clients = [threading.Thread(target=keep_busy, args=(camera.url, stop), daemon=True) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    page = camera.open(1280, 640)
    page.get_by_role("link", name="Live").click()
    page.wait_for_timeout(LOAD_SECONDS * 1000)
    camera.take(page, "live")
    stop.set()
    for client in clients:
        client.join()


PICTURES = {"light": light, "dark": dark, "narrow": narrow, "live": live}


def main() -> None:
    made = parser(__doc__, output=(Path("docs/pictures"), "a folder"))
    made.add_argument("url")
    made.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    args = made.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in args.only:
            PICTURES[name](Camera(browser, args.url, args.output))
        browser.close()


if __name__ == "__main__":
    main()
