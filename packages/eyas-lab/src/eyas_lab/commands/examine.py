"""`eyas examine`: does a draft head fit its target, and which setting of it is wrong?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from eyas.cli.tools import (
    AS_JSON,
    DraftOptions,
    ExactTarget,
    load,
    need_tokenizer,
    option_group,
    print_table,
    progress_bar,
)
from eyas_lab.prompt_lines import prompt_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eyas.api import LLM
    from eyas_lab.examine.verdict import Examination, Figures

GROUP = "Information"
PROMPTS, ROWS = 20, 8  # prompts; as many are answered in one pass
SHOWN = 5  # variants of the published head
EXAMPLES = """
eyas examine HEAD --target MODEL  # a folder, a hub id or a file in GGUF format
eyas examine HEAD --target MODEL --prompts mine.txt --json  # your own prompts, one per line
eyas examine HEAD --target MODEL --metrics http://127.0.0.1:8000/metrics  # compare with the counters of a server
"""
NOTES = (
    "Exit status: 0 if the head fits unchanged, 1 if it needs changes or does not fit, 2 for bad input.",
    "eyas doctor checks the installation; eyas examine checks a head.",
)


@option_group
class ExamineOptions:
    """The text that a head is examined on."""

    prompts: Annotated[str | None, "Prompt", "FILE"] = None
    """Your own prompts, one per line. Default: 20 prompts that come with eyas."""
    max_new_tokens: Annotated[PositiveInt, "Sampling", "N"] = 48
    """Longest answer in tokens."""
    metrics: Annotated[str | None, "Server", "URL"] = None
    """Compare with the counters of a server that drafts with this head: vLLM or eyas."""
    as_json: AS_JSON = False


def command(
    head: Annotated[str, "Model", Parameter(help="The draft head: a folder, a hub id or a file in GGUF format.")],
    /,
    *,
    job: ExamineOptions,
    model: ExactTarget,
) -> int:
    """Check whether a draft head fits its target. If it does not, find the setting that is wrong."""
    from eyas.checkpoints.tools import read_published
    from eyas_lab.examine.served import served_alphas

    prompts = _prompts(job.prompts)
    served = None if job.metrics is None else served_alphas(job.metrics)
    read_published(head)  # a folder without a head is refused before the target is loaded
    llm = load(model, DraftOptions(method="vanilla"), {})
    found = _examine(head, llm, prompts, job.max_new_tokens)
    if job.as_json:
        told = {"head": head, "target": llm.target.name, "verdict": found.verdict, **asdict(found), "served": served}
        print(json.dumps(told))
    else:
        _print(found, served)
    return 0 if found.verdict == "fits" else 1


def _prompts(path: str | None) -> Sequence[str]:
    if path is not None:
        return prompt_lines(path, least=2)
    from eyas_lab.bench import tasks

    return [prompt.turns[0] for prompt in tasks.load("bundled", PROMPTS)]


def _examine(head: str, llm: LLM, prompts: Sequence[str], tokens: int) -> Examination:
    from eyas.core.target import ModelRunner
    from eyas_lab.examine.acceptance import KeptAnswer, keep
    from eyas_lab.examine.verdict import examine

    need_tokenizer(llm)
    target = llm.target.run_with(ModelRunner())
    asked = [ids for prompt in prompts if len(ids := llm.ids(prompt)) + tokens <= target.context]
    answers = dict[int, KeptAnswer]()
    with progress_bar("answers of the target") as bar:
        for number, result in llm.generate_each(asked, ROWS, max_new_tokens=tokens):
            answers[number] = keep(target, asked[number], result.token_ids)
            bar.show(len(answers), "", len(asked))
    kept = [answers[number] for number in sorted(answers)]
    with progress_bar("variants") as bar:
        return examine(head, target, kept, lambda done, total, name: bar.show(done, name, total))


def _print(found: Examination, served: dict[str, float] | None) -> None:
    rows = []
    if found.published is not None:
        rows.append(("as published", *_cells(found.published)))
    rows += [(step.name, *_cells(step.figures)) for step in found.steps]
    best = len(rows) - 1
    for name, alphas in (("in its training", found.record), ("on the server", served)):
        if alphas is not None:
            rows.append((name, "", "", *_alphas(alphas)))
    heads = ("setting", "tokens", "tau", *(f"{n}-alpha" for n in range(5)))
    print_table(heads, rows, f"{found.method}: drafts that the target accepts", best)
    if found.tried:
        shown = ", ".join(f"{name} ({tokens:.2f})" for name, tokens in found.tried[:SHOWN])
        print(f"the best of {len(found.tried)} variants, on a few answers: {shown}")
    if found.refusal:
        print(f"refused as published: {found.refusal}")
    for step in found.steps:
        print(f"{step.name}:")
        print(f"  the file says {step.says}; write {step.write}" if step.says else f"  {step.write}")
    for doubt in (*found.doubts, *_advice(found, served)):
        print(doubt)
    print(f"verdict: {found.verdict}")


def _advice(found: Examination, served: dict[str, float] | None) -> Iterator[str]:
    """Yield the lines that follow from the verdict and from the server's counters."""
    from eyas.adaptive.memory import MIN_SHARE

    if found.verdict == "does not fit":
        yield "no variant fits either: the head was made for another model, another draft vocabulary or other text"
    elif served is not None and found.best is not None:
        here, there = (alphas.get("0-alpha", 0.0) for alphas in (found.best.alphas, served))
        if there < MIN_SHARE * here:
            yield f"the server accepts {there:.0%} of the first drafts, this command {here:.0%}: the server reads the head in another way"


def _cells(figures: Figures) -> tuple[str, ...]:
    return f"{figures.tokens:.2f}", f"{figures.tau:.2f}", *_alphas(figures.alphas)


def _alphas(alphas: dict[str, Any]) -> list[str]:
    return [f"{alphas[name]:.2f}" if name in alphas else "-" for name in (f"{n}-alpha" for n in range(5))]
