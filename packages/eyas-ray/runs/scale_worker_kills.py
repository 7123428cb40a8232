"""Workers that are killed at random while a command works: is a line lost, doubled or changed?

    .venv-scale/bin/python packages/eyas-ray/runs/scale_worker_kills.py --output docs/results/scale_worker_kills.json --kills 5

The embedded model. Each command of --commands runs once in one process and once with --workers 2, of which one after
another gets SIGKILL at a random moment; then both results are compared: the lines of `generate --input` and `regenerate`
by their ids and their texts, the shards of `features` byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).resolve().parents[3] / "runs"))  # what scripts share
from _common import bundled_prompts, machine, parser, run, words, write

from eyas.errors import InputError

WORKER = "_Worker"  # the class of Ray's actors, which their processes have in their names
COMMANDS = {
    "generate": ("--input", "questions.jsonl", ("--max-new-tokens", "48", "--tree", "fixed")),
    "regenerate": ("--data", "chats.jsonl", ("--max-new-tokens", "48", "--temperature", "1", "--seed", "3", "--tree", "fixed")),
    "features": ("--data", "chats.jsonl", ("--shard-mib", "1", "--yes")),
}  # fmt: skip


def written(folder: Path, count: int) -> None:
    """Write so many questions, and chats with answers, made of the bundled prompts."""
    turns = [turn for prompt in bundled_prompts() for turn in prompt.turns]
    asked = [f"{turns[i % len(turns)]} ({i})" for i in range(count)]
    questions = ({"id": f"q{i}", "prompt": text} for i, text in enumerate(asked))
    chats = (
        {"id": f"q{i}", "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text * 2}]}
        for i, text in enumerate(asked)
    )
    for name, lines in (("questions", questions), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def result(place: Path) -> Counter[tuple[str, str]]:
    """Count (id, content) of a result: the lines of a file, or the shards of a folder."""
    if place.is_dir():
        return Counter(
            (file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in place.glob("*.safetensors")
        )
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    return Counter((line["id"], json.dumps(line.get("text") or line.get("messages"))) for line in lines)


def compared(whole: Counter[tuple[str, str]], disturbed: Counter[tuple[str, str]]) -> dict[str, int]:
    """Count what became of the parts of a result."""
    ids = Counter({name: count for (name, _), count in whole.items()})
    found = Counter(name for name, _ in disturbed.elements())
    return {
        "parts": len(ids),
        "lost": sum(name not in found for name in ids),
        "doubled": sum(count > 1 for count in found.values()),
        "changed": sum(part not in whole for part in disturbed),
    }


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """Return the processes of the workers that a command has started, and which work."""
    found = []
    for child in process.children(recursive=True):
        try:
            if any(WORKER in part for part in child.cmdline()[:1]) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.Error:
            continue
    return found


def killed(command: list[str], kills: int, seed: int, log: Path) -> tuple[int, float]:
    """Run a command and kill its workers; return how many were killed, and the seconds that the command took."""
    chance, done, start = random.Random(seed), 0, time.monotonic()
    environment = {**os.environ, "RAY_ADDRESS": "local"}  # without it the workers of `features` are not Ray's
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        command_process = psutil.Process(process.pid)
        while process.poll() is None:
            time.sleep(chance.uniform(0.5, 4))
            victims = workers_of(command_process) if done < kills and process.poll() is None else []
            if victims:
                chance.choice(victims).send_signal(signal.SIGKILL)
                done += 1
    if process.returncode:
        raise InputError(f"{' '.join(command[3:5])} ended with {process.returncode}: {log.read_text()[-500:]}")
    return done, time.monotonic() - start


def measure(name: str, folder: Path, args: Any) -> dict[str, Any]:
    """Return what became of the result of one command."""
    source, file, options = COMMANDS[name]
    command = [sys.executable, "-m", "eyas", name, source, str(folder / file), *options]
    ending = "" if name == "features" else ".jsonl"
    whole, disturbed = (folder / f"{name}-{kind}{ending}" for kind in ("whole", "disturbed"))
    log = folder / f"{name}.log"
    killed([*command, "--output", str(whole)], 0, 0, log)
    count, seconds = killed(
        [*command, "--output", str(disturbed), "--workers", str(args.workers)], args.kills, args.seed, log
    )
    figures = {"kills": count, "seconds": round(seconds, 1), **compared(result(whole), result(disturbed))}
    print(f"{name}: {figures}", file=sys.stderr)
    return figures


def main() -> None:
    made = parser(__doc__, kills=5, workers=2, lines=400, seed=1, commands=(",".join(COMMANDS), "of these"))
    args = made.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory() as folder:
        written(Path(folder), args.lines)
        figures = {name: measure(name, Path(folder), args) for name in words(args.commands)}
    write(args.output, {"lines": args.lines, "workers": args.workers, "commands": figures}, before)
    if any(row[fault] for row in figures.values() for fault in ("lost", "doubled", "changed")):
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
