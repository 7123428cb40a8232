"""Make the tables and pictures of docs/lab/results.md from the JSON records in docs/results/.

    python runs/results.py            rewrites docs/lab/results.md behind its marker, and the pictures in docs/results/
    python runs/results.py --check    exit status 1 when docs/lab/results.md is not what this program makes

The program measures nothing and prints the same bytes for the same records. What stands above the
marker is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from _markdown import blocks, cell, columns, prose, table
from _records import DOCS, METHODS, PLAIN, RECORDS, Record, auto_over_best, best_tree, pooled_rows, record
from _results_pictures import PICTURES, picture

from eyas.files import write_text

PAGE = DOCS / "lab" / "results.md"
MARKER = "<!-- Everything below is made by runs/results.py from docs/results/*.json. -->"
EQUAL_IDS = "ids equal to plain decoding"
INTEL = {"embedded": "speed", "nestling": "speed_nestling"}  # speed records by model: a Xeon with AMX
EPYC = {"embedded": "speed_epyc"}


def source(*names: str) -> str:
    """The commands that wrote these records, and the machines."""
    lines = []
    for name in names:
        command = re.sub(r"(\.\./)?shared/(data/\w+|models)/", "", record(name)["command"]).replace(
            " --profile", ""
        )  # an option of before
        machine = record(name).get("machine") or {}
        threads = record(name).get("threads") or machine.get("threads")
        where = f"{machine.get('cpu', 'not recorded')}, {threads} thread{'s' * (threads != 1)}"
        script = re.match(r"python (runs/\w+\.py)", command)
        if script and not (DOCS.parent / script[1]).exists():
            where += "; the script stood in runs/ until commit eee6d4f"
        lines.append(f"- `{command}` ({where}; [record](../results/{name}.json))")
    return "\n".join(lines)


def subsections(titles: Mapping[str, str], show: Callable[[Record], Iterable[str]]) -> Iterator[str]:
    """For each record its title, its source and what is shown of it."""
    for name, title in titles.items():
        yield f"### {title}"
        yield source(name)
        yield from show(record(name))


# --- what was asked for, and what was reached ----------------------------------------------------------


def pass_ratio(name: str, nodes: int) -> float:
    """Time of a pass over so many nodes / over one."""
    by_nodes = {row["nodes"]: row["ms"] for row in record(name)["cost"]["kernels, by nodes"]}
    return float(by_nodes[nodes] / by_nodes[1])


def simulated_row(name: str, tree: str) -> Record:
    """A row of the 300M benches by nodes/depth."""
    nodes, depth = tree.split("/")
    rows = pooled_rows(name).items()
    return next(row for m, row in rows if f"tree.nodes={nodes}:" in m and f"tree.depth={depth}" in m)


def three_values(row: Record, key: str) -> list[float | None]:
    """[value, low, high] of a bench's row."""
    return [row[name] for name in (key, f"{key}_low", f"{key}_high")]


def aims() -> str:
    """The table of aims, from the records."""
    intel, epyc, sampled, large = INTEL, EPYC, ("speed_t1", "speed_epyc_t1"), ("speed_300m", "speed_amd_300m")

    def models(read: Callable[[str], str], names: Mapping[str, str]) -> str:
        return "; ".join(f"{model} {read(name)}" for model, name in names.items())

    def both(read: Callable[[str], str]) -> list[str]:
        return [models(read, names) for names in (intel, epyc)]

    def best(key: str) -> Callable[[str], str]:
        return lambda name: cell(best_tree(name)[key])

    def row_of(contestant: str, key: str) -> Callable[[str], str]:
        return lambda name: cell(record(name)["table"][contestant][key])

    def auto(method: str) -> Callable[[str], str]:
        return lambda name: cell(auto_over_best(name, method))

    lines = [
        ["plain decoding over transformers' `generate`", "1.7", *both(row_of(PLAIN, "over_transformers"))],
        ["best tree over `generate`, T = 0", "4", *both(best("over_transformers"))],
        ["best tree over plain decoding, T = 0", "2.2", *both(best("over_plain"))],
        ["the same at T = 1", "1.9", *(f"embedded {cell(best_tree(name)['over_plain'])}" for name in sampled)],
        ["c of EAGLE-3's tree of 4 nodes", "1.9", *both(row_of("eagle3 4/3/1", "c"))],
        ["300M parameters, simulated acceptance: over plain decoding, 4 nodes", "2.2",
         *(cell(three_values(simulated_row(name, "4/3"), "speedup")) for name in large)],
        ["the same: c of 32 nodes in 6 levels", "1.65", *(cell(simulated_row(name, "32/6")["c"]) for name in large)],
        ["a pass over 16 nodes / over 1", "1.2",
         *(f"embedded {pass_ratio(name, 16):.2f}" for name in ("speed", "speed_epyc"))],
        ["`--tree auto` over the best fixed tree, EAGLE-3", "0.95", *both(auto("eagle3"))],
        ["the same, MTP", "0.95", "", f"embedded {auto('mtp')('speed_epyc')}"],
        ["`--tree auto` with a useless head over plain decoding", "0.95",
         *both(row_of("random head, auto", "over_plain"))],
    ]  # fmt: skip
    return table(["", "asked for", "reached: Intel Xeon with AMX", "AMD EPYC, no matrix units"], lines)


