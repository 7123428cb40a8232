"""Show that a change leaves the answers alone: token ids of every method and feature, before and after.

    python runs/token_streams.py record BEFORE.json      in the tree as it was
    python runs/token_streams.py compare BEFORE.json     in the changed tree: status 1 if any id differs

All methods with random weights on small models of several families, greedy and sampled, alone and four at a time; then
the embedded model with its heads and every feature of requests, kernels on and off. Trees are fixed, because `auto`
decides by the clock.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _common import parser, run
from rich.progress import track

import eyas
from eyas.files import write_text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

FAMILIES = ("llama", "gemma2", "gpt2", "qwen3_next", "jamba")
PROMPTS = (
    "I want to book a table for two in San Jose tonight.",
    "I would like to see a movie tonight.",
    "Find me a flight to Boston on Monday.",
    "Is there a bus to the airport?",
)
KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 7}}
METHODS = ("vanilla", "suffix", "prompt_lookup", "mtp", "eagle3", "eagle2", "eagle1", "self_speculative")
PROMPT_IDS = tuple(3 + (i * i * 7 + 5 * i) % 150 for i in range(40))
TREE = {"nodes": 12, "depth": 4, "branch": 4}


def _ban_seven(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Ban every seventh token after one that can be divided by three."""
    if int(ids[0, -1]) % 3 == 0:
        scores[:, ::7] = -float("inf")
    return scores


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {5: 4.0, 11: -100.0, 300: 2.0}},
    "min_tokens": {"min_tokens": 30, "stop_token_ids": [13, 40, 120]},
    "stop": {"stop": [" the", "?"]},
    "processor": {"logits_processor": [_ban_seven]},
    "choice": {"choice": ["I would like a table", "I would like a movie", "no"]},
    "regex": {"regex": "(Yes|No), [a-z ]{10,30}\\."},
    "json": {"response_format": {"type": "json_object"}},
    "prediction": {"prediction": "What time would you like the reservation for, and how many people?"},
    "draft=3": {"drafting": 3},
    "draft=off": {"drafting": "off"},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"logprobs": 0, "prompt_logprobs": 2},
    "ignore_eos": {"ignore_eos": True},
}


def engine_cases() -> Iterator[tuple[str, Any]]:
    """Yield each method's ids on small random models, as in tests/test_lossless.py."""
    import zoo
    from eyas import drafters
    from eyas.core.engine import Decoder, Request
    from eyas.core.target import Target
    from eyas.errors import EyasError
    from reference import run as decode

    lossless = importlib.import_module("test_lossless")
    for family in FAMILIES:
        model = {**zoo.FAMILIES, **zoo.HYBRIDS}[family]()
        prompts = [PROMPT_IDS[:length] for length in (5, 23, 40, 3, 17, 31)]
        samplings = itertools.cycle(lossless.SAMPLINGS)
        requests = [Request(ids, lossless.NEW, sampling) for ids, sampling in zip(prompts, samplings, strict=False)]
        for name, rows in itertools.product(drafters.names(), (1, 4)):
            try:
                drafter = lossless.make(name, Target(model))
                tokens = decode(Decoder(drafter.target, drafter, rows), requests)[0]
            except EyasError as error:  # a method that does not suit the family: it must go on saying so
                tokens = [str(error)]
            yield f"{family} {name} rows={rows}", tokens


def feature_cases() -> Iterator[tuple[str, Any]]:
    """Yield the embedded model's answers with every request feature."""
    for kernels, method in itertools.product(("auto", "off"), METHODS):
        tree = TREE if method in ("mtp", "eagle3", "eagle2") else "fixed"
        llm = eyas.load(method=method, kernels=kernels, tree=tree)
        names = FEATURES if method in ("suffix", "mtp", "eagle3") or kernels == "auto" else ("plain", "penalties")
        for name, kind, rows in itertools.product(names, KINDS, (1, 4)):
            if rows == 4 and name not in ("plain", "penalties", "regex", "prediction", "logprobs"):
                continue
            options = {"max_new_tokens": 32, "batch_size": rows, **FEATURES[name], **KINDS[kind]}
            results = llm.generate(list(PROMPTS[:rows]), **options)
            yield f"embedded {kernels} {method} {name} {kind} rows={rows}", [_shown(r) for r in results]


def _shown(result: eyas.Result) -> Any:
    parts: list[Any] = [list(result.token_ids), result.text, result.finish_reason]
    for field in ("logprobs", "prompt_logprobs"):
        if (value := getattr(result, field, None)) is not None:
            parts.append(repr(value))
    return parts


def streams() -> dict[str, Any]:
    """Return the answers of all cases by name."""
    torch.set_num_threads(1)
    made: dict[str, Any] = {}
    for cases in (engine_cases(), feature_cases()):
        for name, tokens in track(cases, description="cases", total=None, transient=True):
            made[name] = tokens
    return made


def main() -> None:
    options = parser(__doc__, None)
    options.add_argument("command", choices=["record", "compare"])
    options.add_argument("file", type=Path)
    args = options.parse_args()
    made = json.loads(json.dumps(streams()))
    if args.command == "record":
        write_text(args.file, json.dumps(made))
        print(f"{len(made)} cases")
        return
    before = json.loads(args.file.read_text())
    different = [name for name in before.keys() | made.keys() if before.get(name) != made.get(name)]
    print("\n".join(sorted(different)), f"{len(made) - len(different)} of {len(made)} cases are equal", sep="\n")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    run(main)
