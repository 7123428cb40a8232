"""What rounded weights and activations cost: perplexity of given text, and how often the most probable token is another one.

    python runs/rounding.py --chats chat_heldin_300.jsonl.gz --output docs/results/rounding.json                  the embedded model
    python runs/rounding.py --target MODEL --chats chat_heldin_300.jsonl.gz --output FILE.json

The turns of each chat as one text, cut at --length tokens; what its first --given + 1 tokens are worth is not counted. Every row is the
same model by the kernels with another `--weights` and `--activations`; ratios are paired by chat, with their 95 % intervals.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import command, interval, machine, run
from rich.progress import track

import eyas
from eyas import kernels
from eyas.api import LLM
from eyas.core.tree import Tree
from eyas.errors import OptionError
from eyas.train.state import write_text

FORMS = (
    ("exact", "exact"), ("bfloat16", "exact"), ("bfloat16", "bfloat16"), ("int8", "exact"), ("int8", "int16"), ("int8", "int8"),
    ("int4", "exact"), ("int4", "int16"), ("int4", "int8"),
)  # fmt: skip


def texts(llm: LLM, path: Path, limit: int, length: int, given: int) -> list[list[int]]:
    """Token ids of the first `limit` chats that are long enough."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        chats = [json.loads(line)["conversations"] for line in lines][:limit]
    said = ["\n".join(turn.get("content", turn.get("value", "")) for turn in chat) for chat in chats]
    return [ids for text in said if len(ids := llm.tokenizer.encode(text)[:length]) >= 2 * given]


@torch.inference_mode()
def read(llm: LLM, ids: list[int], given: int) -> tuple[float, torch.Tensor]:
    """The sum of -log p of the tokens behind the given ones, in nats, and the most probable token after each."""
    session = llm.target.open(1)
    session.prefill(0, ids[:given])
    logits_NV = session.forward(torch.tensor([ids[given:]]), Tree.chain(1, len(ids) - given)).logits_BNV[0]
    told_N = logits_NV[:-1].log_softmax(-1).gather(1, torch.tensor(ids[given + 1 :])[:, None])
    return -float(told_N.sum()), logits_NV.argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the embedded model")
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=60, help="chats")
    parser.add_argument("--length", type=int, default=384, help="tokens of a chat")
    parser.add_argument("--given", type=int, default=8, help="tokens that are not counted")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    before, rows = machine(), list[dict[str, Any]]()
    exact: list[tuple[float, torch.Tensor]] = []
    for weights, activations in FORMS:
        if activations == "bfloat16" and kernels.available() and not kernels.has_avx512_bf16():
            print("activations bfloat16: left out, this CPU does not add up products of bfloat16 (AVX-512 BF16)", flush=True)
            continue
        llm = eyas.load(args.target, method="vanilla", dtype="float32", kernels="on", weights=weights, activations=activations)
        if not llm.target.by_kernels:
            raise OptionError("rounded numbers are a matter of the compiled kernels, and this model has none: `eyas doctor` says why")
        asked = texts(llm, args.chats, args.limit, args.length, args.given)
        found = [read(llm, ids, args.given) for ids in track(asked, f"weights {weights}, activations {activations}")]
        exact, counts = exact or found, [len(ids) - args.given - 1 for ids in asked]

        def ratio(a: np.ndarray, b: np.ndarray, n: np.ndarray, axis: int = -1) -> np.ndarray:
            return np.exp((a.sum(axis) - b.sum(axis)) / n.sum(axis))

        same = sum(int((mine == its).sum()) for (_, mine), (_, its) in zip(found, exact, strict=True))
        rows.append({
            "weights": weights, "activations": activations, "bytes": llm.target.run.bytes, "tokens": sum(counts),
            "perplexity": round(float(np.exp(sum(nats for nats, _ in found) / sum(counts))), 3),
            "over_exact": interval(ratio, ([nats for nats, _ in found], [nats for nats, _ in exact], counts)),
            "same_token": round(same / sum(len(tokens) for _, tokens in found), 4),
        })  # fmt: skip
        print(rows[-1], flush=True)
    write_text(args.output, json.dumps({"command": command("rounding.py"), "machine": before, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
