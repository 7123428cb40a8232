"""Write the table on the README's first screen from a record of `eyas bench`.

python runs/front_page.py            rewrites README.md between its two marks
python runs/front_page.py --check    exit status 1 when the README is not what this program makes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from _markdown import table
from _records import record

from eyas.files import write_text

PAGE = Path(__file__).resolve().parents[1] / "README.md"
RECORD, PROCESSOR = "smollm2_float32_avx512", "with AVX-512"  # the bench that the table shows, and where it ran
ROWS = {
    "transformers": "transformers `generate`",
    "vanilla": "eyas without drafts",
    "eagle3": "eyas with a draft head (EAGLE-3)",
}
TASKS = {
    "eagle/alpaca": "instructions",
    "eagle/gsm8k": "arithmetic",
    "eagle/humaneval": "code",
    "eagle/mt_bench": "chats",
    "eagle/qa": "questions",
    "eagle/sum": "summaries",
}
BEGIN, END = "<!-- made by runs/front_page.py -->", "<!-- end -->"


def front_table(name: str) -> str:
    """Return the table of a record, and the lines below it."""
    rows = {r["method"]: r for r in record(name)["rows"] if r["task"] == "all" and r["temperature"] == 0}
    generate = rows["transformers"]["tokens_per_second"]
    lines = [
        [label, f"{rows[method]['tokens_per_second']:.0f}", f"{rows[method]['tokens_per_second'] / generate:.1f}x"]
        for method, label in ROWS.items()
    ]
    if not all(rows[method]["equal"] for method in ROWS):
        sys.exit(f"{name}: the texts are not equal, so the README cannot show it")
    return "\n".join(
        [
            f"SmolLM2-135M from a 4-bit file, unpacked to {record(name)['machine']['dtype']}, the same weights in every row, greedy, one",
            f"request at a time, {machine_of(name)} ([record](docs/results/{name}.json)):",
            "",
            table(["", "tokens/s", "over `generate`"], lines, numbers=2),
            "",
            "The texts of all three rows are equal.",
            by_task(name),
        ]
    )


def machine_of(name: str) -> str:
    """Return the machine of a record in words."""
    machine = record(name)["machine"]
    return f"{machine['threads']} cores of an {machine['cpu']} {PROCESSOR}"


def by_task(name: str) -> str:
    """Return the gain by drafts over all texts, and the kinds of text with the smallest and the largest gain."""
    rows = [row for row in record(name)["rows"] if row["method"] == "eagle3" and row["temperature"] == 0]
    (every,) = [row["speedup"] for row in rows if row["task"] == "all"]
    tasks = sorted((row["speedup"], TASKS[row["task"]]) for row in rows if row["task"] in TASKS)
    least, most = (f"{speedup:.1f}x on {task}" for speedup, task in (tasks[0], tasks[-1]))
    return f"The head gains {every:.1f}x over six kinds of text, from {least} to {most}."


def page(old: str) -> str:
    """Return the README with the table of the record between its marks."""
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE} lacks the line {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{front_table(RECORD)}\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 when the README would change"
    )
    args = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if args.check:
        return int(old != new)
    write_text(PAGE, new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
