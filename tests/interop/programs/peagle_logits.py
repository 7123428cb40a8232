"""Run by the speculators library's Python: logits of its P-EAGLE class at the slots of a text and at the masks behind them.

    peagle_logits.py STEPS INPUTS HEAD...    INPUTS: safetensors with "tokens" [T], and "features.0" [T, F], ... for each head

For head i go into HEAD/logits.safetensors: the logits [M, V'], the slots [M] behind which they stand, and the depths [M] (0: the
slot's own, 1: of the first mask, ...). The class draws which masks it computes.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from speculators.models.peagle import core


def main() -> None:
    steps, inputs, heads = int(sys.argv[1]), load_file(sys.argv[2]), sys.argv[3:]
    draw = core.generate_cod_sample_indices
    drawn: list[tuple[torch.Tensor, torch.Tensor]] = []

    def recorded(**given: object) -> tuple[torch.Tensor, torch.Tensor]:
        drawn.append(draw(**given))
        return drawn[-1]

    core.generate_cod_sample_indices = recorded
    following = inputs["tokens"].roll(-1)[None]
    for i, head in enumerate(heads):
        config = SpeculatorModelConfig.from_pretrained(head)
        config.transformer_layer_config._attn_implementation = "eager"
        model = core.PEagleDraftModel.from_pretrained(head, config=config, dtype=torch.float32).eval()
        logits: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(
            lambda module, given, result, kept=logits: kept.append(result[0].detach().clone())
        )
        documents, nothing = torch.zeros_like(following), torch.zeros(1, following.shape[1], model.hidden_size)
        every_mask = {"num_depths": steps, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
        loss = resolve_loss_config("kl_div", "eager")  # its other form needs a GPU
        with torch.no_grad():
            model(
                inputs[f"features.{i}"][None],
                following,
                documents,
                verifier_last_hidden_states=nothing,
                loss_config=loss,
                **every_mask,
            )
        slots, depths = drawn[-1]
        save_file({"logits": logits[0], "slots": slots, "depths": depths}, Path(head) / "logits.safetensors")


if __name__ == "__main__":
    main()
