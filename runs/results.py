"""Fill the tables of docs/lab/results.md from the records in docs/results/, and make the pictures.

    python runs/results.py            rewrites the tables between their marks, and the pictures in docs/results/
    python runs/results.py --check    exit status 1 when the page is not what this program makes

The page marks a table by `<!-- KIND NAME ...: TITLE -->` and `<!-- end -->`: a function of TABLES and the records that
it shows. Tables without marks show records whose programs are gone; they are not made again. The program measures
nothing and prints the same bytes for the same records.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from _markdown import cell, columns, table
from _records import DOCS, RECORDS, Record, auto_over_best, pooled_rows, record

from eyas.errors import InputError, near
from eyas.files import write_text

PAGE = DOCS / "lab" / "results.md"
MARK = re.compile(r"<!-- (?P<kind>\w+)(?P<names>[^:>]*?)(?:: (?P<title>[^>]*?))? -->\n.*?<!-- end -->", re.S)
Blocks = Iterator[str]


def source(*names: str, title: str = "") -> Blocks:
    """The commands that wrote these records, and the machines."""
    lines = []
    for name in names:
        content = record(name)
        command = re.sub(r"(DATA/\w+|MODELS)/", "", content["command"]).replace(" --profile", "")
        machine = content.get("machine") or {}
        threads = content.get("threads") or machine.get("threads")
        where = f"{machine.get('cpu', 'not recorded')}, {threads} thread{'s' * (threads != 1)}"
        lines.append(f"- `{command}` ({where}; [record](../results/{name}.json))")
    yield "\n".join(lines)


# --- records of `eyas bench` and of runs/speed.py ------------------------------------------------------

BENCH_COLUMNS: dict[str, Callable[[Record], str]] = {
    "tokens/s": lambda row: cell(row["tokens_per_second"], 1),
    "over vanilla": lambda row: cell(speedup(row)),
    "over `generate`": lambda row: cell(row["speedup_vs_transformers_interval"]),
    "tau": lambda row: cell(row["tau_interval"]),
    "c": lambda row: cell(row["c"]),
}
EQUAL = {"equal texts": lambda row: {True: "yes", None: ""}.get(row["equal"], f"{len(row['differ'])} not")}
SPEED_COLUMNS: dict[str, Callable[[Record], str]] = {
    "tokens/s": lambda row: cell(row["tokens_per_second"], 1),
    "over plain": lambda row: cell(row["over_plain"]),
    "over `generate`": lambda row: cell(row.get("over_transformers")),
    "tau": lambda row: cell(row.get("tau")),
    "c": lambda row: cell(row.get("c")),
    "equal texts": lambda row: row["equal"],
}
SPEEDS = {
    "speed_epyc": "AMD EPYC (Zen 4, no matrix units): embedded model, T = 0",
    "speed_epyc_t1": "AMD EPYC: embedded model, T = 1",
    "speed": "Intel Xeon with AMX: embedded model, earlier EAGLE-3 head, T = 0",
    "speed_t1": "Intel Xeon with AMX: embedded model, earlier EAGLE-3 head, T = 1",
    "speed_nestling": "Intel Xeon with AMX: nestling (28M parameters, published in bfloat16), T = 0",
    "speed_epyc_int8": "AMD EPYC, embedded model, int8 activations",
    "speed_int8": "Intel, embedded model, earlier EAGLE-3 head, int8 activations",
    "speed_nestling_int8": "Intel, nestling, int8 weights and activations",
}
AUTO_METHODS = {"mtp": "MTP", "eagle3": "EAGLE-3", "eagle2": "EAGLE-2"}
SMOLLM2 = {
    "smollm2_float32": "float32",
    "smollm2_int8": "int8 weights, int16 activations",
    "smollm2_int4": "int4 weights, int16 activations",
}
ASKED = {
    "AVX2": ("1.5", ""),
    "AVX-512": ("1.8", "_avx512"),
}  # processor -> aim over plain decoding, end of the records' names


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
    yield from source(name)


def bundled(name: str, title: str = "") -> Blocks:
    """All contestants of a bench over all tasks."""
    yield columns({label(method): row for method, row in pooled_rows(name).items()}, BENCH_COLUMNS)
    yield from source(name)


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


def speed(name: str, title: str = "") -> Blocks:
    """The contestants of a speed record."""
    yield from source(name)
    yield speed_table(record(name))


def speed_table(content: Record) -> str:
    """The contestants of a speed record, whether it is written or not."""
    return columns(content["table"], SPEED_COLUMNS)


def cost(name: str, title: str = "") -> Blocks:
    """Milliseconds of passes, by nodes and by context."""
    return cost_tables(record(name))


def cost_tables(content: Record) -> Blocks:
    """The same of a record that may not be written."""
    for by in ("nodes", "context"):
        end = f", by {by}"
        curves = {key.removesuffix(end): rows for key, rows in content["cost"].items() if key.endswith(end)}
        heads = [f"ms of a pass{end}", *(str(row[by]) for row in next(iter(curves.values())))]
        yield table(heads, ([key, *(cell(row["ms"], 1) for row in rows)] for key, rows in curves.items()))


def auto(title: str = "") -> Blocks:
    """Automatic trees over the best fixed tree."""
    lines = ([told, *(cell(auto_over_best(name, m)) for m in AUTO_METHODS)] for name, told in SPEEDS.items())
    yield table(["", *AUTO_METHODS.values()], lines)


# --- heads ---------------------------------------------------------------------------------------------

DRAFTERS = {
    "eagle3": "EAGLE-3, one layer",
    "two": "EAGLE-3, two layers",
    "mtp": "MTP",
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "dspark": "DSpark",
}
DECODED = {"before": "of 2026-11-27, 1.5M tokens", "gpu": "shipped, 31.6M tokens"}
DECODED_TREES = {"5/4/1": "tau, chain of 4", "60/8/10": "tau, 60/8/10"}


def by_tree(content: Record, speeds: bool = False) -> Iterator[tuple[str, str, Record]]:
    """(temperature, tree, row) of a comparison of heads; with `speeds` the rows of their speed."""
    for temperature, entry in content.items():
        if temperature.startswith("T = "):
            rows = entry["speed"] if speeds else entry
            yield from ((temperature, tree, row) for tree, row in rows.items() if "/" in tree)


def heads(name: str, figure: str, title: str = "") -> Blocks:
    """A line for each temperature and tree, with the ratio of the last head to every other one.

    Args:
        figure: "tau" or "tokens_per_second".
    """
    speeds = figure != "tau"
    lines, names = [], list[str]()
    for temperature, tree, row in by_tree(record(name), speeds):
        *others, last = row[figure]
        pairs = [f"{last} / {other}" for other in others]
        figures = [cell(value, 1 if speeds else 2) for value in row[figure].values()]
        lines.append([temperature, tree, *figures, *(cell(row["ratio"][pair]) for pair in pairs)])
        names = ["", "tree", *row[figure], *pairs]
    yield table(names, lines)


def drafters(name: str, title: str = "") -> Blocks:
    """A line for each temperature, tree and head, with the times of its draft and its cycle."""
    lines = []
    rows = zip(by_tree(record(name)), by_tree(record(name), speeds=True), strict=True)
    for (temperature, tree, row), (_, _, times) in rows:
        for head, told in DRAFTERS.items():
            ms = [cell(times[figure][head], 1) for figure in ("median_draft_ms", "median_cycle_ms")]
            ends = [cell(times["tokens_per_second"][head], 0), cell(times["over_plain"][head])]
            lines.append([temperature, tree, told, cell(row["tau"][head]), *ms, *ends])
    yield table(["", "tree", "head", "tau", "ms of a draft", "ms of a cycle", "tokens/s", "over plain"], lines)
    yield from source(name)


def curve(name: str, title: str = "") -> Blocks:
    """Acceptance by the tokens that a head has read."""
    points = {f"{point['tokens'] / 1e6:.1f}M": point for point in record(name)["curve"]}
    makers: dict[str, Callable[[Record], str]] = {
        "n-alpha": lambda row: " ".join(f"{x:.2f}" for x in row["n-alpha"]),
        "tau, chain of 4": lambda row: cell(row["chain 4 tau"]),
    }
    yield columns(points, makers, "tokens read")
    yield from source(name)


def decoded(name: str, title: str = "") -> Blocks:
    """tau of the heads of a learning curve, decoded."""
    found = record(name)["T = 0"]
    lines = ([told, *(cell(found[tree]["tau"][head]) for tree in DECODED_TREES)] for head, told in DECODED.items())
    yield table(["decoded, loops left out", *DECODED_TREES.values()], lines)
    yield from source(name)


# --- servers -------------------------------------------------------------------------------------------

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
    yield from source(name)


TABLES: Mapping[str, Callable[..., Iterable[str]]] = {
    made.__name__: made
    for made in (asked, auto, bench, bundled, cost, curve, decoded, drafters, heads, load, source, speed)
}


def filled(old: str) -> str:
    """A page with its tables made anew."""

    def make(found: re.Match[str]) -> str:
        kind, title = found["kind"], found["title"] or ""
        if kind not in TABLES:
            raise InputError(f"the page has the mark {kind!r}; {near(kind, list(TABLES))}")
        mark = found[0].partition("\n")[0]
        return "\n\n".join([mark, *TABLES[kind](*found["names"].split(), title=title), "<!-- end -->"])

    return MARK.sub(make, old)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when the page would change")
    args = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old)
    if args.check:
        return int(old != new)
    write_text(PAGE, new)
    from _results_pictures import PICTURES, picture

    for name in PICTURES:
        write_text(RECORDS / f"{name}.svg", picture(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
