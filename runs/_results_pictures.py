"""Pictures of docs/lab/results.md.

Other pictures of these pages show what was measured once; they are not drawn again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _pictures import svg
from _records import GENERATE, PLAIN, best_tree, record
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
    "pass_cost": (draw_pass_cost, (7, 3.8)),
    "smollm2_curve": (draw_curve, (9, 3.6)),
}


def picture(name: str) -> str:
    """An SVG by its name."""
    return svg(*PICTURES[name], STYLE)
