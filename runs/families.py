"""Try eyas on a tiny random model of every causal language model of transformers; make docs/reference/families.md.

    python runs/families.py                     tries all types that were not tried yet, and makes the page
    python runs/families.py --again llama,opt   tries these types again
    python runs/families.py --page              only makes the page from the record

Each type is tried in its own process, with limits of time and memory, so a crash does not stop the other trials.
docs/results/families.raw.jsonl (beside --output) keeps what was found; the same command goes on there. With another
version of transformers, or of eyas, move it away.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import warnings
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from textwrap import shorten
from typing import Any

import _families
import torch
import transformers
from _common import Rows, parser, run, words, write
from _markdown import table
from rich.progress import MofNCompleteColumn, Progress

from eyas.files import write_text

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORD, PAGE = DOCS / "results" / "families.json", DOCS / "reference" / "families.md"
SECONDS, GIB = 240, 8  # limits of one trial: seconds of the processor, and of memory

SECTIONS = {
    "full": "Full attention",
    "sliding": "Sliding windows, or both",
    "latent": "Multi-head latent attention",
    "recurrent": "Recurrent or convolutional state",
    "chunked": "Chunked attention",
    "sparse": "Sparse attention",
    "alibi": "ALiBi",
    "encoder": "Encoders as decoders, and decoders of encoder-decoder models",
}
VERDICTS = {
    "trees": "trees",
    "chains": "chains only",
    "wrong": "**other tokens**",
    "refused": "refused",
    "fails": "**fails**",
    "not made": "not tried",
}
Record = dict[str, Any]


# --- the trials ----------------------------------------------------------------------------------------


def try_all(output: Path, only: set[str], again: set[str]) -> None:
    """Try every type that has no row yet, and write the record."""
    settings = {"transformers": transformers.__version__, "prompts": _families.PROMPTS, "new_tokens": _families.NEW}
    rows = Rows(output.with_suffix(".raw.jsonl"), settings)
    causal = _families.causal_types()
    texts = {name: _families.text_type(name) for name in sorted({*causal, *_families.multimodal_types()})}
    types = sorted(only or {texts[name] for name in causal})
    torch.set_num_threads(1)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), transient=True) as bar:
        task = bar.add_task("families", total=len(types))
        for model_type in types:
            bar.update(task, description=model_type)
            if (model_type,) not in rows or model_type in again:
                rows.add((model_type,), in_a_process(model_type))
            bar.advance(task)
    families = {row["key"][0]: {k: v for k, v in row.items() if k != "key"} for row in rows.of()}
    wrappers = {name: text for name, text in texts.items() if name != text and text in families}
    date = datetime.now(UTC).date().isoformat()
    record = {"date": date, "families": dict(sorted(families.items())), "text_models": wrappers}
    write(output, record, quiet=True)


def in_a_process(model_type: str) -> Record:
    """The result of `_families.trial` in a process that is forked for it, "fails" if it ends in any other way."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(model_type, there))
    process.start()
    there.close()
    try:
        result: Record = here.recv() if here.poll(4 * SECONDS) else failure(f"no end within {4 * SECONDS} s")
    except EOFError:
        process.join()
        how = "time" if process.exitcode == -9 else f"exit status {process.exitcode}"
        result = failure(f"its process ended without a result ({how})")
    process.kill()
    process.join()
    return result


def failure(why: str) -> Record:
    """The result of a type whose process gave none."""
    return {"attention": "full", "verdict": "fails", "why": why}


def _answer(model_type: str, there: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (GIB * 2**30, GIB * 2**30))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    there.send({"attention": _families.attention_of(model_type), **_families.trial(model_type)})
    there.close()


# --- the page ------------------------------------------------------------------------------------------

HEAD = """# Model families

This page has every model type of `AutoModelForCausalLM`, and the text models of multimodal types, in transformers
{transformers}. Each was tried as a tiny random model on {date} with torch {torch}.

    python runs/families.py

makes this page from [its record](../results/families.json).

- *trees*: plain decoding gives the tokens of transformers' greedy `generate`. So do prompt lookup, a random EAGLE-3 head,
  and branching trees of a drafter that knows the answers (accepted paths of several nodes, rows of different ages).
- *refused*: eyas says so in one line when it loads the model.
- *not tried*: shrinking the type's default configuration gave no tiny model; such a model may work.
- *kernels*: eyas' C++ kernels run it; other types run by their own forward.

Tiny random models show masks, positions, caches and states. They cannot show a real checkpoint's files, remote code or
size.

"""


def page(record: Record) -> str:
    """The Markdown page of a record."""
    families: Mapping[str, Record] = record["families"]
    text = HEAD.format(**record["machine"], date=record["date"])
    counts = Counter(row["verdict"] for row in families.values())
    parts = [f"{counts[v]} {word.strip('*')}" for v, word in VERDICTS.items() if counts[v]]
    text += f"{len(families)} types: {', '.join(parts)}.\n"
    for kind, title in SECTIONS.items():
        lines = [line(name, row) for name, row in families.items() if row["attention"] == kind]
        if lines:
            text += f"\n## {title}\n\n{table(('type', 'eyas', 'kernels', 'why'), lines)}\n"
    text += "\n## Multimodal types\n\nThe text model decides; eyas decodes the text that follows.\n\n"
    inner = ((f"`{a}`", f"`{b}`", VERDICTS[families[b]["verdict"]]) for a, b in record["text_models"].items())
    return text + table(("type", "its text model", "eyas"), inner) + "\n"


def line(name: str, row: Record) -> tuple[str, ...]:
    """A row of the page."""
    why = row.get("why", "").replace("|", "\\|")
    why = f"`{shorten(why, 200, placeholder=' ...')}`" if "Error: " in why else why.replace("<", "&lt;")
    return f"`{name}`", VERDICTS[row["verdict"]], "yes" if row.get("kernels") else "", why


def main(arguments: list[str] | None = None) -> None:
    args = parser(
        __doc__,
        output=(RECORD, "the record, JSON; the page lies beside it, but for the default's"),
        only=("", "types to try, separated by commas; the record then has only these and those tried before"),
        again=("", "types to try again"),
        page=(False, "try nothing"),
    ).parse_args(arguments)
    only, again = (set(words(text)) for text in (args.only, args.again))
    if not args.page:
        try_all(args.output, only, again)
    place = PAGE if args.output.resolve() == RECORD else args.output.with_suffix(".md")
    write_text(place, page(json.loads(args.output.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    run(main)