# --- the appendix --------------------------------------------------------------------------------------


def speed_table(content: Record) -> str:
    """The table of a speed record."""
    makers = {
        "tokens/s": lambda row: cell(row["tokens_per_second"], 1),
        "over plain": lambda row: cell(row["over_plain"]),
        "over `generate`": lambda row: cell(row.get("over_transformers")),
        "tau": lambda row: cell(row.get("tau")),
        "c": lambda row: cell(row.get("c")),
        "equal texts": lambda row: row["equal"],
    }
    return columns(content["table"], makers)


def cost_tables(content: Record) -> Iterator[str]:
    """Milliseconds of passes, by nodes and by context."""
    for by in ("nodes", "context"):
        suffix = f", by {by}"
        curves = {key.removesuffix(suffix): rows for key, rows in content["cost"].items() if key.endswith(suffix)}
        heads = [f"ms of a pass{suffix}", *(str(row[by]) for row in next(iter(curves.values())))]
        yield table(heads, ([key, *(cell(row["ms"], 1) for row in rows)] for key, rows in curves.items()))


SPEEDS = {
    "speed_epyc": "AMD EPYC (Zen 4, no matrix units): embedded model, T = 0",
    "speed_epyc_t1": "AMD EPYC: embedded model, T = 1",
    "speed": "Intel Xeon with AMX: embedded model, earlier EAGLE-3 head, T = 0",
    "speed_t1": "Intel Xeon with AMX: embedded model, earlier EAGLE-3 head, T = 1",
    "speed_nestling": "Intel Xeon with AMX: nestling (28M parameters, published in bfloat16), T = 0",
}
ROUNDED_SPEEDS = {
    "speed_epyc_int8": "AMD EPYC, embedded model, int8 activations",
    "speed_int8": "Intel, embedded model, earlier EAGLE-3 head, int8 activations",
    "speed_nestling_int8": "Intel, nestling, int8 weights and activations",
}
AUTO_METHODS = {"mtp": "MTP", "eagle3": "EAGLE-3", "eagle2": "EAGLE-2"}


def speed() -> Iterator[str]:
    """The speed records."""
    yield prose("""
        The bundled prompts of one turn (21, about 67 tokens), answers of at most 96 tokens,
        float32, all contestants interleaved prompt by prompt. Seconds are those of whole answers,
        the prompt's pass included. *Plain* is plain decoding by the compiled kernels. A tree is
        given as nodes/depth/branch. c leaves the prompt's pass out. Trust ratios more than tokens
        per second: clocks and neighbours change.""")
    yield from subsections(SPEEDS, lambda content: [speed_table(content)])
    for name, title in (("speed_epyc", "AMD EPYC"), ("speed", "Intel Xeon with AMX")):
        yield f"### Cost of a pass: {title}"
        yield from cost_tables(record(name))
    yield "### Automatic trees over the best fixed tree"
    yield prose("The best fixed tree is chosen on one half of the prompts and judged on the other.")
    titles = SPEEDS | ROUNDED_SPEEDS
    lines = ([title, *(cell(auto_over_best(name, m)) for m in AUTO_METHODS)] for name, title in titles.items())
    yield table(["", *AUTO_METHODS.values()], lines)


def rounded() -> Iterator[str]:
    """Rounded weights and activations: what they cost, and their speed."""
    yield prose("""
        A rounded model is a target of its own: its texts are compared with its own plain decoding.
        Perplexity is that of 60 held-in chats; ratios are paired by chat. *Same token*: the share
        of positions whose most probable token is the exact model's.""")
    models = {"embedded": "rounding", "nestling": "rounding_nestling"}
    yield source(*models.values())
    heads, lines = ["weights, activations"], list[list[str]]()
    for model, name in models.items():
        heads += [f"{model}: {figure}" for figure in ("MB a pass", "perplexity over exact", "same token")]
        for number, row in enumerate(record(name)["rows"]):
            if model == "embedded":
                lines.append([f"{row['weights']}, {row['activations']}"])
            share = f"{100 * row['same_token']:.1f} %"
            lines[number] += [f"{row['bytes'] / 1e6:.0f}", cell(row["over_exact"], 4), share]
    yield table(heads, lines)
    yield from subsections(ROUNDED_SPEEDS, lambda content: [speed_table(content)])


