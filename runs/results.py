"""Make the tables and pictures of docs/results.md from the JSON records in docs/results/.

    python runs/results.py            rewrites docs/results.md behind its marker, and the pictures in docs/results/
    python runs/results.py --check    exit status 1 when docs/results.md is not what this program makes

The program measures nothing and prints the same bytes for the same records. What stands above the
marker is written by hand.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from eyas.files import write_text
from eyas.metrics import bootstrap, ratio_of_ratios

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "results.md"
RECORDS = DOCS / "results"
MARKER = "<!-- Everything below is made by runs/results.py from docs/results/*.json. -->"
Record = dict[str, Any]
Interval = Sequence[float | None]

PLAIN, OWN, GENERATE = "plain", "plain, model's own forward", "transformers generate"
METHODS = ("eagle1 chain", "eagle1 static tree", "eagle2 dynamic tree", "eagle3 chain", "eagle3 dynamic tree")


# --- records and cells ---------------------------------------------------------------------------------


@cache
def record(name: str) -> Record:
    """A record of docs/results/ by its name."""
    found: Record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def cell(found: float | Interval | None, digits: int = 2, sign: str = "") -> str:
    """`1.46 [1.35, 1.59]`, `1.46`, or nothing."""
    if found is None:
        return ""
    if isinstance(found, int | float):
        return f"{found:{sign}.{digits}f}"
    value, low, high = found
    if value is None:
        return ""
    return cell(value, digits, sign) + ("" if low is None else f" [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def prose(text: str) -> str:
    """A paragraph, wrapped."""
    return textwrap.fill(" ".join(text.split()), 100, break_long_words=False, break_on_hyphens=False) + "\n\n"


def source(*names: str) -> str:
    """The commands that wrote these records, and the machines."""
    lines = []
    for name in names:
        found = record(name)
        command = re.sub(r"(\.\./)?shared/(data/\w+|models)/", "", found["command"])
        machine = found.get("machine") or {}
        threads = found.get("threads") or machine.get("threads")
        where = f"{machine.get('cpu', 'not recorded')}, {threads} thread{'s' * (threads != 1)}"
        script = re.match(r"python (runs/\w+\.py)", command)
        if script and not (DOCS.parent / script[1]).exists():
            where += "; the script stood in runs/ until commit eee6d4f"
        lines.append(f"- `{command}` ({where}; [record](results/{name}.json))")
    return "\n".join(lines) + "\n"


def best_tree(found: Record) -> tuple[str, Record]:
    """The fastest fixed tree of a speed record."""
    trees = {name: row for name, row in found["table"].items() if name[-1].isdigit()}
    name = max(trees, key=lambda name: trees[name]["over_plain"][0])
    return name, trees[name]


def auto_over_best(found: Record, method: str) -> Interval | None:
    """Speed of `--tree auto` over the best fixed tree, which is chosen on one half of the prompts "
    "and judged on the other."""
    rows = found.get("rows")
    if not rows:
        return None
    fixed = [name for name in rows[0] if name.startswith(f"{method} ") and name != f"{method} auto"]
    samples: dict[str, list[float]] = {}
    for half in (0, 1):
        chosen = max(
            fixed,
            key=lambda n: sum(r[n]["tokens"] for r in rows[half::2]) / sum(r[n]["seconds"] for r in rows[half::2]),
        )
        for row in rows[1 - half :: 2]:
            counts = samples.setdefault(row["prompt"], [0.0] * 4)
            sides = [row[name][key] for name in (f"{method} auto", chosen) for key in ("tokens", "seconds")]
            samples[row["prompt"]] = [a + b for a, b in zip(counts, sides, strict=True)]
    return bootstrap(ratio_of_ratios, *zip(*samples.values(), strict=True), resamples=4000)


# --- what was asked for, and what was reached ----------------------------------------------------------


def pass_ratio(name: str, curve: str, nodes: int) -> float:
    """Time of a pass over so many nodes / over one."""
    by_nodes = {row["nodes"]: row["ms"] for row in record(name)["cost"][curve]}
    return float(by_nodes[nodes] / by_nodes[1])


def rows_by_method(name: str) -> dict[str, Record]:
    """The pooled rows of a bench."""
    return {row["method"]: row for row in record(name)["rows"] if row["task"] == "all"}


def simulated_row(name: str, tree: str) -> Record:
    """A row of the 300M benches by nodes/depth."""
    nodes, depth, _ = tree.split("/")
    return next(
        r for m, r in rows_by_method(name).items() if f"tree.nodes={nodes}:" in m and f"tree.depth={depth}" in m
    )


