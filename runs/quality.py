"""Measure the loss by rounded weights on plain text: perplexity, and how often the most probable token stays the same.

python runs/quality.py --output docs/results/quality_smollm2.json          SmolLM2-135M on the pages of docs/guide
python runs/quality.py --target MODEL --texts mine/*.txt --output FILE     another model, other texts
python runs/quality.py --target FILE.gguf --llama-cpp BUILD --output FILE  the file's own numbers, next to llama.cpp's

It compares the formats of eyas (--weights int8, int4, and --kv bfloat16, int8 with exact weights) with llama.cpp's q8_0
and q4_0, which gguf's reference code rounds.
Both round every matrix of the layers and of the head. Each text is read as it is, to --tokens tokens.

With --llama-cpp, the build folder of llama.cpp, the texts are one text, and both engines read it as llama-perplexity
does: chunks of --tokens tokens, of which the second half counts.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
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

OURS, KV, THEIRS = ("int8", "int4"), ("kv bfloat16", "kv int8"), ("q8_0", "q4_0")
OF_FILES: dict[str, dict[str, str]] = {
    "eyas": {},
    "eyas, inputs int8": {"activations": "int8"},
    "eyas, keys and values bfloat16": {"kv": "bfloat16"},
    "eyas, keys and values int8": {"kv": "int8"},
}


def loaded(target: str, how: str) -> LLM:
    """Return the target with its weights as they are, or rounded; or with rounded keys and values."""
    if how in KV:
        return eyas.load(target, method="vanilla", kernels="on", kv=how.removeprefix("kv "))
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


def of_chunks(llm: LLM, ids: list[int], size: int) -> float:
    """Return the perplexity as llama-perplexity computes it."""
    begins = ids[:1] if ids[0] == llm.tokenizer.bos_token_id else []  # llama-perplexity begins each chunk with it
    losses = list[float]()
    for begin in track(range(0, len(ids) - size + 1, size), transient=True):
        chunk = [*(begins or ids[begin : begin + 1]), *ids[begin + 1 : begin + size]]
        result = llm.generate(chunk, max_new_tokens=1, prompt_logprobs=1)
        losses += [-one.logprob for one in (result.prompt_logprobs or ())[size // 2 + 1 :] if one is not None]
    return float(np.exp(np.mean(losses)))


def next_to_llama(args: Any, files: list[str]) -> list[dict[str, Any]]:
    """Return the perplexity of one file by both engines."""
    text = "\n".join(Path(file).read_text(encoding="utf-8") for file in files)
    rows: list[dict[str, Any]] = []
    for name, options in OF_FILES.items():
        llm = eyas.load(args.target, method="vanilla", kernels="on", **options)
        ids = list(llm.ids(text, raw=True))[: args.tokens * args.chunks]
        rows.append({"engine": name, "perplexity": round(of_chunks(llm, ids, args.tokens), 4)})
        print(rows[-1], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text").write_text(text, encoding="utf-8")
        command = [
            args.llama_cpp / "bin/llama-perplexity",
            "-m",
            args.target,
            "-f",
            f"{folder}/text",
            "-c",
            args.tokens,
        ]
        words = [str(word) for word in [*command, "-b", args.tokens, "--chunks", args.chunks]]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = re.search(r"PPL = ([\d.]+)", done.stdout + done.stderr)
    assert found, done.stderr[-500:]
    return [*rows, {"engine": "llama.cpp", "perplexity": float(found[1])}]


def main() -> None:
    """Measure and write the record."""
    root = Path(__file__).resolve().parents[1]
    made = parser(__doc__, target="smollm2-q4_1", tokens=512)
    made.add_argument("--texts", nargs="+", help="files of plain text; default: the pages of docs/guide")
    made.add_argument("--llama-cpp", type=Path, help="build folder of llama.cpp: compare one GGUF file")
    made.add_argument("--chunks", type=int, default=20, help="with --llama-cpp (default: %(default)s)")
    args = made.parse_args()
    files = sorted(args.texts or glob(str(root / "docs" / "guide" / "*.md")))
    if args.llama_cpp:
        rows = next_to_llama(args, files)
        return write(args.output, {"target": Path(args.target).name, "chunks": args.chunks, "rows": rows})
    exact, rows = [], []
    for how in ("exact", *OURS, *KV, *THEIRS):
        llm = loaded(args.target, how)
        texts = [llm.ids(Path(file).read_text(encoding="utf-8"), raw=True)[: args.tokens] for file in files]
        found = read(llm, texts)
        exact = exact or found
        rows.append({"weights": how, **compared(found, exact)})
        print(rows[-1])
    write(args.output, {"target": args.target, "texts": [Path(file).name for file in files], "rows": rows})


if __name__ == "__main__":
    main()
