"""The pictures of docs/lab/results.md and docs/lab/report.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from _pictures import svg
from _records import GENERATE, METHODS, PLAIN, best_tree, pooled_rows, record
from _report_pictures import REPORT
from matplotlib.figure import Figure

# An opaque light background, so that labels can be read on a dark page too. Colours: Okabe and Ito.
STYLE: Any = {"font.size": 10, "figure.facecolor": "#fcfcfd", "axes.facecolor": "#fcfcfd"}
GREY, BLUE, ORANGE = "#8a8f98", "#0072B2", "#D55E00"
SPEEDS = {
    "speed_epyc": "embedded\nAMD",
    "speed_epyc_int8": "embedded int8\nAMD",
    "speed": "embedded\nIntel AMX",
    "speed_nestling": "nestling\nIntel AMX",
    "speed_nestling_int8": "nestling int8\nIntel AMX",
}
DRAFTLESS = {
    "suffix": "suffix",
    "prompt_lookup": "prompt lookup",
    "lookahead": "lookahead",
    "medusa": "Medusa",
    "hydra": "Hydra",
}
HEADS = {"eagle3": BLUE, "seagle": ORANGE}


def draw_speed(figure: Figure) -> None:
    """Tokens per second: transformers' generate, plain decoding by kernels, the best tree."""
    bars = {
        ("transformers generate", GREY): [record(name)["table"][GENERATE] for name in SPEEDS],
        ("eyas, plain decoding", BLUE): [record(name)["table"][PLAIN] for name in SPEEDS],
        ("eyas, best tree of a head", ORANGE): [best_tree(name) for name in SPEEDS],
    }
    axes = figure.subplots()
    for place, ((label, colour), rows) in enumerate(bars.items()):
        values = [row["tokens_per_second"] for row in rows]
        drawn = axes.bar([i + 0.27 * place for i in range(len(values))], values, 0.25, color=colour, label=label)
        axes.bar_label(drawn, [f"{value:,.0f}" for value in values], fontsize=8, padding=2)
    axes.set_xticks([i + 0.27 for i in range(len(SPEEDS))], list(SPEEDS.values()))
    axes.set(ylabel="tokens per second", title="Speed, T = 0, whole answers, two threads")
    axes.legend(loc="upper right", ncols=3, fontsize=8)
    axes.margins(y=0.18)


def draw_tau(figure: Figure) -> None:
    """tau by method on held-in chats."""
    ours, benched = record("acceptance_embedded")["without_loops"], pooled_rows("papers_chats")
    rows = sorted(((name, ours[name]["tau"]) for name in METHODS), key=lambda row: row[1][0])
    for start, label in DRAFTLESS.items():
        for method, row in benched.items():
            if method.split(":")[0] == start and "head=" not in method:
                rows.append((f"{label} (24 chats)", row["tau_interval"]))
                break
    rows.sort(key=lambda row: row[1][0])
    axes = figure.subplots()
    taus = [tau for _, tau in rows]
    values = [tau[0] for tau in taus]
    colours = [ORANGE if name in METHODS else GREY for name, _ in rows]
    bars = axes.barh(range(len(rows)), values, 0.7, xerr=reach(taus), color=colours, error_kw={"lw": 1})
    axes.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=8, padding=4)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.axvline(1, color="0.4", lw=1)
    axes.set(
        xlabel="tau: tokens per pass of the target (plain decoding: 1)",
        title="Acceptance on held-in chats, T = 0, trees of 26 nodes",
    )
    axes.margins(x=0.1)


def reach(intervals: Sequence[Sequence[float]]) -> list[list[float]]:
    """How far intervals reach below and above their values."""
    return [[value - low for value, low, _ in intervals], [high - value for value, _, high in intervals]]