def aims() -> str:
    """The table of aims, from the records."""
    amx, amd = ("speed", "speed_nestling", "speed_t1"), ("speed_amd", "speed_amd_nestling", "speed_amd_t1")
    large = ("speed_300m", "speed_amd_300m")

    def both(read: Callable[[str], str]) -> list[str]:
        return [
            "; ".join(f"{model} {read(name)}" for model, name in zip(("embedded", "nestling"), names, strict=False))
            for names in (amx, amd)
        ]

    def best(key: str) -> Callable[[str], str]:
        return lambda name: cell(best_tree(record(name))[1][key])

    def row_of(contestant: str, key: str) -> Callable[[str], str]:
        return lambda name: cell(record(name)["table"][contestant][key])

    lines = [
        ["plain decoding over transformers' `generate`", "1.7", *both(row_of(PLAIN, "over_transformers"))],
        ["best EAGLE tree over `generate`, T = 0", "4", *both(best("over_transformers"))],
        ["best EAGLE tree over plain decoding, T = 0", "2.2", *both(best("over_plain"))],
        ["the same at T = 1", "1.9", *(f"embedded {best('over_plain')(names[2])}" for names in (amx, amd))],
        ["c of a tree of 4 nodes", "1.9", *both(row_of("eagle3 4/3/1", "c"))],
        [
            "300M parameters, simulated acceptance: over plain decoding, 4 nodes", "2.2",
            *(cell([simulated_row(n, "4/3/1")[k] for k in ("speedup", "speedup_low", "speedup_high")]) for n in large),
        ],
        ["the same: c of 32 nodes in 6 levels", "1.65", *(cell(simulated_row(n, "32/6/8")["c"]) for n in large)],
        ["a pass over 16 nodes / over 1", "1.2", *(f"embedded {cell(pass_ratio(n, 'kernels, by nodes', 16))}" for n in (amx[0], amd[0]))],
        ["`--tree auto` over the best fixed tree, EAGLE-3", "0.95", both(lambda n: cell(auto_over_best(record(n), "eagle3")))[0], ""],
        ["`--tree auto` with a useless head over plain decoding", "0.95", *both(row_of("random head, auto", "over_plain"))],
    ]  # fmt: skip
    return table(["", "asked for", "reached: Intel Xeon with AMX", "AMD EPYC, no matrix units"], lines)


# --- the appendix --------------------------------------------------------------------------------------


def speed_table(found: Record) -> str:
    """The table of a speed record."""
    heads = ["", "tokens/s", "over plain", "over `generate`", "tau", "c", "equal texts"]
    lines = [
        [name, cell(row["tokens_per_second"], 1), cell(row["over_plain"]), cell(row.get("over_transformers")), cell(row.get("tau")),
         cell(row.get("c")), row["equal"]]
        for name, row in found["table"].items()
    ]  # fmt: skip
    return table(heads, lines)


def cost_tables(found: Record) -> str:
    """Milliseconds of passes."""
    parts = []
    for by in ("nodes", "context"):
        curves = {
            key.removesuffix(f", by {by}"): rows for key, rows in found["cost"].items() if key.endswith(f"by {by}")
        }
        heads = [f"ms of a pass, by {by}", *(str(row[by]) for row in next(iter(curves.values())))]
        parts.append(table(heads, ([key, *(cell(row["ms"], 1) for row in rows)] for key, rows in curves.items())))
    return "\n".join(parts)


def speed() -> str:
    """The speed records."""
    sections = {
        "speed": "Intel Xeon with AMX: embedded model, T = 0",
        "speed_t1": "Intel Xeon with AMX: embedded model, T = 1",
        "speed_nestling": "Intel Xeon with AMX: nestling (28M parameters, published in bfloat16), T = 0",
        "speed_full_vocabulary": "A slower Xeon with AMX: embedded model, EAGLE-3 head that drafts every token, T = 0",
        "speed_full_vocabulary_t1": "The same machine and head: T = 1",
        "speed_vnni": "Xeon at 2.5 GHz with AVX-512 VNNI, no AMX: embedded model, T = 0",
        "speed_vnni_t1": "The same machine: embedded model, T = 1",
        "speed_vnni_nestling": "The same machine: nestling, T = 0",
        "speed_amd": "AMD EPYC with AVX-512 VNNI and BF16: embedded model, T = 0",
        "speed_amd_t1": "The same machine: embedded model, T = 1",
        "speed_amd_nestling": "The same machine: nestling, T = 0",
        "speed_zen4": "AMD EPYC of an older kind (Zen 4): embedded model, EAGLE-3 head that drafts every token, T = 0",
        "speed_zen4_t1": "The same machine and head: T = 1",
    }
    text = prose(
        "The bundled prompts of one turn (21, about 67 tokens), answers of at most 96 tokens, "
        "float32, all contestants interleaved prompt by "
        "prompt. Seconds are those of whole answers, the prompt's pass included. *Plain* is plain "
        "decoding by the compiled kernels. A tree is "
        "given as nodes/depth/branch. c leaves the prompt's pass out. Trust ratios more than tokens "
        "per second: clocks and neighbours change."
    )
    parts = [f"### {title}\n\n{source(name)}\n{speed_table(record(name))}" for name, title in sections.items()]
    for name, title in (("speed", "Intel Xeon with AMX"), ("speed_amd", "AMD EPYC")):
        parts.append(f"### Cost of a pass: {title}\n\n{cost_tables(record(name))}")
    ratios = [
        [name, *(cell(auto_over_best(record(name), method)) for method in ("eagle3", "eagle2"))]
        for name in (
            "speed",
            "speed_t1",
            "speed_full_vocabulary",
            "speed_full_vocabulary_t1",
            "speed_zen4",
            "speed_zen4_t1",
            "speed_nestling",
            "speed_int8",
            "speed_nestling_int8",
            "speed_nestling_int4",
        )
    ]
    text_auto = prose("The best fixed tree is chosen on one half of the prompts and judged on the other.")
    parts.append(
        f"### `--tree auto` over the best fixed tree\n\n{text_auto}{table(['record', 'EAGLE-3', 'EAGLE-2'], ratios)}"
    )
    return text + "\n".join(parts)


