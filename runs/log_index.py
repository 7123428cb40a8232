"""Write the index of the log and the page of negative results from the files in docs/lab/log/.

    python runs/log_index.py            rewrites docs/lab/log.md behind its marker, and docs/lab/negative_results.md
    python runs/log_index.py --check    exit status 1 when one of the two pages would change

A new entry goes to the top of the file of its day: `## 2026-11-27: what was decided (commit)`, the commit where it is known.
A paragraph that says "Negative" goes to the page of negative results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from _markdown import renew, table

LAB = Path(__file__).resolve().parents[1] / "docs" / "lab"
INDEX, NEGATIVE = LAB / "log.md", LAB / "negative_results.md"
MARKER = "<!-- Everything below is made by runs/log_index.py from docs/lab/log/*.md. -->"
HEADING = re.compile(r"^## (?P<day>\d{4}-\d\d-\d\d)[^:]*: (?P<title>.+?)(?: \((?P<commit>[0-9a-f]{7,})\))?$", re.M)
SENTENCE_END = re.compile(r"(?<=[.?!])(?:\*\*)? (?=[A-Z`*(])")
FIGURE = re.compile(r"\d(?:\.\d+)?(?: %| ms| s\b|x\b| times| \[| minutes| seconds| to \d| of \d|,\d{3})|\d\.\d")
MAX_CHARACTERS = 160


@dataclass(frozen=True)
class Entry:
    """An entry of the log."""

    heading: str
    day: str
    title: str
    commit: str
    text: str

    @property
    def link(self) -> str:
        """The entry's title, linked to its heading in the file of its day."""
        anchor = "-".join(re.sub(r"[^\w\s-]", "", self.heading.lower()).split())
        return f"[{self.title}](log/{self.day}.md#{anchor})"

    @property
    def number(self) -> str:
        """The first sentence with a bold part and a figure, or with a figure, or at all; shortened."""
        words = re.sub(r"^```.*?^```$", "", self.text, flags=re.DOTALL | re.MULTILINE)
        parts = re.split(r"\n\s*\n|\n(?=[-|] ?)", words)
        whole = (" ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", part).split()).lstrip("- ") for part in parts)
        said = [s for part in whole if part and part[0] not in "|#" for s in SENTENCE_END.split(part)]
        first = min(said, key=lambda s: 2 * (not FIGURE.search(s)) + ("**" not in s), default="")
        return shorten(first.replace("**", "").replace("|", "\\|"), MAX_CHARACTERS, placeholder=" ...")


def entries() -> Iterator[Entry]:
    """Yield the entries, the newest first."""
    for file in sorted((LAB / "log").glob("*.md"), reverse=True):
        text = file.read_text(encoding="utf-8")
        found = list(HEADING.finditer(text))
        ends = [match.start() for match in found[1:]] + [len(text)]
        for match, end in zip(found, ends, strict=True):
            heading, commit = match[0].removeprefix("## "), match["commit"] or ""
            yield Entry(heading, match["day"], match["title"], commit, text[match.end() : end])


def index(old: str) -> str:
    """Return docs/lab/log.md: its hand-written head, and one line for each entry."""
    head, marker, _ = old.partition(MARKER)
    if not marker:
        sys.exit(f"{INDEX} lacks the line {MARKER}")
    lines = [[entry.day, entry.link, entry.number, entry.commit] for entry in entries()]
    return f"{head}{MARKER}\n\n{table(['date', 'decision', 'figure', 'commit'], lines)}\n"


def negative_results() -> str:
    """Return docs/lab/negative_results.md."""
    about = "Ideas that were tried and not kept, from the [log](log.md); made by `runs/log_index.py`."
    parts = ["# Negative results", about]
    for entry in entries():
        told = [re.sub(r"(\]\()\.\./", r"\1", paragraph) for paragraph in negatives(entry.text)]
        if told:
            parts += [f"## {entry.day}: {entry.title}", "\n".join(told)]
    return "\n\n".join(parts) + "\n"


def negatives(text: str) -> Iterator[str]:
    """Yield the sentences that follow the word "Negative" in each item of a list, as items."""
    for item in re.split(r"\n(?=- )", text):
        said = re.search(r"\bNegative\b[:,]?.*", " ".join(item.split()))
        if said and item.startswith("- "):
            words = said[0] if said[0].count("**") % 2 == 0 else f"**{said[0]}"
            yield f"- {words}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages."""
    return renew(__doc__, lambda: {INDEX: index(INDEX.read_text("utf-8")), NEGATIVE: negative_results()}, arguments)


if __name__ == "__main__":
    sys.exit(main())
