"""For tests/interop: processes of other engines, and what eyas itself says to the same questions."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import eyas
import processes

VARIABLE = "EYAS_INTEROP"  # the folder with the environments
PROGRAMS = Path(__file__).parent / "interop" / "programs"


def python_of(environment: str) -> Path:
    """The Python of one of the environments."""
    folder = os.environ[VARIABLE]
    if not (Path(folder) / environment / ".installed").exists():
        pytest.skip(f"{environment} could not be installed: see the output of make interop")
    return Path(folder) / environment / "bin" / "python"


def outside() -> dict[str, str]:
    """The environment of a program that does not see eyas."""
    return {name: value for name, value in processes.environment().items() if name != "PYTHONPATH"}


def compute(python: Path, program: str, *arguments: Any) -> None:
    """Run a program to its end, with status 0."""
    done = processes.run([python, PROGRAMS / program, *arguments], env=outside())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def asked(program: str, python: Path, question: dict[str, Any]) -> dict[str, Any]:
    """A program's answer to a question; both are JSON, the answer is its last line."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), -1)
    with processes.started([python, PROGRAMS / program], **pipes, text=True, env=outside()) as process:
        stdout, stderr = processes.finish(process, json.dumps(question))
    assert process.returncode == 0, stdout[-2000:] + stderr[-4000:]
    answer: dict[str, Any] = json.loads(stdout.strip().splitlines()[-1])
    return answer


def ours(
    prompts: list[list[int]], head: Path, method: str, tokens: int, limit: int, cut: bool = False
) -> tuple[list[list[int]], float]:
    """Ids of plain decoding, and 1 + accepted / cycles of a chain of `tokens`; `cut`: not behind the limit."""
    plain = eyas.load(method="vanilla")
    if method == "eagle1":
        options: dict[str, Any] = {"method": "eagle1", "tree.choices": f"chain-{tokens}"}
    else:
        options = {"method": method, "tree.nodes": tokens + 1, "tree.depth": tokens, "tree.branch": 1}
    drafting = eyas.load(draft=head, **options)
    expected, accepted, cycles = [], 0, 0
    for ids in prompts:
        expected.append(list(plain.generate(ids, raw=True, max_new_tokens=limit).token_ids))
        answer = drafting.generate(ids, raw=True, max_new_tokens=limit)
        cycles += answer.stats.cycles
        kept = len(answer.token_ids) - 1 - answer.stats.cycles
        accepted += kept if cut else sum(answer.stats.accepted_lengths)
    return expected, 1 + accepted / cycles
