"""Fill the tables of docs/lab/results.md and of README.md from the records in docs/results/.

    python runs/results.py            rewrites the tables between their marks
    python runs/results.py --check    exit status 1 when a page is not what this program makes

A page marks a table by `<!-- KIND NAME: TITLE -->` and `<!-- end -->`: a function of TABLES, and the record that
it shows. Tables without marks show records whose programs are gone; they are not made again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from _markdown import cell, columns, renew, table
from _records import DOCS, Record, record

from eyas.errors import InputError, near

PAGES = (DOCS / "lab" / "results.md", DOCS.parent / "README.md")
MARK = re.compile(r"<!-- (?P<kind>\w+)(?P<names>[^:>]*?)(?:: (?P<title>[^>]*?))? -->\n.*?<!-- end -->", re.S)
Blocks = Iterator[str]


def source(name: str) -> str:
    """The command that wrote a record, and its machine."""
    content = record(name)
    command = re.sub(r"(DATA/\w+|MODELS)/| --profile| --probe \d+", "", content["command"])
    machine = content.get("machine") or {}
    threads = content.get("threads") or machine.get("threads")
    where = f"{machine.get('cpu', 'not recorded')}, {threads} thread{'s' * (threads != 1)}"
    return f"- `{command}` ({where}; [record](../results/{name}.json))"


# --- records of `eyas bench` ---------------------------------------------------------------------------

BENCH_COLUMNS: dict[str, Callable[[Record], str]] = {
    "tokens/s": lambda row: cell(row["tokens_per_second"], 1),
    "over vanilla": lambda row: cell(speedup(row)),
    "over `generate`": lambda row: cell(row["speedup_vs_transformers_interval"]),
    "tau": lambda row: cell(row["tau_interval"]),
    "c": lambda row: cell(row["c"]),
}
EQUAL = {"equal texts": lambda row: {True: "yes", None: ""}.get(row["equal"], f"{len(row['differ'])} not")}
SMOLLM2 = {
    "smollm2_float32": "float32",
    "smollm2_int8": "int8 weights, int16 activations",
    "smollm2_int4": "int4 weights, int16 activations",
}
# processor -> aim over plain decoding, end of the records' names
ASKED = {"AVX2": ("1.5", ""), "AVX-512": ("1.8", "_avx512")}


def speedup(row: Record) -> list[float | None]:
    """[value, low, high] of a bench's row."""
    return [row[name] for name in ("speedup", "speedup_low", "speedup_high")]


def label(method: str) -> str:
    """A contestant of a bench: its method, and its tree as nodes/depth/branch."""
    name, *parts = method.split(":")
    options = dict(part.split("=") for part in parts)
    sizes = [options[key] for key in ("tree.nodes", "tree.depth", "tree.branch") if key in options]
    return f"{name} {'/'.join(sizes) or options.get('tree.choices', '')}".strip()


def bench(name: str, title: str = "") -> Blocks:
    """All tasks of a bench, and each of them, by temperature."""
    rows = record(name)["rows"]
    prompts = next(row["prompts"] for row in rows if row["task"] == "all")
    for temperature in (0.0, 1.0):
        chosen = [row for row in rows if row["temperature"] == temperature]
        pooled = {label(row["method"]): row for row in chosen if row["task"] == "all"}
        yield columns(pooled, BENCH_COLUMNS | EQUAL, f"T = {temperature:g}, {prompts} prompts")
        tasks = list(dict.fromkeys(row["task"] for row in chosen if row["task"] != "all"))
        by_task = {(row["method"], row["task"]): row for row in chosen}
        lines = [
            [label(method), *(f"{cell(row['speedup'])} ({cell(row['tau'])})" for row in found)]
            for method in dict.fromkeys(row["method"] for row in chosen)
            if len(found := [by_task[method, task] for task in tasks if (method, task) in by_task]) == len(tasks)
        ]
        yield table([f"T = {temperature:g}: over plain (tau)", *tasks], lines)
    yield source(name)


def bundled(name: str, title: str = "") -> Blocks:
    """All contestants of a bench over all tasks."""
    yield columns({label(row["method"]): row for row in record(name)["rows"] if row["task"] == "all"}, BENCH_COLUMNS)
    yield source(name)


def asked(title: str = "") -> Blocks:
    """What was asked for with SmolLM2 and its head, and what was reached."""

    def reached(end: str, temperature: float, figure: Callable[[Record], object]) -> list[str]:
        found = []
        for name in SMOLLM2:
            rows = record(name + end)["rows"]
            row = next(r for r in rows if (r["method"], r["task"], r["temperature"]) == ("eagle3", "all", temperature))
            found.append(cell(figure(row)))
        return found

    lines = list[list[str]]()
    for processor, (aim, end) in ASKED.items():
        over_generate = reached(end, 0.0, lambda row: row["speedup_vs_transformers_interval"])
        lines += [
            [f"{processor}: EAGLE-3 over plain decoding, T = 0", aim, *reached(end, 0.0, speedup)],
            [f"{processor}: the same at T = 1", "0.9 of that", *reached(end, 1.0, speedup)],
            [f"{processor}: over transformers' `generate`, T = 0", "5", *over_generate],
        ]
    yield table(["", "asked for", *SMOLLM2.values()], lines)