SIMULATED = {
    "speed_300m": "Intel, exact",
    "speed_300m_int8": "Intel, int8",
    "speed_amd_300m": "AMD, exact",
    "speed_amd_300m_int8": "AMD, int8",
}


def bench_label(method: str) -> str:
    """A contestant of a bench: its method, and its tree as nodes/depth/branch."""
    name, *parts = method.split(":")
    options = dict(part.split("=") for part in parts)
    sizes = [options[key] for key in ("tree.nodes", "tree.depth", "tree.branch") if key in options]
    return f"{name} {'/'.join(sizes) or options.get('tree.choices', '')}".strip()


def simulated() -> Iterator[str]:
    """A target of 300M parameters with random weights."""
    yield prose("""
        A Llama of 22 layers, width 1,024 and 32,000 tokens with random weights (562 MB a pass).
        Draft tokens are accepted at the rates that EAGLE-1 publishes for Vicuna-7B (0.79, 0.74,
        0.72, 0.73, 0.67); everything else is measured. Three prompts of 256 tokens, 48 new ones.""")
    benches = [pooled_rows(name) for name in SIMULATED]

    def figures(row: Record | None) -> str:
        return f"{row['tokens_per_second']:.0f}; {cell(row['speedup'])}x; {cell(row['c'])}" if row else ""

    lines = ([bench_label(method), *(figures(bench.get(method)) for bench in benches)] for method in benches[0])
    yield table(["tokens/s; over plain; c", *SIMULATED.values()], lines)
    yield source(*SIMULATED)


ACCEPTANCE = {
    "acceptance_embedded": "Embedded model, T = 0",
    "acceptance_embedded_t1": "Embedded model, T = 1",
    "acceptance_nestling_eagle3": "Nestling, T = 0, heads of few training tokens",
}


def alphas(row: Record) -> str:
    """n-alpha, where chains were measured."""
    return " ".join(cell(alpha[0]) for alpha in row.get("n-alpha", ()))


def acceptance_tables(content: Record) -> Iterator[str]:
    """n-alpha and tau of every method of a record, and differences of tau."""
    yield f"{content['chats']} chats, {content['loops']} of them loops."
    chats, loops = content["without_loops"], content["loops_only"] or {}
    lines = [
        [method, cell(chats[method]["tau"]), cell(loops.get(method, {}).get("tau")), alphas(chats[method]),
         f"{content['equal_to_vanilla'][method]} of {content['chats']}"]
        for method in METHODS if method in chats
    ]  # fmt: skip
    yield table(["", "tau", "tau of loops", "n-alpha, n = 0..4", EQUAL_IDS], lines)
    yield columns(chats["tau differences"], {"": lambda gap: cell(gap, 2, "+")}, "difference of tau, paired")


def acceptance() -> Iterator[str]:
    """n-alpha and tau on chats."""
    yield prose("""
        The last user turn of held-in chats, answers of at most 96 tokens, trees of 26 nodes, chains
        of 5 draft tokens. Answers in which more than a fifth of the 8-grams repeat are reported
        apart, because loops flatter every method. Differences are paired by chat. Nestling's trees
        were grown with confidence temperature 1, the papers' rule.""")
    yield from subsections(ACCEPTANCE, acceptance_tables)


def sharpness() -> Iterator[str]:
    """tau against the sharpness of the draft's confidences."""
    yield prose("""
        A dynamic tree ranks its nodes by the draft's confidences, softmax(sharpness x log q). 1 is
        EAGLE-2's own rule; 2, the default (`--tree.confidence-temperature 0.5`), is worth 3 to 19 %
        of tau at T = 0. tau, and its ratio to sharpness 1, paired by prompt.""")
    titles = {"sharpness": "embedded, T = 0", "sharpness_t1": "embedded, T = 1"}
    for name, title in titles.items():
        by_tree: dict[str, list[Record]] = {}
        for row in record(name)["table"]:
            by_tree.setdefault(f"{row['method']} {row['tree']}", []).append(row)
        lines = [
            [tree, cell(first["tau"]), *(f"{cell(row['tau'])} ({cell(row['over_1'])})" for row in others)]
            for tree, (first, *others) in by_tree.items()
        ]
        steps = [f"{row['sharpness']:g}" for row in next(iter(by_tree.values()))]
        yield table([title, *steps], lines)
        yield source(name)


