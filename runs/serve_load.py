"""Servers under load: tokens per second, time to the first token and between tokens, with drafts off, on and auto.

    python runs/serve_load.py --output docs/results/serve_load.json                              the embedded model
    python runs/serve_load.py --target MODEL --draft HEAD --output FILE.json                     another
        --beside "transformers serve=.venv-clients/bin/transformers serve {model} --port {port} --device cpu --dtype float32"
        --beside "llama.cpp=llama-server -m model.gguf --port {port} -np 16 -c 16384 -t 2"       further servers, each as NAME=COMMAND
        --only off,auto                            contestants whose names hold one of these words

All servers run all the time and are asked one after the other, another one first in every round, after all are idle. The
clients are one process (runs/_serve_client.py) on the same cores. Prompts are the bundled ones of one turn, rendered by
the chat template and sent to /v1/completions; greedy. After --warm seconds, --seconds are measured; tokens are counted by
the tokenizer from the text that came, shared out over its characters. Each of --clients sends its next request when it
has its answer; `LLM.stream` answers without a server.
"""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from _common import Rows, bundled_prompts, interval, machine, parser, rotated, run, words, write
from _servers import served
from rich.progress import track

import eyas
from eyas.errors import InputError
from eyas.text import write_chat
from eyas_lab.bench.intervals import ratio, ratio_of_ratios

CLIENT = Path(__file__).with_name("_serve_client.py")
IDLE_SECONDS, IDLE_SHARE = 0.5, 0.15  # servers are idle if all of them took less than this share of a core for so long
IN_PROCESS = "LLM.stream, no server"
Figures = dict[str, Any]


@dataclass(frozen=True)
class Contestant:
    """One way to be served.

    Attributes:
        command: of the server; {port} and {model} are filled in.
        fields: of the requests, beside the prompt.
    """

    name: str
    command: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def contestants(args: Any) -> list[Contestant]:
    """eyas in its modes, and the servers beside it."""
    ours = [sys.executable, *f"-m eyas serve --port {{port}} --name {{model}} --rows {args.rows}".split()]
    ours += ["--target", str(args.target)] if args.target else []
    ours += ["--draft", args.draft] if args.draft else []
    command = shlex.join(ours).replace("'", "") + " " + args.options
    fixed = " --tree.nodes {} --tree.depth {} --tree.branch {}".format(*args.tree.split("/"))
    made = [
        Contestant("eyas, drafts off", command, {"drafting": "off"}),
        Contestant("eyas, drafts auto", command),
        Contestant(f"eyas, drafts on ({args.tree})", command + fixed),
    ]
    for text in args.beside:
        name, sign, command = text.partition("=")
        if not sign or "{port}" not in command:
            raise InputError(f"--beside takes NAME=COMMAND with {{port}} in the command, not {text!r}")
        made.append(Contestant(name, command))
    return made


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Seconds of processor time that these processes have used so far."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def settle(servers: Sequence[psutil.Process], seconds: float = 90) -> None:
    """Wait until no server computes: some go on with answers whose clients have left."""
    end, before = time.monotonic() + seconds, cpu_seconds(servers)
    while time.monotonic() < end:
        time.sleep(IDLE_SECONDS)
        if (now := cpu_seconds(servers)) - before < IDLE_SHARE * IDLE_SECONDS:
            return
        before = now


