"""Measure the loss by rounded weights on plain text: perplexity, and how often the most probable token stays the same.

python runs/quality.py --output docs/results/quality_smollm2.json          SmolLM2-135M on the pages of docs/guide
python runs/quality.py --target MODEL --texts mine/*.txt --output FILE     another model, other texts

It compares the formats of eyas (--weights int8, int4) with llama.cpp's q8_0 and q4_0, which gguf's reference code
rounds. Both round every matrix of the layers and of the head. Each text is read as it is, to --tokens tokens.
"""

from __future__ import annotations

from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import bootstrap, parser, write
from gguf import GGMLQuantizationType, quants
from rich.progress import track
from transformers import PreTrainedModel

import eyas
from eyas.api import LLM

OURS, THEIRS = ("int8", "int4"), ("q8_0", "q4_0")


def loaded(target: str, how: str) -> LLM:
    """Return the target with its weights as they are, or rounded."""
    if how in OURS:
        return eyas.load(target, method="vanilla", weights=how)
    llm = eyas.load(target, method="vanilla", kernels="off")
    if how in THEIRS:
        rounded(llm.target.model, GGMLQuantizationType[how.upper()])
    return llm


@torch.no_grad()
def rounded(model: PreTrainedModel, kind: Any) -> None:
    """Round every matrix that multiplies a hidden state, and with the head the embeddings that are tied to it."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            blocks = quants.quantize(module.weight.float().numpy(), kind)
            module.weight.copy_(torch.from_numpy(quants.dequantize(blocks, kind)))


def read(llm: LLM, texts: list[tuple[int, ...]]) -> list[list[tuple[float, int]]]:
    """Return (log-probability of the token, most probable token) for all tokens but the first of each text."""
    found = []
    for ids in track(texts, transient=True):
        result = llm.generate(list(ids), max_new_tokens=1, prompt_logprobs=1)
        found.append([(one.logprob, one.top[0][0]) for one in result.prompt_logprobs or () if one is not None])
    return found


def compared(made: list[list[tuple[float, int]]], exact: list[list[tuple[float, int]]]) -> dict[str, Any]:
    """Return perplexity, its ratio to the exact model's with an interval over texts, and the share of equal tokens."""
    tokens = [len(text) for text in made]
    losses = [-sum(logprob for logprob, _ in text) for text in made]
    more = [loss + sum(logprob for logprob, _ in text) for loss, text in zip(losses, exact, strict=True)]
    equal = sum(a[1] == b[1] for x, y in zip(made, exact, strict=True) for a, b in zip(x, y, strict=True))
    ratio = bootstrap(lambda extra, count: np.exp(np.asarray(extra) / np.asarray(count)), more, tokens)
    return {
        "tokens": sum(tokens),
        "perplexity": round(float(np.exp(sum(losses) / sum(tokens))), 3),
        "over_exact": None if ratio is None else [round(float(x), 4) for x in ratio],
        "same_token": round(equal / sum(tokens), 4),
    }


def main() -> None:
    """Measure and write the record."""
    root = Path(__file__).resolve().parents[1]
    made = parser(__doc__, target="smollm2-q4_1", tokens=512)
    made.add_argument("--texts", nargs="+", help="files of plain text; default: the pages of docs/guide")
    args = made.parse_args()
    files = sorted(args.texts or glob(str(root / "docs" / "guide" / "*.md")))
    exact, rows = [], []
    for how in ("exact", *OURS, *THEIRS):
        llm = loaded(args.target, how)
        texts = [llm.ids(Path(file).read_text(encoding="utf-8"), raw=True)[: args.tokens] for file in files]
        found = read(llm, texts)
        exact = exact or found
        rows.append({"weights": how, **compared(found, exact)})
        print(rows[-1])
    write(args.output, {"target": args.target, "texts": [Path(file).name for file in files], "rows": rows})


if __name__ == "__main__":
    main()
