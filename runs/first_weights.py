"""What new heads draft before their first update: as they are made, and with first weights fitted by least squares.

    python runs/first_weights.py --target smollm2-q4_1 --data out/smollm2/chats_0.jsonl --output docs/results/first_weights.json

The fit reads the training part of --data, the figures are of its held-out part: the share of next tokens that the head
predicts right at the first and the last step of the training-time test, teacher-forced. One standard error of a share
over n tokens is at most 0.5 / sqrt(n).
"""

from __future__ import annotations

from typing import Any

import torch
from _common import machine, parser, run, write

import eyas
from eyas.core.options import build_options
from eyas.drafters import DraftMethod, find
from eyas_train.batch_loss import LossSums, batch_loss
from eyas_train.data import Batches, read
from eyas_train.start import fit_start
from eyas_train.vocab import count_tokens

EAGLE3 = {"ttt.steps": 4, "head.draft_vocab": 16_384, "head.norm_output": True, "head.fc_norm": True}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE-1": ("eagle1", {}),
    "MTP": ("mtp", {"ttt.steps": 4}),
    "EAGLE-3": ("eagle3", EAGLE3),
    "EAGLE-3, keys for each head": ("eagle3", EAGLE3 | {"head.kv_heads": 0}),
    "EAGLE-3, keys for each head, four layers": ("eagle3", EAGLE3 | {"head.kv_heads": 0, "head.depth": 4}),
}


@torch.no_grad()
def figures(drafter: DraftMethod, batches: Batches) -> dict[str, float]:
    """Means over the tokens that count; they are fewer where a draft vocabulary lacks the target's choice."""
    assert drafter.net is not None
    drafter.net.eval()
    sums = LossSums()
    for number, batch in enumerate(batches.plan(None)):
        sums.add(batch_loss(drafter, drafter.loss, batches, batch, (number,), None))
    totals = sums.floats()
    means = LossSums.per_token(totals)
    return {name: round(value, 4) for name, value in {**means, "tokens": totals["count"]}.items()}


def main() -> None:
    shape = {"target": "smollm2-q4_1", "data": None, "heldout": 0.03, "max_length": 512, "layers": ""}
    args = parser(__doc__, **shape).parse_args()
    before, llm = machine(), eyas.load(args.target, method="vanilla", kernels="off")
    data = read(args.data, llm.tokenizer, max_length=args.max_length, heldout=args.heldout)
    counts_V = count_tokens(data.train, llm.target.vocab_size)
    heads = llm.target.model.config.get_text_config().num_attention_heads
    rows = {}
    for name, (method, options) in HEADS.items():
        chosen = options | ({"head.kv_heads": heads} if "head.kv_heads" in options else {})
        chosen |= {"head.layers": args.layers} if args.layers and method == "eagle3" else {}
        kind = find(method)
        drafter = kind.init_for_training(llm.target, build_options(kind.Options, chosen), 0, counts_V)
        heldout = Batches(data.heldout, max(2_048, args.max_length))
        new = figures(drafter, heldout)
        told = fit_start(drafter, data.train, max(4_096, args.max_length), 0)
        rows[name] = {"new": new, "fitted": figures(drafter, heldout), "fit": told}
        print(name, rows[name], flush=True)
    write(args.output, {"target": args.target, "data": str(data.report), "heads": rows}, before, quiet=True)


if __name__ == "__main__":
    run(main)