class Meter:
    """Sends orders to the clients' process and reads what came back; the prompts are rendered."""

    def __init__(self, llm: eyas.LLM, prompts: Sequence[str], model: Path, args: Any) -> None:
        self.llm, self.prompts, self.model, self.args = llm, prompts, model, args

    def measure(self, contestant: Contestant, url: str, clients: int) -> Figures:
        """Figures of one contestant with so many clients."""
        common = {"model": str(self.model), "temperature": 0, "stream": True, "max_tokens": self.args.max_new_tokens}
        common |= contestant.fields
        bodies = [{"prompt": prompt, **common} for prompt in self.prompts]
        seconds = self.args.warm + self.args.seconds
        order = {"url": f"{url}/v1/completions", "bodies": bodies, "seconds": seconds, "clients": clients}
        servers = psutil.Process().children(recursive=True)
        settle(servers)
        before = cpu_seconds(servers)
        done = subprocess.run(
            [sys.executable, CLIENT], input=json.dumps(order), capture_output=True, text=True, timeout=seconds + 120
        )
        if done.returncode:
            raise InputError(f"the clients have failed: {done.stderr.strip().splitlines()[-1]}")
        exchanges = json.loads(done.stdout)
        used, tokens = cpu_seconds(servers) - before, sum(self.tokens(one["text"]) for one in exchanges)
        return {**self.figures(exchanges, seconds), "server_cpu_seconds": round(used, 3), "tokens": tokens}

    def tokens(self, text: str) -> int:
        """Tokens of a text."""
        assert self.llm.tokenizer is not None
        return len(self.llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def figures(self, exchanges: Sequence[Mapping[str, Any]], end: float) -> Figures:
        """Figures of the time behind the warm-up."""
        begin, tokens, texts = self.args.warm, 0.0, {}
        first, gaps = list[float](), list[float]()
        for one in exchanges:
            events = one["events"]
            inside = sum(n for at, n in events if begin <= at <= end)
            tokens += self.tokens(one["text"]) * inside / max(1, len(one["text"]))
            gaps += [b - a for (a, _), (b, _) in itertools.pairwise(events) if a >= begin]
            if events and one["began"] >= begin:
                first.append(events[0][0] - one["began"])
            if one["whole"] and begin <= one["end"] <= end and events:
                texts[one["prompt"]] = one["text"]
        return {
            "tokens_per_second": round(tokens / (end - begin), 2),
            "failed": sum(one["whole"] and one["status"] != 200 for one in exchanges),
            "first_token_ms": percentiles(first),
            "between_chunks_ms": percentiles(gaps),
            "texts": texts,
        }

    def in_process(self) -> Figures:
        """The same prompts by `LLM.stream`, one after the other."""
        exchanges, start = list[dict[str, Any]](), time.perf_counter()
        end = self.args.warm + self.args.seconds
        while (began := time.perf_counter() - start) < end:
            number = len(exchanges) % len(self.prompts)
            events, text = list[tuple[float, int]](), ""
            for piece in self.llm.stream(self.prompts[number], raw=True, max_new_tokens=self.args.max_new_tokens):
                if piece.text:
                    text += piece.text
                    events.append((time.perf_counter() - start, len(piece.text)))
            answer = {"prompt": number, "text": text, "began": began, "events": events}
            exchanges.append({**answer, "end": time.perf_counter() - start, "status": 200, "whole": True})
        return self.figures(exchanges, end)


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median and 99th percentile in milliseconds."""
    return {f"p{q}": round(1000 * float(np.percentile(seconds, q)), 3) for q in (50, 99)} if seconds else None


def rendered(llm: eyas.LLM, text: str) -> str:
    """A user's turn by the chat template, as text."""
    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        raise InputError("this measurement needs a target with a tokenizer and its chat template")
    return write_chat(llm.tokenizer, [{"role": "user", "content": text}])[0]


def saved(llm: eyas.LLM, args: Any, folder: Path) -> Path:
    """The target as a folder of transformers, for all servers."""
    if args.target:
        return Path(args.target)
    model = folder / "model"
    if not (model / "config.json").exists():
        llm.target.model.save_pretrained(model)
        llm.tokenizer.save_pretrained(model)
    return model


def main() -> None:
    limits = {"rows": 16, "rounds": 3, "seconds": 8.0, "warm": 2.0, "max_new_tokens": 64}
    shown = {"tree": "4/3/1", "options": "", "only": "", "clients": [1, 4, 16, 64]}
    made = parser(__doc__, target=None, draft=None, **limits, **shown)
    made.add_argument("--beside", action="append", default=[], metavar="NAME=COMMAND")
    args = made.parse_args()
    before, folder = machine(), Path("out") / args.output.stem
    folder.mkdir(parents=True, exist_ok=True)
    llm = eyas.load(args.target, draft=args.draft)
    model = saved(llm, args, folder)
    prompts = [rendered(llm, prompt.turns[0]) for prompt in bundled_prompts()]
    entered = [one for one in contestants(args) if not args.only or any(word in one.name for word in words(args.only))]
    settings = {k: str(v) for k, v in vars(args).items() if k not in ("output", "rounds", "clients")}
    rows = Rows(args.output.with_suffix(".raw.jsonl"), settings)
    with ExitStack() as stack:
        urls = dict[str, str]()
        for number, one in enumerate(entered):
            if one.command not in urls:
                command = [part.replace("{model}", str(model)) for part in shlex.split(one.command)]
                urls[one.command], _ = stack.enter_context(served(command, folder / f"server-{number}.log"))
        meter = Meter(llm, prompts, model, args)
        for number in track(range(args.rounds), "rounds"):
            if 1 in args.clients and (1, IN_PROCESS, number) not in rows:
                rows.add((1, IN_PROCESS, number), meter.in_process())
            for clients in args.clients:
                for one in rotated(entered, number):
                    if (key := (clients, one.name, number)) not in rows:
                        rows.add(key, meter.measure(one, urls[one.command], clients))
    settings = {k: str(v) for k, v in vars(args).items() if k != "output"}
    write(args.output, {"settings": settings, "closed": summary(rows)}, before)


def summary(rows: Rows) -> dict[str, Any]:
    """By number of clients and contestant: medians over the rounds."""
    table: dict[str, dict[str, list[Figures]]] = {}
    plain: dict[int, str] = {}
    for row in rows.of():
        clients, name, _ = row["key"]
        table.setdefault(str(clients), {}).setdefault(name, []).append(row)
        plain |= row["texts"] if name == "eyas, drafts off" else {}
    return {
        clients: {name: pooled(rounds, plain) for name, rounds in by.items()} | {"auto over off": auto_over_off(by)}
        for clients, by in table.items()
    }


def auto_over_off(by: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figures:
    """Drafts auto over drafts off with 95 % intervals over the rounds: by the clock, and by the servers' processor
    time, which other processes disturb less."""
    auto, off = ({row["key"][2]: row for row in by.get(f"eyas, drafts {mode}", [])} for mode in ("auto", "off"))
    rounds = sorted(auto.keys() & off.keys())
    if len(rounds) < 2:
        return {}
    sides = [[rows[number] for number in rounds] for rows in (auto, off)]

    def column(side: Sequence[Mapping[str, Any]], name: str) -> list[float]:
        return [row[name] for row in side]

    shares: Figures = {"tokens_per_second": interval(ratio, *(column(side, "tokens_per_second") for side in sides))}
    if all(row.get("tokens") and row["server_cpu_seconds"] for side in sides for row in side):
        columns = [column(side, name) for side in sides for name in ("tokens", "server_cpu_seconds")]
        shares["tokens_per_cpu_second"] = interval(ratio_of_ratios, *columns)
    return shares


def pooled(rounds: Sequence[Mapping[str, Any]], plain: Mapping[int, str]) -> Figures:
    """Rounds as one."""
    speeds = [row["tokens_per_second"] for row in rounds]
    equal = [text == plain[prompt] for row in rounds for prompt, text in row["texts"].items() if prompt in plain]

    def middle(name: str) -> dict[str, float] | None:
        each = [row[name] for row in rounds if row[name]]
        return {q: round(median(times[q] for times in each), 2) for q in ("p50", "p99")} if each else None

    return {
        "tokens_per_second": round(median(speeds), 1),
        "rounds": speeds,
        **{name: middle(name) for name in ("first_token_ms", "between_chunks_ms")},
        "failed": sum(row["failed"] for row in rounds),
        "texts_equal_to_drafts_off": [sum(equal), len(equal)],
    }


if __name__ == "__main__":
    run(main)
