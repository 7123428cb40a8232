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

Every contestant's server is started anew for each kind of work and each round, so that its memory is empty. Figures
are tokens per second of whole answers, and for `with memory` their ratio to the same server without it: sums over
requests, 95 % intervals by bootstrap over requests. `later` leaves out the first third of the requests, from which
the memory is filled. Texts of eyas with and without memory are compared.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _common import Rows, bundled_prompts, interval, machine, parser, rotated, run, write
from _servers import served
from rich.progress import track

from eyas.metrics import ratio, ratio_of_ratios

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
    sources = ("docs/how_it_works.md", "docs/controller.md", "docs/predict.md", "docs/adapt.md", "docs/audit.md")
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
    """Return the tokens, seconds and text of one answer."""
    body = {"messages": messages, "max_tokens": tokens, "temperature": float(sampled), "seed": seed, "model": model}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as reply:
        answer = json.load(reply)
    return {
        "seconds": time.perf_counter() - began,
        "tokens": answer["usage"]["completion_tokens"],
        "text": answer["choices"][0]["message"]["content"],
    }


def measure(work: str, command: Sequence[str], log: Path, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return the answers of one server to all requests of a kind of work."""
    requests = list(WORK[work]())
    with served(command, log) as (url, _):
        model = model_of(url)
        asked(
            url, model, [{"role": "user", "content": "Hello"}], 0, False, 8
        )  # what is made ready at the first request
        return [asked(url, model, chat, seed + n, work == "rollouts", tokens) for n, chat in enumerate(requests)]


def figures(rows: Rows, work: str, names: Sequence[str], without: dict[str, str], rounds: int) -> dict[str, Any]:
    """Return the table of one kind of work."""
    answers = {name: [rows.of(work, name, turn)[0]["answers"] for turn in range(rounds)] for name in names}

    def column(name: str, key: str, skip: int) -> list[float]:
        """Sums over the rounds, request by request."""
        return [sum(float(a[key]) for a in each) for each in list(zip(*answers[name], strict=True))[skip:]]

    table = {}
    for name in names:
        third = len(answers[name][0]) // 3
        line: dict[str, Any] = {
            "tokens_per_second": interval(ratio, column(name, "tokens", 0), column(name, "seconds", 0))
        }
        if name in without:
            base = without[name]
            for label, skip in (("over_without", 0), ("later", third)):
                both = [column(n, key, skip) for n in (name, base) for key in ("tokens", "seconds")]
                line[label] = interval(ratio_of_ratios, *both)
            texts = [[a["text"] for each in answers[n] for a in each] for n in (name, base)]
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
    made.add_argument(
        "--beside", nargs="*", default=[], metavar="NAME=COMMAND",
        help="other servers; of two in a row the second has memory and is compared with the first",
    )  # fmt: skip
    args = made.parse_args()
    before = machine()
    serve = [sys.executable, "-m", "eyas", "serve", "--target", args.target, "--port", "{port}", "--rows", "1"]
    commands = {name: [*serve, *shlex.split(args.options), *options] for name, options in OURS.items()}
    others = {name: shlex.split(command) for name, _, command in (text.partition("=") for text in args.beside)}
    commands |= others
    without = {**WITHOUT, **dict(zip(list(others)[1::2], list(others)[::2], strict=False))}
    settings = {"target": args.target, "options": args.options, "tokens": args.max_new_tokens}
    folder = Path("out") / args.output.stem
    rows = Rows(folder / "answers.jsonl", settings)
    jobs = [
        (work, name, turn)
        for turn in range(args.rounds)
        for work in args.work
        for name in rotated(list(commands), turn)
    ]
    for work, name, turn in track(jobs, "servers"):
        if (work, name, turn) not in rows:
            log = folder / "server.log"
            rows.add(
                (work, name, turn),
                {"answers": measure(work, commands[name], log, args.max_new_tokens, 1000 * turn)},
            )
    table = {work: figures(rows, work, list(commands), without, args.rounds) for work in args.work}
    write(args.output, {"settings": {**settings, "rounds": args.rounds}, "work": table}, before)


if __name__ == "__main__":
    run(main)