def noise() -> Iterator[str]:
    """Sampling: coupled noise, sampled trees, blocks."""
    sampling = record("noise")
    yield prose("""
        25 held-in chats, embedded model. *Shared*: the draft looks at the target's noise
        (`--tree.noise shared`); *drawn*: it samples.""")
    equal = {EQUAL_IDS: lambda row: f"{row['equal_to_plain']} of {sampling['chats']}"}
    yield columns(sampling["tau"], {"tau": lambda row: cell(row["tau"]), **equal})
    yield columns(sampling["ratios of tau"], {"": cell}, "tau over tau, paired")
    yield source("noise")


def long_context() -> Iterator[str]:
    """Acceptance and cost against the context."""
    yield prose("""
        An EAGLE-3 head trained on 512 tokens drafts behind prompts of 256 to 4,032 tokens, 20
        passages of five books for each task, tree 16/5/4. All prompts of a passage are followed by
        the same 64 tokens. `eagle3 float16 table`: the rotations of the reference code.""")
    passages = record("long_context")
    lengths = passages["settings"]["lengths"]
    for task, entry in passages["tasks"].items():
        lines = [
            [name, *(cell(tau[0]) for tau in row["tau"]), cell(row["ratio"][-1])] for name, row in entry["all"].items()
        ]
        yield table([f"{task}: tau at", *map(str, lengths), f"at {lengths[-1]} over within 512"], lines)
    real = record("long_context_smollm2")
    rows = real["tasks"]["continue"]["all"]
    yield prose("""
        SmolLM2-135M with its EAGLE-3 head (trained on 512 tokens), one passage of a novel, tree 16/5/4. One passage has no interval: a
        difference of 0.1 is two cycles.""")
    yield table(
        ["SmolLM2, continue: tau at", *map(str, real["settings"]["lengths"])],
        [[name, *(f"{tau[0]:.2f}" for tau in row["tau"])] for name, row in rows.items()],
    )
    cost, speeds = record("draft_cost"), record("draft_cost_speed")
    lines = []
    for name, row in cost["draft"].items():
        lines.append([f"{name}: ms of a draft, one thread", *(cell(ms[0], 1) for ms in row["cycle_wall_ms"])])
        lines.append([f"{name}: MB of its cache", *(cell(size / 1e6, 1) for size in row["cache_bytes"])])
    yield table(["context", *(f"{n:,}" for n in cost["settings"]["contexts"])], lines)
    lines = []
    for name, row in speeds["speed"].items():
        pairs = zip(row["decode"], row["decode_vs_vanilla"], strict=True)
        lines.append([name, *(f"{cell(speed[0], 1)} ({cell(over[0])})" for speed, over in pairs)])
    yield table(["tokens/s (over vanilla), own forward, at", *map(str, speeds["settings"]["prompts"])], lines)
    yield source("long_context", "long_context_smollm2", "draft_cost", "draft_cost_speed")


def flips() -> Iterator[str]:
    """Half precision."""
    yield prose("""
        A tree of 12/5/3 against plain decoding in the same dtype, by the model's own forward, 21
        texts. *Margin*: the logits' distance of the two tokens in the float32 model; *spacing*:
        that of neighbouring numbers of the dtype there. No flip lies beyond 1.1 spacings.""")
    titles = {"flips": "Intel", "flips_amd": "AMD"}
    rows = {f"{title}, {key}": row for name, title in titles.items() for key, row in record(name)["found"].items()}

    def margins(row: Record) -> str:
        return ", ".join(f"{abs(flip['margin']):.3f} ({flip['spacing']:.3f})" for flip in row["flips"])

    flipped = {"texts that flip": lambda row: f"{row['flipped']} of {row['texts']}"}
    yield columns(rows, {**flipped, "margins (spacing)": margins})
    yield source(*titles)


def training_tables(content: Record) -> Iterator[str]:
    """tau and n-alpha of the kinds of heads of a record, and differences of tau."""
    yield content["caption"]
    shapes = next(iter(content["kinds"].values()))["tau"]
    makers = {f"tau, {shape}": lambda row, shape=shape: cell(row["tau"][shape]) for shape in shapes}
    yield columns(content["kinds"], {**makers, "n-alpha": alphas})
    gaps = {"": lambda gap: cell(gap["tau"]["tree"], 2, "+")}
    yield columns(content["differences"], gaps, "difference of tau of the tree")


def training() -> Iterator[str]:
    """Heads trained for a comparison: ablation, data, source of the data."""
    yield prose("""
        Small comparisons: one seed, few tokens. Differences are paired by chat.
        ![Parts of EAGLE-3](../results/ablation.svg) ![Source of the data](../results/data_source.svg)""")
    titles = {"ablation": "Parts of EAGLE-3", "data_source": "The target's own answers as data"}
    yield from subsections(titles, training_tables)


BENCH_COLUMNS: dict[str, Callable[[Record], str]] = {
    "tokens/s": lambda row: cell(row["tokens_per_second"], 1),
    "over vanilla": lambda row: cell(three_values(row, "speedup")),
    "over `generate`": lambda row: cell(row["speedup_vs_transformers_interval"]),
    "tau": lambda row: cell(row["tau_interval"]),
    "c": lambda row: cell(row["c"]),
}