def rounded() -> str:
    """Rounded weights and activations: what they cost, and their speed."""
    text = prose(
        "A rounded model is a target of its own: its texts are compared with its own plain decoding. "
        "Perplexity is that of 60 held-in chats; "
        "ratios are paired by chat. *Same token*: the share of positions whose most probable token "
        "is the exact model's."
    )
    lines = []
    for ours, theirs in zip(record("rounding")["rows"], record("rounding_nestling")["rows"], strict=True):
        cells = [
            [f"{row['bytes'] / 1e6:.0f}", cell(row["over_exact"], 4), f"{100 * row['same_token']:.1f} %"]
            for row in (ours, theirs)
        ]
        lines.append([f"{ours['weights']}, {ours['activations']}", *cells[0], *cells[1]])
    heads = ["weights, activations"] + [
        f"{m}: {h}" for m in ("embedded", "nestling") for h in ("MB a pass", "perplexity over exact", "same token")
    ]
    parts = [text + source("rounding", "rounding_nestling") + "\n" + table(heads, lines)]
    sections = {
        "speed_int8": "Intel, embedded model, int8 activations",
        "speed_nestling_int8": "Intel, nestling, int8 weights and activations",
        "speed_nestling_int4": "Intel, nestling, int4 weights, int8 activations",
        "speed_amd_int8": "AMD, embedded model, int8 activations",
        "speed_amd_nestling_bfloat16": "AMD, nestling, bfloat16 activations",
    }
    parts += [f"### {title}\n\n{source(name)}\n{speed_table(record(name))}" for name, title in sections.items()]
    return "\n".join(parts)


def simulated() -> str:
    """A target of 300M parameters with random weights."""
    text = prose(
        "A Llama of 22 layers, width 1,024 and 32,000 tokens with random weights (562 MB a pass). "
        "Draft tokens are accepted at the rates that "
        "EAGLE-1 publishes for Vicuna-7B (0.79, 0.74, 0.72, 0.73, 0.67); everything else is "
        "measured. Three prompts of 256 tokens, 48 new ones."
    )
    names = {
        "speed_300m": "Intel, exact", "speed_300m_int8": "Intel, int8", "speed_300m_int4": "Intel, int4 weights",
        "speed_amd_300m": "AMD, exact", "speed_amd_300m_bfloat16": "AMD, bfloat16 activations", "speed_amd_300m_int8": "AMD, int8",
    }  # fmt: skip
    methods: dict[str, str] = {}
    for method in rows_by_method("speed_300m"):
        options = dict(part.split("=") for part in method.split(":")[1:])
        shape = "/".join(options[f"tree.{key}"] for key in ("nodes", "depth", "branch") if f"tree.{key}" in options)
        methods[method] = f"{method.split(':')[0]} {shape or options.get('tree.choices', '')}".strip()
    found = {name: rows_by_method(name) for name in names}
    lines = []
    for method, label in methods.items():
        rows = [found[name].get(method) for name in names]
        lines.append(
            [
                label,
                *(
                    "" if r is None else f"{r['tokens_per_second']:.0f}; {cell(r['speedup'])}x; {cell(r['c'])}"
                    for r in rows
                ),
            ]
        )
    return text + table(["tokens/s; over plain; c", *names.values()], lines) + "\n" + source(*names)


def acceptance() -> str:
    """n-alpha and tau on chats."""
    names = {
        "acceptance_embedded": "embedded model, T = 0", "acceptance_embedded_t1": "embedded model, T = 1",
        "acceptance_nestling": "nestling, T = 0, one head for EAGLE-1 and EAGLE-2",
        "acceptance_nestling_eagle3": "nestling, T = 0, heads of few training tokens", "acceptance_nestling_t1": "the same, T = 1",
    }  # fmt: skip
    text = prose(
        "The last user turn of held-in chats, answers of at most 96 tokens, trees of 26 nodes, "
        "chains of 5 draft tokens. Answers in which more "
        "than a fifth of the 8-grams repeat are reported apart, because loops flatter every method. "
        "Differences are paired by chat. "
        "The records of T = 0 other than the first were made with sharpness 1, the papers' rule."
    )
    parts = []
    for name, title in names.items():
        found = record(name)
        loops = found["loops_only"] or {}
        lines = []
        for method in (m for m in METHODS if m in found["without_loops"]):
            row = found["without_loops"][method]
            alphas = " ".join(cell(x[0]) for x in row.get("n-alpha", ()))
            equal = f"{found['equal_to_vanilla'][method]} of {found['chats']}"
            lines.append([method, cell(row["tau"]), cell(loops.get(method, {}).get("tau")), alphas, equal])
        gaps = [[pair, cell(gap, 2, "+")] for pair, gap in found["without_loops"]["tau differences"].items()]
        heads = ["", "tau", "tau of loops", "n-alpha, n = 0..4", "ids equal to plain decoding"]
        said = f"{found['chats']} chats, {found['loops']} of them loops.\n"
        differences = table(["difference of tau, paired", ""], gaps)
        parts.append(
            f"### {title[0].upper()}{title[1:]}\n\n{source(name)}\n{said}\n{table(heads, lines)}\n{differences}"
        )
    return text + "\n".join(parts)


def sharpness() -> str:
    """tau against the sharpness of the draft's confidences."""
    text = prose(
        "A dynamic tree ranks its nodes by the draft's confidences, softmax(sharpness x log q). 1 is "
        "EAGLE-2's own rule; 2, the default "
        "(`--tree.confidence-temperature 0.5`), is worth 3 to 19 % of tau at T = 0. tau, and its ratio to sharpness "
        "1, paired by prompt."
    )
    parts = []
    titles = {
        "sharpness": "embedded, T = 0",
        "sharpness_nestling": "nestling, T = 0",
        "sharpness_t1": "embedded, T = 1",
    }
    for name, title in titles.items():
        rows = record(name)["table"]
        steps = list(dict.fromkeys(row["sharpness"] for row in rows))
        keys = dict.fromkeys((row["method"], row["tree"]) for row in rows)
        found = {(row["method"], row["tree"], row["sharpness"]): row for row in rows}
        lines = []
        for method, tree in keys:
            cells = [found[method, tree, step] for step in steps]
            lines.append(
                [
                    f"{method} {tree}",
                    cell(cells[0]["tau"]),
                    *(f"{cell(c['tau'])} ({cell(c['over_1'])})" for c in cells[1:]),
                ]
            )
        parts.append(table([title, *(f"{step:g}" for step in steps)], lines) + "\n" + source(name))
    return text + "\n".join(parts)


