"""Run by the speculators library's Python: an MTP module of its class with random weights, and its logits.

    mtp_logits.py FOLDER    FOLDER/layer.json: the target's config; FOLDER/inputs.safetensors: "tokens" [T], "features" [T, D], and
                            "embed" and "lm_head" [V, D] of the target

The module goes into FOLDER/head, the logits of the first step, [N, V], into FOLDER/logits.safetensors.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp.config import MTPSpeculatorConfig
from speculators.models.mtp.core import MTPDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig


def main() -> None:
    folder = Path(sys.argv[1])
    inputs = load_file(folder / "inputs.safetensors")
    config = MTPSpeculatorConfig(
        transformer_layer_config=json.loads((folder / "layer.json").read_text()),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    torch.manual_seed(0)
    model = MTPDraftModel(config=config).float().eval()
    with torch.no_grad():
        for _, weight in model.mtp_layers.named_parameters():
            weight.normal_(0, 0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5)
        model.embed_tokens.weight.copy_(inputs["embed"])
        model.lm_head.weight.copy_(inputs["lm_head"])
        logits, *_ = model(inputs["tokens"][None], inputs["features"][None])
    del model.verifier_lm_head  # as the library does once the target is read
    model.save_pretrained(folder / "head")
    save_file({"logits": logits[0][0].contiguous()}, folder / "logits.safetensors")


if __name__ == "__main__":
    main()