def bundled() -> Iterator[str]:
    """Every method, as `eyas bench` asks it."""
    yield prose("""
        The 24 bundled prompts, T = 0, without the prompts' passes: chains and trees of three draft
        tokens. EAGLE's heads and the MTP module are the embedded model's; the other heads, the
        draft model and the datastore are those of `runs/drafters.sh`, which saw 300,000 tokens.
        All texts equal plain decoding's.""")
    yield columns({bench_label(method): row for method, row in pooled_rows("bench_bundled").items()}, BENCH_COLUMNS)
    yield source("bench_bundled")


def learning_curve() -> Iterator[str]:
    """tau against tokens read, and the heads decoded."""
    yield prose("""
        SmolLM2's EAGLE-3 head on one H200 (`runs/gpu_head.py`, one run, seed 1), on 231 greedy answers to reserved general prompts,
        read with the true tokens before each slot. About two fifths of the greedy answers loop, which flatters every figure, the
        late ones most: decoded without the loops the last head has 2.40 where the curve ends at 3.24.
        ![The learning curve](../results/smollm2_curve.svg)""")
    points = {f"{point['tokens'] / 1e6:.1f}M": point for point in record("smollm2_curve")["curve"]}
    makers = {
        "n-alpha": lambda row: " ".join(f"{x:.2f}" for x in row["n-alpha"]),
        "tau, chain of 4": lambda row: cell(row["chain 4 tau"]),
    }
    yield columns(points, makers, "tokens read")
    yield source("smollm2_curve")
    trees = {"5/4/1": "tau, chain of 4", "60/8/10": "tau, 60/8/10"}
    found, names = (
        record("smollm2_gpu_head")["T = 0"],
        {"before": "of 2026-11-27, 1.5M tokens", "gpu": "shipped, 31.6M tokens"},
    )
    rows = {told: {tree: found[tree]["tau"][name] for tree in trees} for name, told in names.items()}
    yield columns(
        rows, {told: lambda row, tree=tree: cell(row[tree]) for tree, told in trees.items()}, "decoded, loops left out"
    )
    yield source("smollm2_gpu_head")


SMOLLM2 = {
    "smollm2_float32": "float32",
    "smollm2_int8": "int8 weights, int16 activations",
    "smollm2_int4": "int4 weights, int16 activations",
}
WIDER = "_avx512"  # the same record from a machine with AVX-512


def smollm2_aims() -> str:
    """The table of what was asked for with SmolLM2, on a processor without AVX-512 and on one with it."""
    pooled = {
        (name, temperature, row["method"]): row
        for name in (*SMOLLM2, *(name + WIDER for name in SMOLLM2))
        for temperature in (0.0, 1.0)
        for row in record(name)["rows"]
        if row["task"] == "all" and row["temperature"] == temperature
    }

    def reached(more: str, temperature: float, key: str) -> list[str]:
        return [cell(pooled[name + more, temperature, "eagle3"][key]) for name in SMOLLM2]

    def intervals(more: str, temperature: float) -> list[str]:
        rows = (pooled[name + more, temperature, "eagle3"] for name in SMOLLM2)
        return [cell([row["speedup"], row["speedup_low"], row["speedup_high"]]) for row in rows]

    lines = [
        line
        for processor, asked, more in (("AVX2", "1.5", ""), ("AVX-512", "1.8", WIDER))
        for line in (
            [f"{processor}: EAGLE-3 over plain decoding, T = 0", asked, *intervals(more, 0.0)],
            [f"{processor}: the same at T = 1", "0.9 of that", *intervals(more, 1.0)],
            [
                f"{processor}: over transformers' `generate`, T = 0",
                "5",
                *reached(more, 0.0, "speedup_vs_transformers_interval"),
            ],
        )
    ]
    return table(["", "asked for", *SMOLLM2.values()], lines)


