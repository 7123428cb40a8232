"""The files of the page, read without a browser."""

import json
import re
from pathlib import Path

import pytest

from eyas.serve import page

FILES = sorted(file for file in page.FOLDER.iterdir() if file.suffix in page.MEDIA_TYPES)
LINES = 300
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\b|new Function|DOMParser"
)
INLINE = re.compile(r"<script>|<style>|\son\w+=|\sstyle=|javascript:", re.IGNORECASE)
ADDRESS = re.compile(r"(?:https?:)?//[\w.-]+\.\w+[\w./]*")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_rules_of_the_page(file: Path) -> None:
    """Nothing is read from the network, nothing becomes markup, and no module grows beyond what can
    be read at once."""
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES
    assert MARKUP.search(text) is None
    assert {found for found in ADDRESS.findall(text) if file.suffix != ".js" or '"' + found in text} <= {
        "http://www.w3.org/2000/svg"
    }
    if file.name == "index.html":
        assert INLINE.search(text) is None


def test_every_file_is_used() -> None:
    """A file that nothing names is dead."""
    texts = {file.name: file.read_text(encoding="utf-8") for file in FILES}
    sources = [*texts.values(), Path(page.__file__).read_text(encoding="utf-8")]
    entries = {"index.html", "file.js"}
    assert {
        name for name in texts if not any(re.search(rf'[/"]{re.escape(name)}"', text) for text in sources)
    } == entries


def test_one_file_holds_its_data() -> None:
    """A text that ends the script element would end the data, too; what follows would be markup."""
    data = {"prompt": "</script><b>&amp;", "cycles": [], "text": "\N{LINE SEPARATOR}@style@"}
    made = page.one_file(data)
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', made, re.DOTALL)
    assert len(found) == 1
    assert json.loads(found[0]) == data
    assert made.count("</script>") == 2
    assert not re.search(r"^(?:import|export) ", made, re.MULTILINE)
