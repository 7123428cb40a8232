"""Drafting must never make it slower: the default over drafts off (`--method vanilla`), in whole commands.

    python runs/never_slower.py --output docs/results/never_slower.json                    the embedded model
    python runs/never_slower.py --target embedded MODEL --output FILE.json                 two models
        --rows 1 4 16 --commands generate regenerate python server --rounds 3

The same prompts are answered by `eyas generate --input`, `eyas regenerate`, `LLM.generate` in a process, and a server
with as many clients as rows. Both sides take turns, after a round that is not counted: costs that are measured once are on
disk then. Seconds of a command include loading the model; those of Python and of the server do not.

Figures are seconds with drafts off over seconds with the default: the median of the rounds, and the lowest and the
highest; then those of the processor's time, which other processes disturb less.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
from _common import bundled_prompts, machine, parser, rotated, run, write
from _markdown import cell, table
from _servers import served
from rich.progress import track

import eyas
from eyas.files import write_text

EMBEDDED = "embedded"
SIDES = {"default": (), "drafts off": ("--method", "vanilla")}
HEADS = ("model", "command", "rows", "default over drafts off", "of the processor's time", "texts")
COMMANDS = ("generate", "regenerate", "python", "server")


class Took(NamedTuple):
    """Seconds of one side in one round, and the texts that came."""

    wall: float
    processor: float
    texts: list[str]


Answer = Callable[[], Took]


def eyas_command(*words: object) -> list[str]:
    return [sys.executable, "-m", "eyas", *map(str, words)]


def timed(work: Callable[[], list[str]], processor: Callable[[], float]) -> Took:
    began, before = time.perf_counter(), processor()
    texts = work()
    return Took(time.perf_counter() - began, processor() - before, texts)


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Job(NamedTuple):
    """What is answered, and by which model."""

    target: str
    prompts: Sequence[str]
    rows: int
    new_tokens: int

    @property
    def model(self) -> tuple[str, ...]:
        return () if self.target == EMBEDDED else ("--target", self.target)

    def of_files(self, folder: Path, command: str, side: str) -> Answer:
        """A command that reads a file and writes one."""
        prompts, output = folder / "prompts.jsonl", folder / "output.jsonl"
        write_text(prompts, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in self.prompts))
        source, rows = ("--input", "--batch-size") if command == "generate" else ("--data", "--rows")
        files = (source, prompts, "--output", output, rows, self.rows)
        limits = ("--max-new-tokens", self.new_tokens, "--temperature", 0)
        words = eyas_command(command, *files, *self.model, *SIDES[side], *limits)

        def work() -> list[str]:
            output.unlink(missing_ok=True)
            subprocess.run(words, check=True, capture_output=True)
            lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
            return sorted(line["text"] if command == "generate" else line["messages"][-1]["content"] for line in lines)

        return lambda: timed(work, children_seconds)

    def in_process(self, side: str) -> Answer:
        """`LLM.generate`, with a model that is loaded once."""
        target = None if self.target == EMBEDDED else self.target
        llm = eyas.load(target, method="vanilla") if SIDES[side] else eyas.load(target)

        def work() -> list[str]:
            results = llm.generate(list(self.prompts), batch_size=self.rows, max_new_tokens=self.new_tokens)
            return [result.text for result in results]

        return lambda: timed(work, time.process_time)

    def of_server(self, url: str, process: int) -> Answer:
        """A server that as many clients as there are rows ask."""
        server = psutil.Process(process)

        def ask(prompt: str) -> str:
            message = {"role": "user", "content": prompt}
            body = {"messages": [message], "max_tokens": self.new_tokens, "temperature": 0}
            place, head = f"{url}/v1/chat/completions", {"content-type": "application/json"}
            with urllib.request.urlopen(urllib.request.Request(place, json.dumps(body).encode(), head)) as reply:
                return str(json.load(reply)["choices"][0]["message"]["content"])

        def work() -> list[str]:
            with ThreadPoolExecutor(self.rows) as clients:
                return list(clients.map(ask, self.prompts))

        return lambda: timed(work, lambda: sum(server.cpu_times()[:2]))


@contextmanager
def sides_of(job: Job, command: str) -> Iterator[dict[str, Answer]]:
    """Both sides, ready."""
    with ExitStack() as stack:
        folder, answers = Path(stack.enter_context(tempfile.TemporaryDirectory())), dict[str, Answer]()
        for side, options in SIDES.items():
            if command == "python":
                answers[side] = job.in_process(side)
            elif command == "server":
                words = eyas_command("serve", *job.model, *options, "--port", "{port}", "--rows", job.rows)
                url, process = stack.enter_context(served(words, folder / f"{side}.log"))
                answers[side] = job.of_server(url, process.pid)
            else:
                answers[side] = job.of_files(folder, command, side)
        yield answers


def measure(job: Job, command: str, rounds: int) -> dict[str, Any]:
    """A line of the table."""
    took: dict[str, list[Took]] = {side: [] for side in SIDES}
    with sides_of(job, command) as answers:
        for turn in range(rounds + 1):
            for side in rotated(list(SIDES), turn):
                took[side].append(answers[side]())
    default, off = (took[side] for side in SIDES)
    equal = all(a.texts == b.texts for a, b in zip(default, off, strict=True))

    def over(figure: Callable[[Took], float]) -> list[float]:
        ratios = [figure(b) / figure(a) for a, b in list(zip(default, off, strict=True))[1:]]
        return [round(x, 3) for x in (median(ratios), min(ratios), max(ratios))]

    return {
        "target": job.target,
        "command": command,
        "rows": job.rows,
        "over_off": over(lambda t: t.wall),
        "over_off_processor": over(lambda t: t.processor),
        "equal": equal,
        "seconds": {side: [round(t.wall, 3) for t in each] for side, each in took.items()},
    }


def markdown(line: dict[str, Any]) -> list[str]:
    """A row of the table that is printed."""
    figures = (cell(line[name], 3) for name in ("over_off", "over_off_processor"))
    texts = "equal" if line["equal"] else "DIFFER"
    return [Path(line["target"]).name, line["command"], str(line["rows"]), *figures, texts]


def main() -> None:
    args = parser(
        __doc__, target=[EMBEDDED], rows=[1, 4, 16], commands=list(COMMANDS), rounds=3, prompts=16, max_new_tokens=48
    ).parse_args()
    before, lines = machine(), list[dict[str, Any]]()
    prompts = [str(prompt.turns[0]) for prompt in bundled_prompts(args.prompts)]
    jobs = [Job(target, prompts, rows, args.max_new_tokens) for target in args.target for rows in args.rows]
    settings = {name: os.environ.get(name) for name in ("EYAS_KERNELS_ISA", "OMP_NUM_THREADS")}
    for job, command in track([(job, command) for job in jobs for command in args.commands], transient=True):
        lines.append(measure(job, command, args.rounds))
        write(args.output, {**settings, "lines": lines}, before, quiet=True)
    print(table(HEADS, map(markdown, lines)))


if __name__ == "__main__":
    run(main)
