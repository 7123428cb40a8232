"""Measure the worth of each part of EAGLE-3: heads that lack one of them, trained on the same tokens.

    python runs/ablation.py --data chat.jsonl.gz --chats HELDIN.jsonl.gz              (work in out/ablation, docs/results/ablation.json)
    python runs/ablation.py --data chat.jsonl.gz --chats HELDIN.jsonl.gz --target DIR --work out/ablation_other --output other.json

    eagle3                    fused features of three layers, training-time test, no feature loss
    feature loss              the head's input is pulled to that of the target's head, as in EAGLE-1
    no training-time test     one prediction from each position, always from the target's features
    last layer only           reads the input of the target's last layer alone
    eagle1 net                EAGLE-1/2's net and loss, for comparison

Every variant is first trained for --tune tokens with each of the --rates; the one with the least
held-out loss is taken.
"""

from __future__ import annotations

from dataclasses import replace

import _heads
from _common import add_option, run
from _heads import Head

import eyas
from eyas.errors import EyasError

FULL = "eagle3"


def main(arguments: list[str] | None = None) -> None:
    parser = _heads.parser(__doc__, "ablation", tokens=300_000, seeds=3)
    parser.add_argument("--variants", help="parted by ';' (default: all)")
    add_option(parser, "--rates", "1e-3,2e-3,4e-3", "learning rates to try; a single one is taken as it is")
    add_option(parser, "--tune", 60_000, "tokens that each rate is tried on")
    args = parser.parse_args(arguments)
    last, common = eyas.load(args.target, method="vanilla").target.num_layers - 1, _heads.eagle3_flags(args)
    known = {
        FULL: ("eagle3", common),
        "feature loss": ("eagle3", (*common, "--ttt.feature", "10")),
        "no training-time test": ("eagle3", (*common, "--ttt.steps", "1")),
        "last layer only": ("eagle3", (*common, "--head.layers", str(last))),
        "eagle1 net": ("eagle2", ()),
    }
    kinds = [kind.strip() for kind in args.variants.split(";")] if args.variants else list(known)
    if unknown := [kind for kind in kinds if kind not in known]:
        raise EyasError(f"unknown variant {unknown[0]!r}; there are: {'; '.join(known)}")
    rates, tuning, heads = [float(rate) for rate in args.rates.split(",")], {}, list[Head]()
    for kind in kinds:
        head = Head(kind, *known[kind], tuple(args.data), args.tune, rates[0], seed=0)
        losses = {}
        for rate in rates if len(rates) > 1 else ():
            record = _heads.train(replace(head, lr=rate), args.work / "tune" / head.name / f"{rate:g}", args)
            losses[rate] = record["losses"][-1]["loss"]
        best = min(losses, key=losses.__getitem__) if losses else rates[0]
        tuning[kind] = {"lr": best, "tried": {f"{rate:g}": loss for rate, loss in losses.items()}}
        heads += [replace(head, tokens=args.tokens, lr=best, seed=seed) for seed in range(args.seeds)]
    pairs = [(FULL, kind) for kind in kinds if kind != FULL and FULL in kinds]
    shapes = _heads.shapes_of(args, "chain", "tree")
    settings = {"tuning": tuning, "tree": args.tree, "tokens_per_head": args.tokens}
    _heads.compare(heads, shapes, pairs, args, **settings)


if __name__ == "__main__":
    run(main)
