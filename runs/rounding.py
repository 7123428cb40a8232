"""Measure the cost of rounded weights and activations: perplexity of given text, and how often the
most probable token is another one.

    python runs/rounding.py --chats chat_heldin_300.jsonl.gz --output docs/results/rounding.json                  the embedded model
    python runs/rounding.py --target MODEL --chats chat_heldin_300.jsonl.gz --output FILE.json

The turns of each chat as one text, cut at --length tokens; the first --given + 1 tokens are not
counted. Every row is the same model by the kernels with another `--weights` and `--activations`;
ratios are paired by chat, 95 %, bootstrap over chats.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import interval, machine, open_text, parser, run, write
from rich.progress import track

import eyas
from eyas import kernels
from eyas.api import LLM
from eyas.core.tree import Tree
from eyas.errors import OptionError
from eyas.runners.cpu import CpuRunner

FORMS = [("exact", "exact"), ("bfloat16", "exact"), ("bfloat16", "bfloat16")]
FORMS += [(weights, activations) for weights in ("int8", "int4") for activations in ("exact", "int16", "int8")]


def texts(llm: LLM, path: Path, limit: int, length: int, given: int) -> list[list[int]]:
    """Token ids of the first `limit` chats, those that are long enough."""
    with open_text(path) as lines:
        chats = [json.loads(line)["conversations"] for line, _ in zip(lines, range(limit), strict=False)]
    joined = ["\n".join(turn.get("content", turn.get("value", "")) for turn in chat) for chat in chats]
    return [ids for text in joined if len(ids := llm.tokenizer.encode(text)[:length]) >= 2 * given]


@torch.inference_mode()
def read(llm: LLM, ids: list[int], given: int) -> tuple[float, torch.Tensor]:
    """(negative log-likelihood of the tokens behind the given ones, nats; the most probable token
    after each)."""
    session = llm.target.open(1)
    session.prefill(0, ids[:given])
    logits_NV = session.forward(torch.tensor([ids[given:]]), Tree.chain(1, len(ids) - given)).logits_BNV[0]
    log_p_N = logits_NV[:-1].log_softmax(-1).gather(1, torch.tensor(ids[given + 1 :])[:, None])
    return -float(log_p_N.sum()), logits_NV.argmax(-1)


def perplexity_ratio(nats: Any, exact: Any, tokens: Any) -> Any:
    """A statistic for `bootstrap`."""
    return np.exp((np.asarray(nats) - np.asarray(exact)) / np.asarray(tokens))


def main() -> None:
    args = parser(__doc__, chats=True, target=None, limit=60, length=384, given=8).parse_args()
    before, rows, exact = machine(), list[dict[str, Any]](), list[tuple[float, torch.Tensor]]()
    for weights, activations in FORMS:
        if activations == "bfloat16" and kernels.available() and not kernels.has_avx512_bf16():
            print("activations bfloat16: left out, this CPU has no AVX-512 BF16", flush=True)
            continue
        llm = eyas.load(
            args.target, method="vanilla", dtype="float32", kernels="on", weights=weights, activations=activations
        )
        runner = llm.target.runner
        if not isinstance(runner, CpuRunner):
            raise OptionError(
                "only the compiled kernels round numbers, and they do not run this model: `eyas doctor` says why"
            )
        asked = texts(llm, args.chats, args.limit, args.length, args.given)
        results = [read(llm, ids, args.given) for ids in track(asked, f"weights {weights}, activations {activations}")]
        exact, counts = exact or results, [len(ids) - args.given - 1 for ids in asked]
        nats = [total for total, _ in results]
        same = sum(int((ours == true).sum()) for (_, ours), (_, true) in zip(results, exact, strict=True))
        rows.append(
            {
                "weights": weights,
                "activations": activations,
                "bytes": runner.bytes,
                "tokens": sum(counts),
                "perplexity": round(math.exp(sum(nats) / sum(counts)), 3),
                "over_exact": interval(perplexity_ratio, nats, [total for total, _ in exact], counts),
                "same_token": round(same / sum(len(tokens) for _, tokens in results), 4),
            }
        )
    write(args.output, {"rows": rows}, before)


if __name__ == "__main__":
    run(main)