def draw_pass_cost(figure: Figure) -> None:
    """Time of a pass against its nodes."""
    axes = figure.subplots()
    curves = [
        ("speed", "own forward, by nodes", "Intel AMX, model's own forward", GREY, "--"),
        ("speed", "kernels, by nodes", "Intel AMX, kernels", BLUE, "-"),
        ("speed_epyc", "kernels, by nodes", "AMD, kernels", ORANGE, "-"),
    ]
    for name, key, label, colour, style in curves:
        nodes, ms = zip(*((row["nodes"], row["ms"]) for row in record(name)["cost"][key]), strict=True)
        axes.plot(nodes, ms, marker="o", ms=4, label=label, color=colour, ls=style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for ticks, set_ticks in (((1, 2, 4, 8, 16, 32, 64), axes.set_xticks), ((1, 2, 5, 10, 20, 40), axes.set_yticks)):
        set_ticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.set(
        xlabel="nodes of the tree", ylabel="ms of a pass", title="Cost of a pass, embedded model, 256 tokens of context"
    )
    axes.legend(fontsize=8)


def draw_long_context(figure: Figure) -> None:
    """Acceptance and the draft's time against the context."""
    left, right = figure.subplots(1, 2)
    passages, cost = record("long_context"), record("draft_cost")
    for (task, entry), style in zip(passages["tasks"].items(), ("-", "--"), strict=True):
        for name, colour in HEADS.items():
            taus = [tau[0] for tau in entry["all"][name]["tau"]]
            lengths = passages["settings"]["lengths"]
            left.plot(lengths, taus, marker="o", ms=4, color=colour, ls=style, label=f"{name}, {task}")
    left.set(ylim=(1, 3), xlabel="prompt, tokens", ylabel="tau", title="Acceptance (head trained on 512)")
    left.legend(fontsize=8, loc="lower right")
    contexts = cost["settings"]["contexts"]
    for name, colour in HEADS.items():
        ms = [interval[0] for interval in cost["draft"][name]["cycle_wall_ms"]]
        right.plot(contexts, ms, marker="o", ms=4, color=colour, label=name)
    right.set_xscale("log", base=2)
    right.set_xticks(contexts, [f"{n // 1024}k" for n in contexts])
    right.minorticks_off()
    right.set(ylim=(0, None), xlabel="context, tokens", ylabel="ms of a draft, one thread", title="Time of a draft")
    right.legend(fontsize=8)


def draw_heads(name: str, figure: Figure) -> None:
    """n-alpha by n, where chains were measured; tau by kind."""
    content = record(name)
    kinds = content["kinds"]
    with_chains = "n-alpha" in next(iter(kinds.values()))
    axes = figure.subplots(1, 2 if with_chains else 1, squeeze=False)[0]
    if with_chains:
        for number, (kind, row) in enumerate(kinds.items()):
            points = [(n + 0.05 * number, alpha) for n, alpha in enumerate(row["n-alpha"]) if alpha[0] is not None]
            x, alphas = zip(*points, strict=True)
            values = [alpha[0] for alpha in alphas]
            axes[0].errorbar(x, values, reach(alphas), marker="o", ms=4, lw=1, capsize=2, label=kind)
        axes[0].set(
            xlabel="n: draft tokens accepted before", ylabel="n-alpha", title="Acceptance in a chain", ylim=(0, 1)
        )
        axes[0].legend(fontsize=7)
    for place, shape in enumerate(next(iter(kinds.values()))["tau"]):
        taus = [row["tau"][shape] for row in kinds.values()]
        heights, values = [i + 0.2 * place for i in range(len(taus))], [tau[0] for tau in taus]
        axes[-1].errorbar(values, heights, xerr=reach(taus), marker="o", ms=5, ls="none", capsize=2, label=shape)
    axes[-1].set_yticks(range(len(kinds)), list(kinds))
    axes[-1].invert_yaxis()
    axes[-1].set(xlabel="tau", title=content["caption"].split(";")[1].strip())
    axes[-1].legend(fontsize=7)


def draw_curve(figure: Figure) -> None:
    """Acceptance of a chain against the number of tokens that its head has read."""
    points = [point for point in record("smollm2_curve")["curve"] if point["tokens"]]
    read = [point["tokens"] / 1e6 for point in points]
    left, right = figure.subplots(1, 2)
    for n in range(3):
        left.plot(read, [point["n-alpha"][n] for point in points], marker="o", ms=4, label=f"{n}-alpha")
    right.plot(read, [point["chain 4 tau"] for point in points], marker="o", ms=4, color=BLUE)
    left.set(ylim=(0, 1), title="Right drafts, after right ones")
    right.set(ylim=(1, None), title="tau of a chain of four")
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks([0.5, 1, 2, 5, 10, 20, 30], ["0.5", "1", "2", "5", "10", "20", "30"])
        axes.minorticks_off()
        axes.set(xlabel="million tokens read")


PICTURES: dict[str, tuple[Callable[[Figure], None], tuple[float, float]]] = {
    "speed": (draw_speed, (9, 3.8)),
    "tau": (draw_tau, (8, 3.9)),
    "pass_cost": (draw_pass_cost, (7, 3.8)),
    "long_context": (draw_long_context, (9, 3.6)),
    "smollm2_curve": (draw_curve, (9, 3.6)),
    **{name: (partial(draw_heads, name), (9, 3.6)) for name in ("ablation", "data_source")},
    **REPORT,
}


def picture(name: str) -> str:
    """An SVG by its name."""
    return svg(*PICTURES[name], STYLE)