def noise() -> str:
    """Sampling: coupled noise, drawn trees, blocks."""
    found = record("noise")
    text = prose(
        "25 held-in chats, embedded model. *Shared*: the draft looks at the target's noise (`--tree.noise shared`); *drawn*: it samples."
    )
    lines = [
        [name, cell(row["tau"]), f"{row['equal_to_plain']} of {found['chats']}"] for name, row in found["tau"].items()
    ]
    ratios = [[name, cell(value)] for name, value in found["ratios of tau"].items()]
    return (
        text
        + table(["", "tau", "ids equal to plain decoding"], lines)
        + "\n"
        + table(["tau over tau, paired", ""], ratios)
        + "\n"
        + source("noise")
    )


def long_context() -> str:
    """Acceptance and cost against the context."""
    found = record("long_context")
    text = prose(
        "An EAGLE-3 head trained on 512 tokens drafts behind prompts of 256 to 4,032 tokens, 20 passages "
        "of five books for each task, tree 16/5/4. All prompts of a passage are followed by the same 64 "
        "tokens. `eagle3 float16 table`: the rotations of the reference code."
    )
    parts = []
    for task, entry in found["tasks"].items():
        lengths = found["settings"]["lengths"]
        lines = [
            [name, *(cell(x[0]) for x in row["tau"]), cell(row["ratio"][-1])] for name, row in entry["all"].items()
        ]
        parts.append(table([f"{task}: tau at", *map(str, lengths), f"at {lengths[-1]} over within 512"], lines))
    draft, contexts = record("draft_cost")["draft"], record("draft_cost")["settings"]["contexts"]
    lines = []
    for name, row in draft.items():
        lines.append([f"{name}: ms of a draft, one thread", *(cell(x[0], 1) for x in row["cycle_wall_ms"])])
        lines.append([f"{name}: MB of its cache", *(cell(x / 1e6, 1) for x in row["cache_bytes"])])
    parts.append(table(["context", *(f"{n:,}" for n in contexts)], lines))
    speeds = record("draft_cost_speed")
    lines = [[name, *(f"{cell(x[0], 1)} ({cell(y[0])})" for x, y in zip(row["decode"], row["decode_vs_vanilla"], strict=True))]
             for name, row in speeds["speed"].items()]  # fmt: skip
    parts.append(table(["tokens/s (over vanilla), own forward, at", *map(str, speeds["settings"]["prompts"])], lines))
    return text + "\n".join(parts) + "\n" + source("long_context", "draft_cost", "draft_cost_speed")


def flips() -> str:
    """Half precision."""
    text = prose(
        "A tree of 12/5/3 against plain decoding in the same dtype, by the model's own forward, 21 "
        "texts. *Margin*: the logits' distance of "
        "the two tokens in the float32 model; *spacing*: that of neighbouring numbers of the dtype "
        "there. No flip lies beyond 1.1 spacings."
    )
    lines = []
    for name, title in (("flips", "embedded"), ("flips_nestling", "nestling"), ("flips_amd", "embedded, AMD")):
        for key, row in record(name)["found"].items():
            margins = ", ".join(f"{abs(f['margin']):.3f} ({f['spacing']:.3f})" for f in row["flips"])
            lines.append([f"{title}, {key}", f"{row['flipped']} of {row['texts']}", margins])
    return (
        text
        + table(["", "texts that flip", "margins (spacing)"], lines)
        + "\n"
        + source("flips", "flips_nestling", "flips_amd")
    )


def training() -> str:
    """Heads trained for a comparison: ablation, data, source of the data."""
    text = prose(
        "Small comparisons: one seed, few tokens. Differences are paired by chat.\n\n![Parts of "
        "EAGLE-3](results/ablation.svg)"
        "![Amount of data](results/scaling.svg)\n\n![Source of the data](results/data_source.svg)"
    )
    parts = []
    for name, title in (
        ("ablation", "Parts of EAGLE-3"),
        ("scaling", "Amount of data"),
        ("data_source", "The target's own answers as data"),
    ):
        found = record(name)
        shapes = list(next(iter(found["kinds"].values()))["tau"])
        lines = [[kind, *(cell(row["tau"][s]) for s in shapes), " ".join(cell(x[0]) for x in row.get("n-alpha", ()))]
                 for kind, row in found["kinds"].items()]  # fmt: skip
        gaps = [[pair, cell(gap["tau"]["tree"], 2, "+")] for pair, gap in found["differences"].items()]
        heads = ["", *(f"tau, {s}" for s in shapes), "n-alpha"]
        differences = table(["difference of tau of the tree", ""], gaps)
        parts.append(f"### {title}\n\n{source(name)}\n{found['caption']}\n\n{table(heads, lines)}\n{differences}")
    return text + "\n".join(parts)