# --- a learning curve, and servers ---------------------------------------------------------------------


def curve(name: str, title: str = "") -> Blocks:
    """Acceptance by the tokens that a head has read."""
    points = {f"{point['tokens'] / 1e6:.1f}M": point for point in record(name)["curve"]}
    makers: dict[str, Callable[[Record], str]] = {
        "n-alpha": lambda row: " ".join(f"{x:.2f}" for x in row["n-alpha"]),
        "tau, chain of 4": lambda row: cell(row["chain 4 tau"]),
    }
    yield columns(points, makers, "tokens read")
    yield source(name)


AUTO_OVER_OFF = "auto over off"
CLOCKS = {"tokens_per_second": "by the clock", "tokens_per_cpu_second": "by the server's processor time"}


def load_cell(row: Record | None) -> str:
    """Tokens per second; milliseconds to the first token and between chunks, median; 99th percentile."""
    if row is None:
        return ""
    waits = (row["first_token_ms"], row["between_chunks_ms"])
    first, between = (f"{ms['p50']:,.0f}; {ms['p99']:,.0f}" if ms else "none" for ms in waits)
    return f"**{row['tokens_per_second']:,.0f}** ({first} / {between})"


def load(name: str, title: str = "") -> Blocks:
    """Servers by the number of clients."""
    loads = record(name)["closed"]
    servers = dict.fromkeys(server for by in loads.values() for server in by if server != AUTO_OVER_OFF)
    lines = [[server, *(load_cell(by.get(server)) for by in loads.values())] for server in servers]
    for figure, clock in CLOCKS.items():
        shares = [cell(by.get(AUTO_OVER_OFF, {}).get(figure)) for by in loads.values()]
        lines += [[f"{AUTO_OVER_OFF}, {clock}", *shares]] if any(shares) else []
    yield table([title, *loads], lines)
    yield source(name)


# --- the README's first screen --------------------------------------------------------------------------

FRONT = {
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


def front(name: str, title: str = "") -> Blocks:
    """Speeds of a bench with AVX-512, and the kinds of text on which drafts gain least and most."""
    content = record(name)
    machine, greedy = content["machine"], [row for row in content["rows"] if row["temperature"] == 0]
    rows = {row["method"]: row for row in greedy if row["task"] == "all"}
    speeds = {method: rows[method]["tokens_per_second"] for method in FRONT}
    if not all(rows[method]["equal"] for method in FRONT):
        raise InputError(f"{name}: the texts are not equal, so the README cannot show it")
    yield (
        f"SmolLM2-135M from a 4-bit file, unpacked to {machine['dtype']}, the same weights in every row, greedy, one\n"
        f"request at a time, {machine['threads']} cores of an {machine['cpu']} with AVX-512 ([record](docs/results/{name}.json)):"
    )
    over = {method: f"{speed / speeds['transformers']:.1f}x" for method, speed in speeds.items()}
    lines = [[label, f"{speeds[method]:.0f}", over[method]] for method, label in FRONT.items()]
    yield table(["", "tokens/s", "over `generate`"], lines, numbers=2)
    drafted = [row for row in greedy if row["method"] == "eagle3" and row["task"] in TASKS]
    gains = sorted((row["speedup"], TASKS[row["task"]]) for row in drafted)
    least, most = (f"{speedup:.1f}x on {task}" for speedup, task in (gains[0], gains[-1]))
    whole = f"The head gains {rows['eagle3']['speedup']:.1f}x over six kinds of text, from {least} to {most}."
    yield f"The texts of all three rows are equal.\n{whole}"


TABLES: Mapping[str, Callable[..., Iterable[str]]] = {
    made.__name__: made for made in (asked, bench, bundled, curve, front, load)
}


def filled(found: re.Match[str]) -> str:
    """A table made anew, with its marks."""
    kind, title = found["kind"], found["title"] or ""
    if kind not in TABLES:
        raise InputError(f"the page has the mark {kind!r}; {near(kind, list(TABLES))}")
    mark = found[0].partition("\n")[0]
    return "\n\n".join([mark, *TABLES[kind](*found["names"].split(), title=title), "<!-- end -->"])


def main(arguments: Sequence[str] | None = None) -> int:
    return renew(
        __doc__, lambda: {page: MARK.sub(filled, page.read_text(encoding="utf-8")) for page in PAGES}, arguments
    )


if __name__ == "__main__":
    sys.exit(main())
