"""What each part of EAGLE-3 is worth: heads that lack one of them, trained on the same tokens.

    python runs/ablation.py --data chat.jsonl.gz --chats HELDIN.jsonl.gz              (work in out/ablation, docs/results/ablation.json)
    python runs/ablation.py --data chat.jsonl.gz --chats HELDIN.jsonl.gz --target DIR --work out/ablation_other --output other.json

    eagle3                    fused features of three layers, training-time test, no feature loss
    feature loss              what its head reads is pulled to what the target's head reads, 1 : 0.1 against the tokens, as in EAGLE-1
    no training-time test     one guess from each slot, always from the target's features
    last layer only           reads the input of the target's last layer alone. That is the last feature before the final norm that a target
                              gives without being changed; the last layer's own output can only be had normed. Its fc is smaller by that
    eagle1 net                EAGLE-1/2's net and loss, for comparison

Every variant is first trained for a few tokens with each of a few learning rates; the one with the least held-out loss is taken. Then: the
same data in the same order, as many steps, `--seeds` heads of each. Measured by real decoding on chats that nothing was trained on.
A stopped run goes on; the figures so far are written after every head.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import _heads
from _command import run
from _heads import Exam, Head, Options, Results, eagle3_options, slug, tree_options
from torch import Tensor

from eyas.api import LLM
from eyas.errors import EyasError
from eyas.train.data import Data
from eyas.train.vocab import count_tokens

FULL, NET1 = "eagle3", "eagle1 net"


def variants(last: int, common: Options) -> dict[str, tuple[str, Options]]:
    """Kind -> (method, options). `last`: the target's last layer."""
    return {
        FULL: ("eagle3", common),
        "feature loss": ("eagle3", {**common, "ttt.feature": 10.0}),
        "no training-time test": ("eagle3", {**common, "ttt.steps": 1}),
        "last layer only": ("eagle3", {**common, "head.layers": str(last)}),
        "feature loss, no training-time test": ("eagle3", {**common, "ttt.feature": 10.0, "ttt.steps": 1}),
        NET1: ("eagle2", {}),
    }


DEFAULT = (FULL, "feature loss", "no training-time test", "last layer only", NET1)


def tuned(
    llm: LLM, kind: str, method: str, options: Options, data: Data, counts_V: Tensor, args: argparse.Namespace
) -> tuple[float, dict[str, Any]]:  # fmt: skip
    """The learning rate with the least held-out loss after `--tune` tokens, and what was tried."""
    rates, losses = sorted(float(rate) for rate in args.rates.split(",")), dict[float, float]()
    if len(rates) == 1:
        return rates[0], {"lr": rates[0], "tried": {}}
    for rate in rates:
        folder = args.work / "tune" / slug(kind) / f"{rate:g}"
        head = Head(kind, method, options, rate, seed=0)
        steps = _heads.steps_for(args.tune, data.train, args, head.seed)
        try:
            losses[rate] = _heads.train_head(llm, head, data, steps, counts_V, args, folder)["heldout"]["loss"]
        except EyasError as error:
            if "NaN" not in str(error):
                raise
            losses[rate] = float("inf")
    best = min(losses, key=losses.__getitem__)
    tried = {f"{rate:g}": loss if loss < float("inf") else None for rate, loss in losses.items()}
    return best, {"lr": best, "tried": tried, "at_the_edge": best in (rates[0], rates[-1])}


def draw_plot(figure: Any, result: dict[str, Any]) -> None:
    """n-alpha by n; tau of chain and tree by variant."""
    alpha, tau = figure.subplots(1, 2)
    kinds = result["kinds"]
    for place, (kind, found) in enumerate(kinds.items()):
        shift = 0.06 * (place - (len(kinds) - 1) / 2)
        _heads.line(alpha, [n + shift for n in range(_heads.CHAIN)], found["n-alpha"], kind, color=f"C{place}")
        for below, face, shape in ((-0.15, "white", "chain"), (0.15, f"C{place}", "tree")):
            value, low, high = found["tau"][shape]
            reach = [[max(0, value - low)], [max(0, high - value)]]
            tau.errorbar([value], [place + below], xerr=reach, marker="o", color=f"C{place}", mfc=face, capsize=2)
            seeds = [seed["tau"][shape][0] for seed in found["by_seed"]] if len(found["by_seed"]) > 1 else []
            tau.plot(seeds, [place + below + 0.12] * len(seeds), "|", color=f"C{place}", markersize=5)
    alpha.set(xlabel="n: own outputs that the draft's input holds", ylabel="n-alpha", xticks=range(_heads.CHAIN))
    alpha.legend(fontsize=7, frameon=False)
    tau.set(xlabel="tau of chain (open) and tree; strokes: seeds", yticks=range(len(kinds)), yticklabels=list(kinds))
    tau.invert_yaxis()


def main(argv: list[str] | None = None) -> None:
    parser = _heads.parser(__doc__, "ablation", tokens=300_000, seeds=3)
    parser.add_argument("--variants", default="; ".join(DEFAULT), help="parted by ';' (default: %(default)s)")
    parser.add_argument("--rates", default="1e-3,2e-3,4e-3", help="learning rates to try; a single one is taken as it is (%(default)s)")
    parser.add_argument("--tune", type=int, default=60_000, help="tokens that each rate is tried on (default: %(default)s)")
    args = parser.parse_args(argv)
    llm = _heads.open_target(args)
    last = llm.target.num_layers - 1
    known, kinds = variants(last, {}), [kind.strip() for kind in args.variants.split(";")]
    if unknown := [kind for kind in kinds if kind not in known]:
        raise EyasError(f"unknown variant {unknown[0]!r}; there are: {'; '.join(known)}")
    layers = _heads.layers_of(llm, [known[kind] for kind in kinds])
    data = _heads.features(llm, Path(args.work, "features"), args.data, layers, args, args.tokens)
    counts_V = count_tokens(data.train, llm.target.vocab_size)
    every = {kind: how for kind, how in variants(last, eagle3_options(args, counts_V)).items() if kind in kinds}
    tuning = {kind: tuned(llm, kind, *how, data, counts_V, args) for kind, how in every.items()}
    exam = Exam(llm, args, {"chain": None, "tree": tree_options(args.tree)}, beside=False)
    results = Results.begin(
        exam, len(every) * args.seeds, tokens_per_head=args.tokens, data=[path.name for path in args.data],
        data_tokens=_heads.tokens_of(data.train), batch_tokens=args.batch_tokens, max_length=args.max_length, tree=args.tree,
        seeds=list(range(args.seeds)), tune_tokens=args.tune, tuning={kind: found for kind, (_, found) in tuning.items()},
        last_layer=f"hidden_states[{last}], the input of the last layer",
    )  # fmt: skip
    for seed in range(args.seeds):
        for kind, (method, options) in every.items():
            head, folder = Head(kind, method, options, tuning[kind][0], seed), args.work / "heads" / f"{slug(kind)}-seed{seed}"
            about = _heads.train_head(llm, head, data, _heads.steps_for(args.tokens, data.train, args, seed), counts_V, args, folder)
            results.add(head, about, exam.take(head, folder))
            results.write([(FULL, other) for other in every if other != FULL], draw_plot)
    print(results.caption)


if __name__ == "__main__":
    run(main)