def bundled() -> str:
    """Every method, as `eyas bench` asks it, by the model's own forward."""
    heads = ["", "tokens/s", "over vanilla", "over `generate`", "tau", "c"]
    lines = []
    for method, row in rows_by_method("bench_bundled").items():
        speedup = [row[k] for k in ("speedup", "speedup_low", "speedup_high")]
        cells = [
            cell(speedup),
            cell(row["speedup_vs_transformers_interval"]),
            cell(row["tau_interval"]),
            cell(row["c"]),
        ]
        lines.append([method, cell(row["tokens_per_second"], 1), *cells])
    text = prose(
        "The 24 bundled prompts by the model's own forward, one thread, small trees (5 nodes, chains of 3). All texts equal."
    )
    return text + table(heads, lines) + "\n" + source("bench_bundled")


def batches() -> str:
    """Several rows, and a mixture of experts."""
    found = record("batch")
    sizes = [str(n) for n in found["settings"]["rows"]]
    lines = [
        [name, *(cell(row[n]["speedup"]) for n in sizes), cell(found["throughput"][name])]
        for name, row in found["table"].items()
    ]
    lines.append(["published, Vicuna-7B", *(cell(found["published_speedup"].get(n)) for n in sizes), "1.97"])
    text = prose("Speed-up over plain decoding in as many rows (EAGLE-1, table 7), by the model's own forward.")
    text += table(["rows", *sizes, "throughput"], lines) + "\n" + source("batch")
    experts = record("experts")
    nodes = [row["nodes"] for row in experts["experts"]["verify_ms"]]
    touched = {row["nodes"]: row["experts"] for row in experts["experts"]["experts_touched"]}
    lines = [["experts touched in a layer", *(cell(touched.get(n), 1) for n in nodes)]]
    lines += [
        [f"ms of a pass, {kind}", *(cell(row["ms"], 0) for row in experts[kind]["verify_ms"])]
        for kind in ("experts", "dense")
    ]
    text += "\n" + prose(
        "A mixture of experts of Mixtral's shape at width 512, random weights, beside a dense model of as many parameters a token."
    )
    return text + table(["nodes verified", *map(str, nodes)], lines) + "\n" + source("experts")


def host_costs() -> str:
    """Look-ups and datastores."""
    found = record("lookup_cost")
    lines = [
        [name, *(f"{r['read_us'][0]:.1f}; {r['propose_us'][0]:.0f}" for r in found[name])]
        for name in ("suffix", "prompt_lookup")
    ]
    lengths = [f"{row['tokens']:,}" for row in found["suffix"]]
    text = (
        table(["us for a token read; for a proposal, at tokens", *lengths], lines) + "\n" + source("lookup_cost") + "\n"
    )
    keys = ("tokens", "build_seconds", "peak_memory_mib", "disk_bytes_per_token", "open_ms", "mean_match_tokens")
    stores = record("datastore_cost")["stores"]
    lines = [
        [name, *(f"{row[k]:,}" for k in keys), *(cell(x, 0) for x in row["then"]["processor_us"])]
        for name, row in stores.items()
    ]
    heads = ["datastore", *(k.replace("_", " ") for k in keys), "look-up us, median", "99th percentile"]
    return text + table(heads, lines) + "\n" + source("datastore_cost")


AUTO_OVER_OFF = "auto over off"


def load_table(loads: Mapping[str, Record], title: str, names: Mapping[str, str]) -> str:
    """Servers by load: tokens per second, and milliseconds to the first token and between chunks,
    median; 99th percentile."""

    def cells(found: Record | None) -> str:
        if found is None:
            return ""
        rows = (found["first_token_ms"], found["between_chunks_ms"])
        times = [f"{row['p50']:,.0f}; {row['p99']:,.0f}" if row else "none" for row in rows]
        return f"**{found['tokens_per_second']:,.0f}** ({times[0]} / {times[1]})"

    def share(by: Record, name: str) -> str:
        found = by.get(AUTO_OVER_OFF, {}).get(name)
        return cell(found) if found else ""

    servers = dict.fromkeys(name for by in loads.values() for name in by if name != AUTO_OVER_OFF)
    lines = [[name, *(cells(by.get(name)) for by in loads.values())] for name in servers]
    for name, shown in (
        ("tokens_per_second", "by the clock"),
        ("tokens_per_cpu_second", "by the server's processor time"),
    ):
        line = [share(by, name) for by in loads.values()]
        lines += [[f"{AUTO_OVER_OFF}, {shown}", *line]] if any(line) else []
    return table([title, *(names.get(load, load) for load in loads)], lines)


SERVER_LOADS = (  # `serve_load_nestling` is from before eyas' threads ended with their work
    ("serve_load", "embedded, beside others"),
    ("serve_load_nestling", "nestling, beside others"),
    ("serve_load_full", "embedded, eyas alone"),
    ("serve_load_nestling_own", "nestling with a head of its own, eyas alone"),
    ("serve_load_nestling_16", "the same, more rounds"),
)


def servers() -> str:
    """Servers under load."""
    text = prose(
        "Tokens per second; in parentheses milliseconds to the first token / between two chunks of a stream, median; 99th percentile. "
        "Clients and servers share the machine's two cores. Bundled prompts of one turn, greedy, to the answer's end or 64 tokens. "
        "none: no answer began and ended within the seconds that were measured; the first request of transformers' continuous batching "
        "took longer than a round, so its figure for one client is half of what it reaches."
    )
    for name, model in SERVER_LOADS:
        text += load_table(record(name)["closed"], f"{model}, clients", {}) + "\n" + source(name) + "\n"
    text += prose(
        "Requests at random times, at shares of the requests a second that drafts off answer with 16 clients:"
    )
    for name, model in (
        ("serve_load_open", "embedded"),
        ("serve_load_nestling_open", "nestling with a head of its own"),
    ):
        rates = {load: f"{100 * float(load):.0f} %" for load in record(name)["open"]}
        text += load_table(record(name)["open"], f"{model}, load", rates) + "\n" + source(name) + "\n"
    found = record("serve_load_long")
    text += prose(
        f"4 clients, without and with prompts of {int(found['settings']['prompt_tokens']):,} tokens that come one after the other "
        "(a context of that length, beyond what the model was trained for: only the time matters here):"
    )
    return text + load_table(found["long"], "embedded, long prompts", {}) + "\n" + source("serve_load_long")