def smollm2() -> Iterator[str]:
    """A real model on an ordinary computer."""
    yield prose("""
        What was asked for on a processor with AVX2 alone and on one with AVX-512, and what was reached. Where plain decoding is
        fast, as in 4 and 8 bits, a drafted token costs more of a pass, so drafts gain less ([the report](report.md) has the
        arithmetic). The record of int4 with AVX2 is older: an EPYC of 2022 and a head of one layer, 3M tokens.""")
    yield smollm2_aims()
    yield prose("""
        SmolLM2-135M-Instruct (`--target smollm2-q4_1`) on the six tasks of EAGLE-2's tables, the same number of prompts from each,
        answers of at most 64 tokens, all contestants interleaved prompt by prompt, after the prompt's pass. *Over vanilla* is the
        speed over eyas' own plain decoding with the same weights, by the same kernels; the intervals are bootstrapped over
        prompts. The EAGLE-3 head is the one in the package ([the curve](#a-learning-curve-of-smollm2s-head) has its training).
        EYAS_KERNELS_ISA=x86-64-v3 forces the kernels for AVX2 on the same machine, a Xeon with AVX-512 and AMX. *suffix* verifies the whole of its tree here,
        where commands choose its nodes by their costs (`--tree auto`). A rounded model is a
        target of its own, and its texts are compared with its own plain decoding.""")
    for name, title in SMOLLM2.items():
        yield f"### AVX2, forced: {title}"
        yield from smollm2_tables(name)
    for name, title in SMOLLM2.items():
        yield f"### AVX-512: {title}"
        yield from smollm2_tables(name + WIDER)
    yield "### Cost of a pass: SmolLM2"
    yield prose("""
        Two threads of an EPYC of 2022 (Zen 4), idle. First the kernels for AVX2, which EYAS_KERNELS_ISA=x86-64-v3 forces, then the
        machine's own for AVX-512 with VNNI and bfloat16. The tables of a Zen 3, before and after the kernels for AVX2 were
        written, are in the [log](log.md).""")
    for name in ("cost_smollm2", "cost_smollm2" + WIDER):
        yield from cost_tables(record(name))
        yield source(name)


def smollm2_tables(name: str) -> Iterator[str]:
    """The tables of one record: all tasks, and each of them."""
    equal = {"equal texts": lambda row: {True: "yes", None: ""}.get(row["equal"], f"{len(row['differ'])} not")}
    rows = record(name)["rows"]
    prompts = next(row["prompts"] for row in rows if row["task"] == "all")
    for temperature in (0.0, 1.0):
        chosen = [row for row in rows if row["temperature"] == temperature]
        pooled = {bench_label(row["method"]): row for row in chosen if row["task"] == "all"}
        yield columns(pooled, BENCH_COLUMNS | equal, f"T = {temperature:g}, {prompts} prompts")
        tasks = list(dict.fromkeys(row["task"] for row in chosen if row["task"] != "all"))
        by_task = {(row["method"], row["task"]): row for row in chosen}
        lines = [
            [bench_label(method), *(f"{cell(row['speedup'])} ({cell(row['tau'])})" for row in found)]
            for method in dict.fromkeys(row["method"] for row in chosen)
            if len(found := [by_task[method, task] for task in tasks if (method, task) in by_task]) == len(tasks)
        ]
        yield table([f"T = {temperature:g}: over plain (tau)", *tasks], lines)
    yield source(name)


def batches() -> Iterator[str]:
    """Several rows."""
    yield prose("Speed-up over plain decoding in as many rows (EAGLE-1, table 7), by the model's own forward.")
    batch = record("batch")
    sizes = [str(n) for n in batch["settings"]["rows"]]
    lines = [
        [name, *(cell(row[n]["speedup"]) for n in sizes), cell(batch["throughput"][name])]
        for name, row in batch["table"].items()
    ]
    lines.append(["published, Vicuna-7B", *(cell(batch["published_speedup"].get(n)) for n in sizes), "1.97"])
    yield table(["rows", *sizes, "throughput"], lines)
    yield source("batch")


AUTO_OVER_OFF = "auto over off"


def load_cell(row: Record | None) -> str:
    """Tokens per second; milliseconds to the first token and between chunks, median; 99th percentile."""
    if row is None:
        return ""
    waits = (row["first_token_ms"], row["between_chunks_ms"])
    first, between = (f"{ms['p50']:,.0f}; {ms['p99']:,.0f}" if ms else "none" for ms in waits)
    return f"**{row['tokens_per_second']:,.0f}** ({first} / {between})"


def load_table(loads: Mapping[str, Record], title: str, heads: Iterable[str] = ()) -> str:
    """Servers by load.

    Args:
        heads: of the loads, other than their names.
    """
    servers = dict.fromkeys(name for by in loads.values() for name in by if name != AUTO_OVER_OFF)
    lines = [[name, *(load_cell(by.get(name)) for by in loads.values())] for name in servers]
    clocks = {"tokens_per_second": "by the clock", "tokens_per_cpu_second": "by the server's processor time"}
    for name, clock in clocks.items():
        shares = [cell(by.get(AUTO_OVER_OFF, {}).get(name)) for by in loads.values()]
        lines += [[f"{AUTO_OVER_OFF}, {clock}", *shares]] if any(shares) else []
    return table([title, *(heads or loads)], lines)


