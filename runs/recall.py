"""Measure what memory over requests brings: ask servers with it and without it the same, in turns.

    python runs/recall.py --target smollm2-q4_1 --output docs/results/recall.json
    python runs/recall.py --output FILE.json --beside "llama.cpp=llama-server -m MODEL.gguf --port {port} -np 1" \\
        "llama.cpp, ngram-mod=llama-server -m MODEL.gguf --port {port} -np 1 --spec-type ngram-mod"

The work is made of this repository's own files, one request at a time:

    agent      turns of a conversation with tool results, two times with another file at the end
    edits      the same code, asked for again with one name changed, another one each time
    retrieval  questions about passages, two of three passages the same as before
    rollouts   several samples of the same prompts (temperature 1)
    unrelated  bundled prompts: nothing comes again, so memory must cost nothing

All servers of a kind of work run at the same time, started anew in each round so that their memory is empty, and each
request is asked of one after the other, another one first each time: what else the machine does falls on all of them. Figures
are tokens per second of whole answers, and for `with memory` their ratio to the same server without it: sums over
requests, 95 % intervals by bootstrap over requests. `later` leaves out the first third of the requests, from which
the memory is filled; `decoding` leaves out reading the prompt, as the servers' `timings` tell. Texts of eyas with and
without memory are compared.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _common import Rows, bundled_prompts, interval, machine, parser, rotated, run, write
from _servers import served
from rich.progress import track

from eyas_lab.bench.intervals import ratio, ratio_of_ratios

ROOT = Path(__file__).resolve().parents[1]
MEMORY = "eyas, memory"
OURS = {
    "eyas, no drafts": ("--method", "vanilla"),
    "eyas, suffix": ("--method", "suffix"),
    "eyas": (),
    MEMORY: ("--recall", "64"),
    "eyas, suffix, memory": ("--method", "suffix", "--recall", "64"),
}
WITHOUT = {MEMORY: "eyas", "eyas, suffix, memory": "eyas, suffix"}  # with memory -> the same without
Chat = list[dict[str, str]]


def passage(path: str, start: int, characters: int) -> str:
    """Return some text of a file of the repository, whole lines."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return text[start : start + characters].rpartition("\n")[0]


def agent() -> Iterator[Chat]:
    """Yield the requests of an agent that reads files."""
    files = ("runs/_servers.py", "runs/_pictures.py", "src/eyas/files.py", "runs/_markdown.py")
    for last in ("runs/_records.py", "src/eyas/locks.py"):
        messages: Chat = [{"role": "user", "content": "Read the files that I send, and list the functions of each."}]
        for file in (*files, last):
            messages.append({"role": "user", "content": f"File {file}:\n{passage(file, 0, 700)}\nList its functions."})
            yield list(messages)
            messages.append({"role": "assistant", "content": f"I have read {file}."})


def edits() -> Iterator[Chat]:
    """Yield requests to write the same code with one name changed."""
    code = passage("runs/_pictures.py", 0, 900)
    for name in ("STYLE", "draw", "figure", "svg", "size", "out", "style", "Figure", "line"):
        content = f"Repeat this code, but rename {name} to {name}_2. Answer with the code only.\n```python\n{code}\n```"
        yield [{"role": "user", "content": content}]


def retrieval() -> Iterator[Chat]:
    """Yield questions about three passages, two of which the question before was about too."""
    sources = (
        "docs/design/how_it_works.md",
        "docs/design/controller.md",
        "docs/guide/predict.md",
        "docs/guide/learn_online.md",
        "docs/guide/audit.md",
    )
    passages = [passage(source, 400, 800) for source in sources]
    for number in range(9):
        chosen = [passages[(number + place) % len(passages)] for place in range(3)]
        text = "\n\n".join(chosen)
        yield [{"role": "user", "content": f"{text}\n\nSummarise the first passage, and quote its main sentence."}]


def rollouts() -> Iterator[Chat]:
    """Yield the same questions several times."""
    questions = ("What is 17 + 26? Think step by step.", "Name five fruits and describe each in one sentence.")
    for _ in range(6):
        for question in questions:
            yield [{"role": "user", "content": question}]


def unrelated() -> Iterator[Chat]:
    """Yield the bundled prompts."""
    for prompt in bundled_prompts(12):
        yield [{"role": "user", "content": prompt.turns[0]}]


WORK = {"agent": agent, "edits": edits, "retrieval": retrieval, "rollouts": rollouts, "unrelated": unrelated}