def embedded() -> str:
    """The embedded model's own figures."""
    found = record("tiny")
    losses = ", ".join(f"{span}: {loss:.2f}" for span, loss in found["book_loss_by_position"].items())
    text = prose(
        f"Held-out chats: {found['chats']}, {found['heldout_loss_nats']:.4f} nats a token, perplexity "
        f"{found['heldout_perplexity']:.2f}. "
        f"distinct-3 of 60 greedy answers: {found['distinct_3']:.3f}. Loss on an unseen book by "
        f"position: {losses}."
    )
    samples = [
        f"- *{' '.join(s['user'].split())[:120]}* -> {' '.join(s['answer'].split())[:160]}"
        for s in found["samples"][:6]
    ]
    return text + "\n".join(samples) + "\n"


def embedded_heads() -> str:
    """The embedded EAGLE-3 head beside its predecessor and the other heads."""
    text = prose(
        "*before*: the EAGLE-3 head with 4,096 draft tokens, which all other tables on this page have; *eagle3*: the shipped one, "
        "which drafts every token. tau on held-in chats from the 101st on, less those that loop or stand in the training data; all "
        "texts equal plain decoding's."
    )
    text += heads_table(record("heads_shipped"), "tau", "difference", " - ") + "\n" + source("heads_shipped") + "\n"
    found = record("heads_shipped_speed")
    text += prose(f"Tokens per second, whole answers to {found['prompts']} bundled prompts, asked in turn:")
    speeds = {key: value["speed"] for key, value in found.items() if key.startswith("T = ")}
    text += heads_table(speeds, "tokens_per_second", "ratio", " / ") + "\n"
    cycles = [
        [temperature, tree, *(f"{ms:.2f}" for ms in row["median_cycle_ms"].values())]
        for temperature, by in speeds.items()
        for tree, row in by.items()
    ]
    text += prose(
        "A cycle, median milliseconds, which others on the machine disturb less than tokens per second. *n6144*: the shipped head, cut "
        "to the 6,144 tokens that are most frequent in sampled text."
    )
    return (
        text
        + table(["", "tree", *found["heads"]], cycles)
        + "\n"
        + source("heads_shipped_speed")
        + "\n"
        + embedded_mtp()
    )


def embedded_mtp() -> str:
    """The embedded MTP module beside the other heads."""
    found = record("heads_mtp")
    text = prose("""
        The embedded model's default: an MTP module of transformers' class. 4.2M tokens in the last stage of its training, 0.9M before, four
        steps of the training-time test, under the target's own lm_head. tau on held-in chats from the 101st on, less those that loop or
        stand in the training data; all texts equal plain decoding's.""")
    text += heads_table(found, "tau", "ratio", " / ") + "\n"
    speeds = {key: value["speed"] for key, value in found.items() if key.startswith("T = ")}
    text += prose("Tokens per second, whole answers to these chats, asked in turn:")
    text += heads_table(speeds, "tokens_per_second", "ratio", " / ") + "\n"
    return "### The embedded MTP module\n\n" + text + source("heads_mtp")


DRAFTERS = {
    "eagle3": "EAGLE-3, one layer", "two": "EAGLE-3, two layers", "peagle": "P-EAGLE", "dflash": "DFlash", "dspark": "DSpark",
}  # fmt: skip


def drafters() -> str:
    """Heads of today's methods after equally many training tokens: a line for each temperature,
    tree and head."""
    found, lines = record("drafters_deep"), []
    for temperature in (key for key in found if key.startswith("T = ")):
        for tree in (key for key in found[temperature] if "/" in key):
            speed = found[temperature]["speed"][tree]
            for name, title in DRAFTERS.items():
                tau = cell(found[temperature][tree]["tau"][name])
                costs = [cell(speed[f"median_{part}_ms"][name], 1) for part in ("draft", "cycle")]
                rates = [cell(speed["tokens_per_second"][name], 0), cell(speed["over_plain"][name])]
                lines.append([temperature, tree, title, tau, *costs, *rates])
    text = prose(f"""
        Heads of the embedded model after {found["heads"]["eagle3"]["trained"]["tokens"]:,} training tokens each, one run each, on held-in
        chats; those whose greedy answers loop are left out of tau. The papers of block drafters train on hundreds of times as many tokens,
        so this is a comparison at equal tokens and no verdict about them. The draft of EAGLE-3 with one layer is one call of a CPU kernel,
        the others' are grown by torch. All texts equal plain decoding's.""")
    heads = ["", "tree", "head", "tau", "ms of a draft", "ms of a cycle", "tokens/s", "over plain"]
    return text + table(heads, lines) + "\n" + source("drafters_deep") + "\n" + mtp()


