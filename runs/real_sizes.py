"""eyas next to llama.cpp on the same GGUF files: passes, prompts, the time to the first token, memory.

    python runs/real_sizes.py --files F.gguf G.gguf --llama-cpp BUILD --rounds 3 --output docs/results/real_sizes.json

runs/sized_gguf.py writes files with random weights at the shapes of known models. BUILD is llama.cpp's build folder with
llama-bench, llama-batched-bench and llama-completion; --ik-llama-cpp names ik_llama.cpp's, with llama-cli. ik_llama.cpp
orders the weights for the processor when it loads them (-rtr). Engines take turns in processes of their own. A pass over n
tokens gives the logits of all of them after a prompt of 128 tokens: llama-batched-bench decodes n sequences with a common
prompt, eyas a chain of n. The speed of drafts is arithmetic from these passes: a token of a chain is accepted with
probability 0.7 if its parent is, and a draft token costs the share DRAFT of a plain pass in every engine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _common import machine, parser, run, write

import eyas
from eyas.core.tree import Tree
from eyas.errors import InputError

PASSES = (1, 4, 8)
CONTEXT, PROMPT = 128, 512
REPEATS = 12
ACCEPTED = 0.7
DRAFT = 0.04  # a head of one layer and 32,000 draft tokens, next to a model of 8B
Figures = dict[str, Any]


def main() -> None:
    made = parser(
        __doc__,
        files=[Path("model.gguf")],
        llama_cpp=(Path("build"), "build folder of llama.cpp"),
        ik_llama_cpp=("", "build folder of ik_llama.cpp"),
        threads=2,
        rounds=3,
        activations=["exact", "int8"],
    )
    if sys.argv[1:2] == ["passes"]:
        return print(json.dumps(_eyas_passes(*sys.argv[2:4])))
    args = made.parse_args()
    others = {"llama.cpp": Llama(args.llama_cpp / "bin", "llama-completion", ("-no-cnv",))}
    if args.ik_llama_cpp:
        others["ik_llama.cpp"] = Llama(Path(args.ik_llama_cpp) / "bin", "llama-cli", ("-rtr",), ("-rtr", 1))
    for name, built in others.items():
        for program in ("llama-bench", "llama-batched-bench", built.completion):
            if not (built.programs / program).exists():
                raise InputError(f"{built.programs} has no {program}: build {name}, or name its build folder")
    began, tables = machine(), {}
    for file in args.files:
        engines = {f"eyas, inputs {kind}": _eyas(file, kind, args.threads) for kind in args.activations}
        engines |= {name: _llama(built, file, args.threads) for name, built in others.items()}
        rounds: dict[str, list[Figures]] = {name: [] for name in engines}
        for turn in range(args.rounds):
            for name in [*engines][:: 1 if turn % 2 == 0 else -1]:
                rounds[name].append(engines[name].passes())
                print(file.name, name, rounds[name][-1], file=sys.stderr, flush=True)
        rows = {name: _summary(rounds[name]) | engine.start() for name, engine in engines.items()}
        tables[file.name] = {"bytes": file.stat().st_size, **rows}
        write(args.output, {"context": CONTEXT, "prompt": PROMPT, "files": tables}, began, quiet=True)


class Engine(NamedTuple):
    """passes: seconds of passes, and tokens per second of a prompt. start: the first load, a later one and its memory."""

    passes: Callable[[], Figures]
    start: Callable[[], Figures]


def _summary(rounds: list[Figures]) -> Figures:
    """Return the median of each figure with its range, and the speed of drafts."""
    result = {name: [round(f([each[name] for each in rounds]), 4) for f in (median, min, max)] for name in rounds[0]}
    passes = {n: result[f"pass_{n}"][0] for n in PASSES}
    plain, drafts = 1 / passes[1], _best_chain(passes)
    return result | {"plain": round(plain, 2), "with_drafts": round(drafts, 2), "ratio": round(drafts / plain, 2)}


def _best_chain(passes: dict[int, float]) -> float:
    """Return tokens per second with chains of the best length; passes of other lengths are interpolated."""
    speeds = []
    for length in range(1, max(PASSES)):
        nodes = length + 1
        low, high = max(n for n in PASSES if n <= nodes), min(n for n in PASSES if n >= nodes)
        share = (nodes - low) / (high - low) if high > low else 0.0
        seconds = passes[low] * (1 - share) + passes[high] * share + length * DRAFT * passes[1]
        speeds.append(sum(ACCEPTED**depth for depth in range(nodes)) / seconds)
    return max(speeds)


# --- eyas


def _eyas(file: Path, activations: str, threads: int) -> Engine:
    here = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    kept = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "eyas"
    passes = [sys.executable, __file__, "passes", str(file), activations]
    answer = [
        sys.executable, "-m", "eyas", "generate", "--target", str(file), "--method", "vanilla", "--activations", activations,
        "--raw", "--max-new-tokens", "1", "Once upon a time",
    ]  # fmt: skip

    def start() -> Figures:
        with tempfile.TemporaryDirectory(dir=file.parent) as cache:
            shutil.copytree(kept / "kernels", Path(cache) / "eyas/kernels")  # compiled already; nothing is packed
            environment = {**here, "XDG_CACHE_HOME": cache}
            cold, most = _timed(answer, environment)
            warm, later = _timed(answer, environment)
        return {"first_token_cold": cold, "first_token": warm, "gigabytes_cold": most, "gigabytes": later}

    return Engine(lambda: json.loads(_output(passes, here).splitlines()[-1]), start)


def _eyas_passes(file: str, activations: str) -> Figures:
    target = eyas.load(file, method="vanilla", activations=activations, tokenizer=False).target
    session = target.open(1)
    began = time.perf_counter()
    session.prefill(0, [1 + i % 1000 for i in range(PROMPT)])
    figures = {"prompt": PROMPT / (time.perf_counter() - began)}
    session = target.open(1)
    session.prefill(0, [1 + i % 1000 for i in range(CONTEXT)])
    for n in PASSES:
        tree, seconds = Tree.chain(1, n), []
        tokens = torch.full((1, n), 7)
        for _ in range(REPEATS):
            began = time.perf_counter()
            session.forward(tokens, tree)
            seconds.append(time.perf_counter() - began)
        figures[f"pass_{n}"] = median(seconds[2:])
    return figures


# --- llama.cpp


class Llama(NamedTuple):
    """A build: the folder of its programs, the name of that which completes a text, and options."""

    programs: Path
    completion: str
    options: tuple[str, ...] = ()
    bench_options: tuple[str | int, ...] = ()


def _llama(built: Llama, file: Path, threads: int) -> Engine:
    of_threads = ["-m", file, "-t", threads]
    order = [option for option in built.options if option != "-no-cnv"]
    sizes = ["-npp", CONTEXT, "-ntg", REPEATS, "-npl", ",".join(map(str, PASSES)), "-pps", "-c", 4096]
    batched = [built.programs / "llama-batched-bench", *of_threads, *sizes, *order]
    once = ["-p", PROMPT, "-n", 0, "-r", 1, "-o", "json"]
    prompts = [built.programs / "llama-bench", *of_threads, *once, *built.bench_options]
    text = ["-n", 1, "-p", "Once upon a time", "-c", 4096]
    answer = [built.programs / built.completion, *of_threads, *text, *built.options]

    def passes() -> Figures:
        # | PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | ...
        rows = re.findall(r"^\|" + r" *(\d[\d.]*) \|" * 7, _output(batched, errors=True), re.MULTILINE)
        figures = {f"pass_{row[2]}": float(row[6]) / REPEATS for row in rows}
        return figures | {"prompt": json.loads(_output(prompts))[0]["avg_ts"]}

    def start() -> Figures:
        cold, most = _timed(answer)
        warm, later = _timed(answer)
        return {"first_token_cold": cold, "first_token": warm, "gigabytes_cold": most, "gigabytes": later}

    return Engine(passes, start)


# --- processes


def _output(command: list[Any], environment: dict[str, str] | None = None, errors: bool = False) -> str:
    """Return what a process writes, with `errors` on both streams."""
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"{command[0]} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout + done.stderr * errors


def _timed(command: list[Any], environment: dict[str, str] | None = None) -> tuple[float, float]:
    """Return the seconds of a process, and its largest resident memory in gigabytes."""
    began = time.perf_counter()
    child = subprocess.Popen([str(word) for word in command], env=environment, stdout=-3, stderr=-3, stdin=-3)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise InputError(f"{command[0]} ended with status {status}")
    return round(time.perf_counter() - began, 2), round(used.ru_maxrss * 1024 / 1e9, 2)


if __name__ == "__main__":
    run(main)