def model_of(url: str) -> str:
    """Return the first model that a server lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as reply:
        name: str = json.load(reply)["data"][0]["id"]
        return name


def asked(url: str, model: str, messages: Chat, seed: int, sampled: bool, tokens: int) -> dict[str, Any]:
    """Return the tokens, seconds and text of one answer, and the seconds of it after the prompt where the server
    tells them."""
    body = {
        "messages": messages, "max_tokens": tokens, "temperature": float(sampled), "seed": seed, "model": model,
        "timings_per_token": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as reply:
        answer = json.load(reply)
    seconds = time.perf_counter() - began
    timings = answer.get("timings") or {}
    return {
        "seconds": seconds,
        "decoding": timings["predicted_ms"] / 1e3 if "predicted_ms" in timings else None,
        "tokens": answer["usage"]["completion_tokens"],
        "text": answer["choices"][0]["message"]["content"],
    }


def measure(
    work: str, commands: dict[str, list[str]], folder: Path, tokens: int, turn: int
) -> dict[str, list[dict[str, Any]]]:
    """Return each server's answers to all requests of a kind of work."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    with ExitStack() as stack:
        servers = {}
        for number, (name, command) in enumerate(commands.items()):
            url, _ = stack.enter_context(served(command, folder / f"server{number}.log"))
            servers[name] = url, model_of(url)
            # what is made ready at the first request
            asked(*servers[name], [{"role": "user", "content": "Hello"}], 0, False, 8)
        for n, chat in enumerate(WORK[work]()):
            for name in rotated(list(servers), n + turn):
                answers[name].append(asked(*servers[name], chat, 1000 * turn + n, work == "rollouts", tokens))
    return answers


def figures(rounds: list[dict[str, Any]], without: dict[str, str]) -> dict[str, Any]:
    """Return the table of one kind of work from the answers of its rounds."""

    def column(name: str, key: str, skip: int) -> list[float]:
        """Sums over the rounds, request by request."""
        by_request = list(zip(*(each[name] for each in rounds), strict=True))[skip:]
        return [sum(float(answer[key]) for answer in answers) for answers in by_request]

    table = {}
    for name in rounds[0]:
        first = rounds[0][name]
        line: dict[str, Any] = {
            "tokens_per_second": interval(ratio, column(name, "tokens", 0), column(name, "seconds", 0))
        }
        if name in without:
            base = without[name]
            for label, skip, key in (
                ("over_without", 0, "seconds"), ("later", len(first) // 3, "seconds"), ("decoding", 0, "decoding")
            ):  # fmt: skip
                if first[0][key] is not None:
                    both = [column(n, k, skip) for n in (name, base) for k in ("tokens", key)]
                    line[label] = interval(ratio_of_ratios, *both)
            texts = [[answer["text"] for each in rounds for answer in each[n]] for n in (name, base)]
            line["equal"] = sum(a == b for a, b in zip(*texts, strict=True)), len(texts[0])
        table[name] = line
    return table


def main() -> None:
    """Measure and write the record."""
    made = parser(
        __doc__, target=("smollm2-q4_1", "the target"), work=(list(WORK), "kinds of work"),
        options=("", "more options of `eyas serve`, such as '--weights int8 --activations int16'"),
        rounds=(2, "rounds"), max_new_tokens=(96, "of an answer"),
    )  # fmt: skip
    made.add_argument("--ours", nargs="*", default=list(OURS), metavar="NAME", help="of eyas' own servers")
    made.add_argument(
        "--beside", nargs="*", default=[], metavar="NAME=COMMAND",
        help="other servers; of two in a row the second has memory and is compared with the first",
    )  # fmt: skip
    args = made.parse_args()
    before = machine()
    serve = [sys.executable, "-m", "eyas", "serve", "--target", args.target, "--port", "{port}", "--rows", "1"]
    commands = {
        name: [*serve, *shlex.split(args.options), *options] for name, options in OURS.items() if name in args.ours
    }
    others = {name: shlex.split(command) for name, _, command in (text.partition("=") for text in args.beside)}
    commands |= others
    without = {
        **{name: WITHOUT[name] for name in WITHOUT if name in commands},
        **dict(zip(list(others)[1::2], list(others)[::2], strict=False)),
    }
    settings = {"target": args.target, "options": args.options, "tokens": args.max_new_tokens}
    folder = Path("out") / args.output.stem
    rows = Rows(folder / "answers.jsonl", settings)
    jobs = [(work, turn) for turn in range(args.rounds) for work in args.work]
    for work, turn in track(jobs, "rounds"):
        if (work, turn) not in rows:
            rows.add((work, turn), {"answers": measure(work, commands, folder, args.max_new_tokens, turn)})
    table = {work: figures([row["answers"] for row in rows.of(work)], without) for work in args.work}
    write(args.output, {"settings": {**settings, "rounds": args.rounds}, "work": table}, before)


if __name__ == "__main__":
    run(main)
