"""Make a target of a real size with random weights, and prompts of given lengths: for times, not
for texts.

    python runs/random_target.py --shape llama-8b --output out/gpu/llama-8b          and out/gpu/llama-8b/prompts-1024.jsonl, ...

With `eyas bench --simulate-acceptance` everything but the acceptance is measured on it. Weights are
bfloat16. Shapes are those of the published models; `small` is for trying the commands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from _common import numbers, parser, run
from transformers import AutoConfig, AutoModelForCausalLM

LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "small": {**LLAMA, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 4096},
    "llama-300m": {**LLAMA, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 22, "num_attention_heads": 16,
                   "num_key_value_heads": 4, "vocab_size": 32000},
    "mixtral-small": {"model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 8,
                      "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8192, "num_local_experts": 8,
                      "num_experts_per_tok": 2},
    "mixtral-tiny": {"model_type": "mixtral", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
                     "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "num_local_experts": 4,
                     "num_experts_per_tok": 2},
    "llama-7b": {**LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 32, "vocab_size": 32000},
    "llama-8b": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "vocab_size": 128256},
    "mixtral-8x7b": {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
                     "num_experts_per_tok": 2, "max_position_embeddings": 32768, "tie_word_embeddings": False},
}  # fmt: skip


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    contexts = ("1024", "lengths of the prompts, separated by commas")
    made = parser(__doc__, output=None, contexts=contexts, prompts=(4, "of each length"), device=device)
    made.add_argument("--shape", choices=list(SHAPES), required=True)
    made.add_argument("--output", type=Path, required=True)
    args = made.parse_args()
    config = AutoConfig.for_model(**SHAPES[args.shape])
    if not (args.output / "config.json").exists():
        torch.manual_seed(0)
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # the config is written before the weights: whole or not at all
        partly = args.output.with_name(f"{args.output.name}.part")
        model.save_pretrained(partly)
        partly.replace(args.output)
    generator = torch.Generator().manual_seed(1)
    for length in numbers(args.contexts):
        ids = torch.randint(3, config.vocab_size, (args.prompts, length), generator=generator).tolist()
        lines = [json.dumps({"id": f"{length}-{i}", "prompt_ids": one}) for i, one in enumerate(ids)]
        (args.output / f"prompts-{length}.jsonl").write_text("\n".join(lines) + "\n")
    print(args.output)


if __name__ == "__main__":
    run(main)
