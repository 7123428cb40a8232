"""From one GPU to a fleet, by arithmetic: requests a second, where drafting stops paying, GPU hours of a corpus.

    python packages/eyas-ray/runs/scale_arithmetic.py --output docs/results/scale_arithmetic.json

For targets of 8B and 70B parameters (Llama 3's dimensions) with a typical EAGLE-3 head, `eyas_lab.predict` gives the seconds
of a pass and of a draft for so many requests at a time. A request has 1,024 tokens of context and an answer of 250.
The prompts' own passes are left out, and so is what a server and a network take. So many requests as do not fit the
GPU's memory with the weights (keys and values in bfloat16) are left out too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3] / "runs"))  # what scripts share
from _common import parser, run, write

from eyas_lab.predict import MACHINES, Prediction, Settings, read_head, read_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131072, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
MODELS = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
CASES = (("8B", "h100", "bfloat16"), ("8B", "h200", "bfloat16"), ("70B", "h100", "int4"), ("70B", "h200", "int8"))
ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
CONTEXT, ANSWER = 1024, 250
MEMORY = {"h100": 80e9, "h200": 141e9}
WEIGHT_BYTES = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
CORPORA = {"10B": 10e9, "1T": 1e12}


def fits(name: str, machine: str, weights: str, rows: int) -> bool:
    """Return whether the weights and the keys and values of so many requests fit into the GPU's memory."""
    parameters = {"8B": 8.03e9, "70B": 70.6e9}[name]
    kv = 2 * 2 * MODELS[name]["num_hidden_layers"] * LLAMA["num_key_value_heads"] * LLAMA["head_dim"]
    return parameters * WEIGHT_BYTES[weights] + rows * (CONTEXT + ANSWER) * kv < MEMORY[machine]


def figures(name: str, machine: str, weights: str, rows: int) -> dict[str, Any]:
    """Return what one GPU makes with so many requests at a time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**LLAMA, **MODELS[name]}))
        model = read_model(str(path))
    head = read_head(None, "eagle3", model)
    prediction = Prediction(model, MACHINES[machine], head, Settings(weights, rows, CONTEXT))
    best = prediction.trees(1)[0]
    plain = rows / prediction.plain()
    drafted = plain * max(1.0, best.speedup)
    return {
        "target": name,
        "machine": machine,
        "weights": weights,
        "rows": rows,
        "plain tokens/s": round(plain),
        "speed-up": round(best.speedup, 2),
        "interval": [round(best.low, 2), round(best.high, 2)],
        "nodes": best.tree.nodes,
        "tokens/s": round(drafted),
        "answers/s": round(drafted / ANSWER, 2),
        "GPU hours": {corpus: round(tokens / drafted / 3600) for corpus, tokens in CORPORA.items()},
    }


def main() -> None:
    options = parser(__doc__).parse_args()
    write(
        options.output,
        {
            "context": CONTEXT,
            "answer": ANSWER,
            "cases": [figures(*case, rows) for case in CASES for rows in ROWS if fits(*case, rows)],
        },
    )


if __name__ == "__main__":
    run(main)