def mtp() -> str:
    """An MTP module beside an EAGLE-3 head after equally many training tokens."""
    found, lines = record("drafters_mtp"), []
    for temperature in (key for key in found if key.startswith("T = ")):
        for tree in (key for key in found[temperature] if "/" in key):
            row = found[temperature][tree]
            lines.append(
                [
                    temperature,
                    tree,
                    *(cell(row["tau"][name]) for name in ("eagle3", "mtp")),
                    cell(row["ratio"]["mtp / eagle3"]),
                ]
            )
    text = prose(f"""
        An MTP module of transformers' class, trained by `eyas train --method mtp` from a new one, beside an EAGLE-3 head: both with
        {found["heads"]["mtp"]["trained"]["tokens"]:,} tokens in the same order, the same rate and four steps of the training-time test. Not
        the data of the table above. All texts equal plain decoding's; speeds were not measured.""")
    return (
        "### MTP beside EAGLE-3\n\n"
        + text
        + table(["", "tree", "EAGLE-3", "MTP", "MTP / EAGLE-3"], lines)
        + "\n"
        + source("drafters_mtp")
    )


def heads_table(found: Mapping[str, Any], values: str, pairs: str, sign: str) -> str:
    """A line for each temperature and tree; the last head beside every other one."""
    lines = []
    for temperature in (key for key in found if key.startswith("T = ")):
        for tree, row in found[temperature].items():
            if isinstance(row, dict) and values in row:
                names = list(row[values])
                cells = [cell(row[values][name], 2 if values == "tau" else 1) for name in names]
                *others, last = names
                lines.append([temperature, tree, *cells, *(cell(row[pairs][f"{last}{sign}{name}"]) for name in others)])
    return table(["", "tree", *names, *(f"{last}{sign}{name}" for name in others)], lines)


APPENDIX: dict[str, Callable[[], str]] = {
    "Speed by compiled kernels": speed,
    "Rounded weights and activations": rounded,
    "300M parameters, simulated acceptance": simulated,
    "Acceptance on chats": acceptance,
    "Sharpness": sharpness,
    "Sampling": noise,
    "Long contexts": long_context,
    "Half precision": flips,
    "Every method on the bundled prompts": bundled,
    "The embedded EAGLE-3 head": embedded_heads,
    "Heads trained for comparisons": training,
    "Drafters of today at equal tokens": drafters,
    "Batches and experts": batches,
    "Servers under load": servers,
    "Look-ups and datastores": host_costs,
    "The embedded model": embedded,
}


def appendix() -> str:
    """Everything behind the marker."""
    parts = [f"## Asked for, and reached\n\n{aims()}"]
    parts += [f"## {title}\n\n{make()}" for title, make in APPENDIX.items()]
    return "\n".join(parts)


# --- pictures ------------------------------------------------------------------------------------------

# An opaque light background, so that labels can be read on a dark page too. Colours: Okabe and Ito.
STYLE: Any = {
    "svg.hashsalt": "eyas", "svg.fonttype": "none", "font.size": 10, "font.family": "sans-serif", "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "figure.facecolor": "#fcfcfd", "axes.facecolor": "#fcfcfd",
}  # fmt: skip
GREY, BLUE, ORANGE, GREEN, PURPLE = "#8a8f98", "#0072B2", "#D55E00", "#009E73", "#CC79A7"


def draw_speed(figure: Figure) -> None:
    """Tokens per second: transformers' generate, plain decoding by kernels, the best tree."""
    names = {
        "speed": "embedded\nIntel AMX", "speed_nestling": "nestling\nIntel AMX", "speed_nestling_int8": "nestling int8\nIntel AMX",
        "speed_amd": "embedded\nAMD", "speed_amd_nestling": "nestling\nAMD",
    }  # fmt: skip
    axes = figure.subplots()
    labels = {
        GENERATE: ("transformers generate", GREY),
        PLAIN: ("eyas, plain decoding", BLUE),
        "": ("eyas, best EAGLE tree", ORANGE),
    }
    for place, (contestant, (label, colour)) in enumerate(labels.items()):
        values = [
            (record(n)["table"][contestant] if contestant else best_tree(record(n))[1])["tokens_per_second"]
            for n in names
        ]
        bars = axes.bar([i + 0.27 * place for i in range(len(names))], values, 0.25, color=colour, label=label)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], fontsize=8, padding=2)
    axes.set_xticks([i + 0.27 for i in range(len(names))], list(names.values()))
    axes.set(ylabel="tokens per second", title="Speed, T = 0, whole answers, two threads")
    axes.legend(loc="upper right", ncols=3, fontsize=8)
    axes.margins(y=0.18)


def draw_tau(figure: Figure) -> None:
    """tau by method on held-in chats."""
    found = record("acceptance_embedded")["without_loops"]
    rows = sorted(((name, found[name]["tau"]) for name in METHODS), key=lambda row: row[1][0])
    others = {
        "suffix": "suffix",
        "prompt_lookup": "prompt lookup",
        "lookahead": "lookahead",
        "medusa": "Medusa",
        "hydra": "Hydra",
    }
    benched = rows_by_method("papers_chats")
    for start, label in others.items():
        row = next((r for m, r in benched.items() if m.split(":")[0] == start and "head=" not in m), None)
        if row:
            rows.append((f"{label} (24 chats)", row["tau_interval"]))
    rows.sort(key=lambda row: row[1][0])
    axes = figure.subplots()
    values = [row[1][0] for row in rows]
    reach = [[abs(row[1][0] - row[1][i]) for row in rows] for i in (1, 2)]
    colours = [ORANGE if name.startswith("eagle") else GREY for name, _ in rows]
    bars = axes.barh(range(len(rows)), values, 0.7, xerr=reach, color=colours, error_kw={"lw": 1})
    axes.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=8, padding=4)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.axvline(1, color="0.4", lw=1)
    axes.set(
        xlabel="tau: tokens per pass of the target (plain decoding: 1)",
        title="Acceptance on held-in chats, T = 0, trees of 26 nodes",
    )
    axes.margins(x=0.1)


