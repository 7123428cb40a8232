"""The report of an audit: report.json, report.html (one page, nothing else needed), and lines for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from eyas.files import write_text
from eyas_lab.audit.arms import ARMS

__all__ = ["greedy_lines", "html_page", "power_rows", "sampled_rows", "write_report"]

COLORS = {"passed": "#1a7f37", "failed": "#b3261e", "not enough data": "#9a6700"}
SAYS = {
    "passed": "Nothing was found that differs from plain decoding of the target, and there was enough data to find the biases below.",
    "failed": "This deployment does not give the target's own output.",
    "not enough data": "Nothing wrong was found, but a bias could have been missed: ask for more tokens.",
}
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:54rem;margin:2rem auto;padding:0 1rem;color:#1f2328}"
    "h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}"
    "td,th{border-bottom:1px solid #d0d7de;padding:.3rem .6rem;text-align:left;font-size:.9rem}"
    ".verdict{color:#fff;padding:.8rem 1rem;border-radius:6px}.bad{color:#b3261e;font-weight:600}"
)
SHOWN = 8  # flips and errors in a table


def greedy_lines(greedy: Mapping[str, Any]) -> list[str]:
    """Return the findings of greedy decoding, a sentence a line."""
    count = greedy["prompts"]
    lines = [
        f"The deployment equals itself on {greedy['equals_itself']} of {count} prompts, "
        f"plain decoding on {greedy['plain_equals_itself']}.",
        f"The deployment equals plain decoding on {greedy['equals_plain']} of {count} prompts.",
    ]
    beside = f"Beside other requests it equals itself alone on {greedy['together_equals_alone']} of {count}."
    lines.append(beside if greedy["together_at_once"] else "It cannot be asked several things at a time.")
    judged = f"Of {greedy['tokens']} tokens {len(greedy['flips'])} are flips at a near tie, {len(greedy['errors'])} are errors."
    lines.append(judged)
    if (rate := greedy["tokens_per_cycle"]) is not None:
        nothing = ": next to nothing was drafted, so this says little about drafts" if rate < 1.05 else ""
        lines.append(f"A cycle emits {rate:.2f} tokens{nothing}.")
    if (drafted := greedy.get("draft_tokens")) is not None:
        nothing = "" if drafted else ": this says nothing about drafts"
        lines.append(f"The server has drafted {drafted:,} tokens since it started{nothing}.")
    if (found := greedy["logprobs"]) is not None:
        lines.append(
            f"Log-probabilities of {found['tokens']} tokens differ from the referee's by {found['largest']:.1e} at most "
            f"({found['tolerance']:.1e} is rounding); {found['wrong']} are wrong."
        )
    return lines


def sampled_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each sampling: tokens, tokens that cannot be drawn, the smallest p-value and its test."""
    rows: list[tuple[str, ...]] = []
    for one in [*report["sampled"], {"sampling": "short answers"}]:
        tests = [test for test in report["tests"] if (test["name"] == "sequences") == ("tokens" not in one)]
        tests = [test for test in tests if test["name"] == "sequences" or test["sampling"] == one["sampling"]]
        if not tests:
            continue
        least = min(tests, key=lambda test: test["p_value"])
        failed = sum(test["rejected"] for test in tests)
        outside = len(one["outside"]) if "outside" in one else 0
        rows.append(
            (
                one["sampling"], f"{one.get('tokens', least['tokens']):,}", str(outside), f"{failed} of {len(tests)}",
                f"{least['p_value']:.1e} ({least['name']})",
            )
        )  # fmt: skip
    return rows


def power_rows(table: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each bias: with which probability each sampling finds it."""
    return [(what, *(f"{one[arm]:.2f}" for one in table)) for arm, what in ARMS.items()]


def html_page(report: Mapping[str, Any]) -> str:
    """Return the report as a page of HTML that needs no other file."""
    verdict, greedy, plan = report["verdict"], report["greedy"], report["plan"]
    parts = [
        f"<h1>Is this deployment lossless? {escape(report['deployment'])}</h1>",
        f"<p class=verdict style='background:{COLORS[verdict]}'><b>{verdict}</b>. {SAYS[verdict]}</p>",
        _list(report["reasons"]),
        f"<p>Compared with: {escape(report['plain'])}. The deployment states {report['dtype']}.</p>",
        "<h2>Greedy</h2>",
        _list(greedy_lines(greedy)),
        _departures("Errors", greedy["errors"]),
        _departures("Flips at near ties", greedy["flips"]),
        "<p>A margin is the distance of the referee's logits of its own token and the deployment's, given the same text. "
        "Up to the tolerance, which follows from the dtype, rounding explains it.</p>",
    ]
    if report["sampled"]:
        parts += [
            "<h2>Sampled</h2>",
            _table(("sampling", "tokens or answers", "impossible", "tests failed", "smallest p"), sampled_rows(report)),
            f"<p>A lossless deployment fails with probability {plan['error']:g} at most, over all tests together (Holm).</p>",
            "<h2>What would have been found</h2>",
            _table(("bias", *(one["sampling"] for one in report["power"])), power_rows(report["power"])),
            "<p>The probability that the audit finds a bias of this size, as computed before it ran, from plain answers. "
            "The first row is the probability of a false alarm.</p>",
        ]
    else:
        parts.append("<p>Sampled decoding was not audited.</p>")
    body = "\n".join(parts)
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>Audit: {verdict}</title>"
    return f"<!doctype html><html lang=en><head>{head}<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"


def _departures(title: str, found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return ""
    rows = [
        (one["mode"], str(one["prompt"]), str(one["place"]), str(one["token"]), str(one["best"]), f"{one['margin']:.2g}",
         f"{one['tolerance']:.2g}")
        for one in found[:SHOWN]
    ]  # fmt: skip
    more = f"<p>and {len(found) - SHOWN} more in report.json</p>" if len(found) > SHOWN else ""
    return (
        f"<h3>{title}</h3>"
        + _table(("asked", "prompt", "place", "token", "referee's", "margin", "tolerance"), rows)
        + more
    )


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    return f"<table>{row(heads, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write report.json and report.html."""
    write_text(folder / "report.json", json.dumps(report, indent=1) + "\n")
    write_text(folder / "report.html", html_page(report))
