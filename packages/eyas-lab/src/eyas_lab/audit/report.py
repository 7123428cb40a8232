"""The report of an audit: report.json, report.md, and lines for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.files import write_text
from eyas_lab.audit.arms import ARMS
from eyas_lab.markdown import table

__all__ = ["greedy_lines", "markdown", "power_rows", "sampled_rows", "write_report"]

SAYS = {
    "passed": "Nothing was found that differs from plain decoding of the target, and there was enough data to find the biases below.",
    "failed": "This deployment does not give the target's own output.",
    "not enough data": "Nothing wrong was found, but a bias could have been missed: ask for more tokens.",
}
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
        tokens, smallest = f"{one.get('tokens', least['tokens']):,}", f"{least['p_value']:.1e} ({least['name']})"
        rows.append((one["sampling"], tokens, str(outside), f"{failed} of {len(tests)}", smallest))
    return rows


def power_rows(table: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each bias: with which probability each sampling finds it."""
    return [(what, *(f"{one[arm]:.2f}" for one in table)) for arm, what in ARMS.items()]


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a page."""
    verdict, greedy, error = report["verdict"], report["greedy"], report["plan"]["error"]
    lines = [
        f"# Is this deployment lossless? {report['deployment']}",
        "",
        f"**{verdict}**. {SAYS[verdict]}",
        "",
        *(f"- {reason}" for reason in report["reasons"]),
        "",
        f"Compared with: {report['plain']}. The deployment states {report['dtype']}.",
        "",
        "## Greedy",
        "",
        *(f"- {line}" for line in greedy_lines(greedy)),
        "",
        *_departures("Errors", greedy["errors"]),
        *_departures("Flips at near ties", greedy["flips"]),
        "A margin is the referee's logit of its own token minus its logit of the deployment's token, after the same text. "
        "Up to the tolerance, which follows from the dtype, rounding explains it.",
        "",
    ]
    if not report["sampled"]:
        return "\n".join([*lines, "Sampled decoding was not audited.", ""])
    tests = ("sampling", "tokens or answers", "impossible", "tests failed", "smallest p")
    lines += ["## Sampled", "", *table(tests, sampled_rows(report)), ""]
    lines += [f"A lossless deployment fails with probability {error:g} at most, over all tests together (Holm).", ""]
    biases = ("bias", *(one["sampling"] for one in report["power"]))
    lines += ["## Errors that this audit would have found", "", *table(biases, power_rows(report["power"])), ""]
    lines += [
        "The probability that the audit finds a bias of this size, as computed before it ran, from plain answers. "
        "The first row is the probability of a false alarm.",
        "",
    ]
    return "\n".join(lines)


def _departures(title: str, found: Sequence[Mapping[str, Any]]) -> list[str]:
    if not found:
        return []
    heads = ("mode", "prompt", "place", "token", "best", "margin", "tolerance")
    rows = [[f"{one[name]:.2g}" if name in heads[5:] else str(one[name]) for name in heads] for one in found[:SHOWN]]
    more = ["", f"and {len(found) - SHOWN} more in report.json"] if len(found) > SHOWN else []
    return [f"### {title}", "", *table(heads, rows), *more, ""]


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write report.json and report.md."""
    write_text(folder / "report.json", json.dumps(report, indent=1) + "\n")
    write_text(folder / "report.md", markdown(report))