def draw_pass_cost(figure: Figure) -> None:
    """Time of a pass against its nodes."""
    axes = figure.subplots()
    curves = [
        ("speed", "own forward, by nodes", "Intel AMX, model's own forward", GREY, "--"),
        ("speed", "kernels, by nodes", "Intel AMX, kernels", BLUE, "-"),
        ("speed_vnni", "kernels, by nodes", "Intel without AMX, kernels", GREEN, "-"),
        ("speed_amd", "kernels, by nodes", "AMD, kernels", ORANGE, "-"),
    ]
    for name, key, label, colour, style in curves:
        rows = record(name)["cost"][key]
        axes.plot(
            [r["nodes"] for r in rows], [r["ms"] for r in rows], marker="o", ms=4, label=label, color=colour, ls=style
        )
    ticks = [1, 2, 4, 8, 16, 32, 64]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.set_yticks([1, 2, 5, 10, 20, 40], ["1", "2", "5", "10", "20", "40"])
    axes.minorticks_off()
    axes.set(
        xlabel="nodes of the tree", ylabel="ms of a pass", title="Cost of a pass, embedded model, 256 tokens of context"
    )
    axes.legend(fontsize=8)


def draw_long_context(figure: Figure) -> None:
    """Acceptance and the draft's time against the context."""
    left, right = figure.subplots(1, 2)
    found = record("long_context")
    for (task, entry), style in zip(found["tasks"].items(), ("-", "--"), strict=True):
        for name, colour in (("eagle3", BLUE), ("seagle", ORANGE)):
            left.plot(found["settings"]["lengths"], [x[0] for x in entry["all"][name]["tau"]], marker="o", ms=4, color=colour, ls=style,
                      label=f"{name}, {task}")  # fmt: skip
    left.set(ylim=(1, 3), xlabel="prompt, tokens", ylabel="tau", title="Acceptance (head trained on 512)")
    left.legend(fontsize=8, loc="lower right")
    draft = record("draft_cost")
    for name, colour in (("eagle3", BLUE), ("seagle", ORANGE)):
        right.plot(
            draft["settings"]["contexts"],
            [x[0] for x in draft["draft"][name]["cycle_wall_ms"]],
            marker="o",
            ms=4,
            color=colour,
            label=name,
        )
    right.set_xscale("log", base=2)
    right.set_xticks(draft["settings"]["contexts"], [f"{n // 1024}k" for n in draft["settings"]["contexts"]])
    right.minorticks_off()
    right.set(ylim=(0, None), xlabel="context, tokens", ylabel="ms of a draft, one thread", title="Time of a draft")
    right.legend(fontsize=8)


def draw_heads(name: str, figure: Figure) -> None:
    """n-alpha by n, where chains were measured; tau by kind."""
    found = record(name)
    kinds = found["kinds"]
    with_chains = "n-alpha" in next(iter(kinds.values()))
    axes = figure.subplots(1, 2 if with_chains else 1, squeeze=False)[0]
    if with_chains:
        for number, (kind, row) in enumerate(kinds.items()):
            points = [(n + 0.05 * number, *alpha) for n, alpha in enumerate(row["n-alpha"]) if alpha[0] is not None]
            x, value, low, high = zip(*points, strict=True)
            reach = [
                [v - a for v, a in zip(value, low, strict=True)],
                [b - v for v, b in zip(value, high, strict=True)],
            ]
            axes[0].errorbar(x, value, reach, marker="o", ms=4, lw=1, capsize=2, label=kind)
        axes[0].set(
            xlabel="n: draft tokens accepted before", ylabel="n-alpha", title="Acceptance in a chain", ylim=(0, 1)
        )
        axes[0].legend(fontsize=7)
    shapes = list(next(iter(kinds.values()))["tau"])
    for place, shape in enumerate(shapes):
        taus = [row["tau"][shape] for row in kinds.values()]
        at, reach = (
            [i + 0.2 * place for i in range(len(taus))],
            [[t[0] - t[1] for t in taus], [t[2] - t[0] for t in taus]],
        )
        axes[-1].errorbar([t[0] for t in taus], at, xerr=reach, marker="o", ms=5, ls="none", capsize=2, label=shape)
    axes[-1].set_yticks(range(len(kinds)), list(kinds))
    axes[-1].invert_yaxis()
    axes[-1].set(xlabel="tau", title=found["caption"].split(";")[1].strip())
    axes[-1].legend(fontsize=7)


PICTURES: Mapping[str, tuple[Callable[[Figure], None], tuple[float, float]]] = {
    "speed": (draw_speed, (9, 3.8)),
    "tau": (draw_tau, (8, 3.9)),
    "pass_cost": (draw_pass_cost, (7, 3.8)),
    "long_context": (draw_long_context, (9, 3.6)),
    **{name: (partial(draw_heads, name), (9, 3.6)) for name in ("ablation", "scaling", "data_source")},
}


def picture(name: str) -> str:
    """An SVG, the same for the same records."""
    draw, size = PICTURES[name]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def page(old: str) -> str:
    """docs/results.md: its hand-written head, and the appendix."""
    head, marker, _ = old.partition(MARKER)
    if not marker:
        sys.exit(f"{PAGE} lacks the line {MARKER}")
    return f"{head}{MARKER}\n\n{appendix()}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 when docs/results.md would change"
    )
    args = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if args.check:
        return int(old != new)
    write_text(PAGE, new)
    for name in PICTURES:
        write_text(RECORDS / f"{name}.svg", picture(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
