"""Memory and speed of EAGLE-3's training with long examples.

    python packages/eyas-train/runs/long_training.py --output docs/results/long_training.json

For each length a process of its own trains a head by one step, with one example of that length, of which every token
counts. The target is a small Llama with random weights (two layers of 128, 65,536 positions). Memory is the highest that
the process had, less what it had before.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "runs"))  # what scripts share
from _common import numbers, parser, run, write
from _records import RECORDS
from transformers import LlamaConfig, LlamaForCausalLM

from eyas import drafters
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.files import parse_json
from eyas_train.data import Example, Examples
from eyas_train.loop import TrainConfig, train

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 2,
                         "num_key_value_heads": 1, "vocab_size": 8192, "max_position_embeddings": 65_536}  # fmt: skip


def measured(length: int, checkpointing: bool) -> dict[str, Any]:
    """Train on examples of a length, in this process."""
    torch.manual_seed(0)
    target = Target(LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), "random")
    method = drafters.find("eagle3")
    options = build_options(method.Options, {"head.layers": "0,1", "head.draft_vocab": 4096})
    drafter = method.random(target, options)
    examples = Examples()
    examples.append(Example(torch.randint(SIZES["vocab_size"], (length,)).tolist(), [True] * length))
    config = TrainConfig(steps=1, batch_tokens=length, max_length=length, warmup_steps=0, eval_every=0, save_every=0)
    config = replace(config, checkpointing=checkpointing, precision="float32")
    before, begin = psutil.Process().memory_info().rss, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        train(drafter, examples, [], config, folder)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {
        "tokens": length,
        "checkpointing": checkpointing,
        "memory_mib": round(peak / 2**20),
        "bytes_per_token": round(peak / length),
        "tokens_per_second": round(length / seconds),
    }


def main() -> None:
    lengths, one = ("2048,8192,32768", "of the examples, in tokens"), (0, "measure one length, in this process")
    output = (str(RECORDS / "long_training.json"), "the record")
    options = parser(__doc__, output=output, lengths=lengths, one=one, checkpointing=False).parse_args()
    if options.one:
        print(json.dumps(measured(options.one, options.checkpointing)))
        return
    rows = []
    for length in numbers(options.lengths):
        for checkpointing in (False, True):
            command = [sys.executable, __file__, "--one", str(length), *["--checkpointing"] * checkpointing]
            rows.append(parse_json(subprocess.run(command, check=True, capture_output=True).stdout))
            print(rows[-1])
    write(Path(options.output), {"target": SIZES, "rows": rows})


if __name__ == "__main__":
    run(main)
