"""Run by the speculators library's Python: logits of its EAGLE-3 class in the steps of the
training-time test.

    speculators_logits.py STEPS INPUTS HEAD...    INPUTS: safetensors with "tokens" [T], and "features.0" [T, F], ... for each head

The logits of head i, [steps, T, V'], go into HEAD/logits.safetensors.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModelConfig
from speculators.models.eagle3 import Eagle3DraftModel


def main() -> None:
    steps, inputs, heads = int(sys.argv[1]), load_file(sys.argv[2]), sys.argv[3:]
    following = inputs["tokens"].roll(-1)[None]
    for i, head in enumerate(heads):
        config = SpeculatorModelConfig.from_pretrained(head)
        config.transformer_layer_config._attn_implementation = "eager"
        model = Eagle3DraftModel.from_pretrained(head, config=config, dtype=torch.float32).eval()
        logits: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(
            lambda module, given, result, kept=logits: kept.append(result[0].detach().clone())
        )
        with torch.no_grad():
            model(inputs[f"features.{i}"][None], following, torch.zeros_like(following), ttt_steps=steps)
        save_file({"logits": torch.stack(logits)}, Path(head) / "logits.safetensors")


if __name__ == "__main__":
    main()