SERVER_LOADS = {
    "serve_load_epyc": "embedded, beside others, AMD EPYC",
    "serve_load": "embedded, beside others, Intel Xeon",
    "serve_load_full": "embedded, eyas alone",
    "serve_load_nestling_own": "nestling with a head of its own, eyas alone",
}


def servers() -> Iterator[str]:
    """Servers under load."""
    yield prose("""
        Tokens per second; in parentheses milliseconds to the first token / between two chunks of a
        stream, median; 99th percentile. Clients and servers share the machine's two cores. Bundled
        prompts of one turn, greedy, to the answer's end or 64 tokens. none: no answer began and
        ended within the seconds that were measured; the first request of transformers' continuous
        batching took longer than a round, so its figure for one client is half of what it reaches.""")
    for name, model in SERVER_LOADS.items():
        yield load_table(record(name)["closed"], f"{model}, clients")
        yield source(name)
    yield prose("""
        Requests at random times, at shares of the requests a second that drafts off answer with 16
        clients:""")
    loads = record("serve_load_open")["open"]
    yield load_table(loads, "embedded, load", [f"{100 * float(load):.0f} %" for load in loads])
    yield source("serve_load_open")
    long = record("serve_load_long")
    yield prose(f"""
        4 clients, without and with prompts of {int(long["settings"]["prompt_tokens"]):,} tokens that come one after
        the other (a context of that length, beyond what the model was trained for: only the time
        matters here):""")
    yield load_table(long["long"], "embedded, long prompts")
    yield source("serve_load_long")


def embedded() -> Iterator[str]:
    """The embedded model's own figures."""
    figures = record("tiny")
    losses = ", ".join(f"{span}: {loss:.2f}" for span, loss in figures["book_loss_by_position"].items())
    yield prose(f"""
        Held-out chats: {figures["chats"]}, {figures["heldout_loss_nats"]:.4f} nats a token, perplexity
        {figures["heldout_perplexity"]:.2f}. distinct-3 of 60 greedy answers: {figures["distinct_3"]:.3f}.
        Loss on an unseen book by position: {losses}.""")
    samples = ((" ".join(s["user"].split()), " ".join(s["answer"].split())) for s in figures["samples"][:6])
    yield "\n".join(f"- *{user[:120]}* -> {answer[:160]}" for user, answer in samples)


def by_tree(content: Record, speed: bool = False) -> Iterator[tuple[str, str, Record]]:
    """(temperature, tree, row) of a comparison of heads; with `speed` the rows of their speed."""
    for temperature, entry in content.items():
        if temperature.startswith("T = "):
            rows = entry["speed"] if speed else entry
            yield from ((temperature, tree, row) for tree, row in rows.items() if "/" in tree)


def heads_table(content: Record, figure: str) -> str:
    """A line for each temperature and tree, with the ratio of the last head to every other one.

    Args:
        figure: "tau" or "tokens_per_second".
    """
    speed = figure != "tau"
    lines, heads = [], list[str]()
    for temperature, tree, row in by_tree(content, speed):
        *others, last = row[figure]
        pairs = [f"{last} / {name}" for name in others]
        figures = [cell(value, 1 if speed else 2) for value in row[figure].values()]
        lines.append([temperature, tree, *figures, *(cell(row["ratio"][pair]) for pair in pairs)])
        heads = ["", "tree", *row[figure], *pairs]
    return table(heads, lines)


def embedded_heads() -> Iterator[str]:
    """The embedded model's heads beside each other."""
    mtp = record("heads_mtp")
    yield prose("""
        The embedded model's default is an MTP module of transformers' class: 4.2M tokens in the
        last stage of its training, 0.9M before, four steps of the training-time test, under the
        target's own lm_head. tau on held-in chats from the 101st on, less those that loop or stand
        in the training data; all texts equal plain decoding's.""")
    yield heads_table(mtp, "tau")
    yield prose("Tokens per second, whole answers to these chats, asked in turn:")
    yield heads_table(mtp, "tokens_per_second")
    yield source("heads_mtp")


DRAFTERS = {
    "eagle3": "EAGLE-3, one layer",
    "two": "EAGLE-3, two layers",
    "mtp": "MTP",
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "dspark": "DSpark",
}


def drafters() -> Iterator[str]:
    """Heads of today's methods after equally many training tokens."""
    content = record("drafters")
    yield prose(f"""
        Heads of the embedded model, one run each with {content["heads"]["eagle3"]["trained"]["tokens"]:,} training tokens
        in the same order (`runs/drafters.sh`), on held-in chats; those whose greedy answers loop are
        left out of tau. The papers of block drafters train on hundreds of times as many tokens, so
        this is a comparison at equal tokens and no verdict about them. The drafts of EAGLE-3 with
        one layer and of MTP are one call of a CPU kernel, the others are grown by torch. All texts
        equal plain decoding's.""")
    lines = [
        [temperature, tree, title, cell(row["tau"][name]), cell(speed["median_draft_ms"][name], 1),
         cell(speed["median_cycle_ms"][name], 1), cell(speed["tokens_per_second"][name], 0),
         cell(speed["over_plain"][name])]
        for (temperature, tree, row), (_, _, speed) in zip(by_tree(content), by_tree(content, speed=True), strict=True)
        for name, title in DRAFTERS.items()
    ]  # fmt: skip
    yield table(["", "tree", "head", "tau", "ms of a draft", "ms of a cycle", "tokens/s", "over plain"], lines)
    yield source("drafters")


RECIPES = {
    "eagle3": "EAGLE-3, four steps of the training-time test",
    "longer": "the same with seven steps",
    "hybrid": "LK's hybrid loss",
    "overlap": "LK's overlap loss",
    "mtp": "MTP",
    "dflash": "DFlash",
    "pace": "DFlash with D-PACE's weights",
    "dflash2": "DFlash 2",
}


def recipes() -> Iterator[str]:
    """Heads of SmolLM2 by today's recipes, after equally many training tokens."""
    wide, narrow = _with_dflash2(record("smollm2_edge")), record("smollm2_edge_speed")
    yield prose(f"""
        Heads of SmolLM2-135M, one run each with {wide["heads"]["eagle3"]["trained"]["tokens"]:,} tokens of its own
        answers in the same order (`runs/smollm2.sh edge`), greedy and at T = 1 on {wide["prompts"]} bundled
        prompts, less those that loop. EAGLE-3 has a draft vocabulary of 8,192, the others the whole one. Tokens/s are
        whole answers with the small tree, on the idle machine. Few tokens: a comparison of how fast
        recipes learn.""")
    heads = [
        "",
        "head",
        "tau, 12/4/4",
        "over EAGLE-3",
        "tau, 3/2/1",
        "over EAGLE-3",
        "ms of a draft",
        "tokens/s over plain",
    ]
    yield table(
        heads, [line for temperature in ("T = 0", "T = 1") for line in _recipe_lines(wide, narrow, temperature)]
    )
    for name in ("smollm2_edge", "smollm2_edge_dflash2", "smollm2_edge_speed"):
        yield source(name)


def _with_dflash2(content: Record) -> Record:
    """Add the head that was measured later, beside EAGLE-3's on the same prompts."""
    later = record("smollm2_edge_dflash2")
    for temperature in ("T = 0", "T = 1"):
        for figure in ("tau", "ratio"):
            row = content[temperature]["12/4/4"][figure]
            row |= {name: value for name, value in later[temperature]["12/4/4"][figure].items() if "dflash2" in name}
    return content


def _recipe_lines(wide: Record, narrow: Record, temperature: str) -> Iterator[list[str]]:
    for name, title in RECIPES.items():
        line = [temperature, title]
        for content, tree in ((wide, "12/4/4"), (narrow, "3/2/1")):
            if row := content.get(temperature, {}).get(tree):
                line += [cell(row["tau"][name]), cell(row["ratio"].get(f"{name} / eagle3"))]
        if speed := narrow.get(temperature, {}).get("speed"):
            line += [cell(speed["3/2/1"]["median_draft_ms"][name], 1), cell(speed["3/2/1"]["over_plain"][name])]
        yield [*line, *([""] * (8 - len(line)))]


APPENDIX: dict[str, Callable[[], Iterator[str]]] = {
    "SmolLM2-135M on an ordinary computer": smollm2,
    "Speed by compiled kernels": speed,
    "Rounded weights and activations": rounded,
    "300M parameters, simulated acceptance": simulated,
    "Acceptance on chats": acceptance,
    "Sharpness": sharpness,
    "Sampling": noise,
    "Long contexts": long_context,
    "Half precision": flips,
    "Every method on the bundled prompts": bundled,
    "The embedded heads": embedded_heads,
    "Heads trained for comparisons": training,
    "Drafters of today at equal tokens": drafters,
    "Recipes of today on SmolLM2": recipes,
    "A learning curve of SmolLM2's head": learning_curve,
    "Batches": batches,
    "Servers under load": servers,
    "The embedded model": embedded,
}


def appendix() -> Iterator[str]:
    """Everything behind the marker."""
    yield "## Asked for, and reached"
    yield aims()
    for title, section in APPENDIX.items():
        yield f"## {title}"
        yield from section()


def page(old: str) -> str:
    """docs/lab/results.md: its hand-written head, and the appendix."""
    head, marker, _ = old.partition(MARKER)
    if not marker:
        sys.exit(f"{PAGE} lacks the line {MARKER}")
    return f"{head}{blocks([MARKER, *appendix()])}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 when docs/lab/results.md would change"
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
