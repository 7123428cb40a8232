"""transformers, in this process: `python -m draft_vectors draft_vectors.engines.transformers:Transformers`.

Its `generate(use_mtp=True)` runs each MTP module once in a cycle. It has no EAGLE, no Medusa, and of DFlash only the loop: the net
is code that comes with a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from draft_vectors.arrays import Floats
from draft_vectors.decode import Case
from draft_vectors.runner import Answer, Engine

__all__ = ["Transformers"]


class Transformers(Engine):
    """transformers' own models and loops."""

    name = "transformers"

    def __init__(self, data: Path, dtype: str = "float32") -> None:
        super().__init__(data, dtype)
        kind = getattr(torch, dtype)
        self.model: Any = AutoModelForCausalLM.from_pretrained(data / "target", dtype=kind)
        self.model.train(False)
        self.model.config.num_mtp_layers = 1
        self.module: Any = MtpModel(self.model, 1)
        self.module.layers.load_state_dict(
            {
                name.removeprefix("layers."): weight
                for name, weight in load_file(data / "mtp" / "model.safetensors").items()
            }
        )
        self.module.to(kind).eval()

    def generate(self, case: Case, prompt: Sequence[int]) -> Answer | None:
        if case.method != "mtp" or case.depth > 1 or case.rule != "greedy":
            return None
        matches, candidates = list[int](), MTPCandidateGenerator.get_candidates

        def counted(generator: Any, *arguments: Any, **more: Any) -> Any:
            matches.append(more["n_last_matches"])
            return candidates(generator, *arguments, **more)

        options: dict[str, Any] = {
            "max_new_tokens": case.new_tokens,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        with (
            mock.patch.object(MtpModel, "from_pretrained", return_value=self.module),
            mock.patch.object(MTPCandidateGenerator, "get_candidates", counted),
        ):
            ids = self.model.generate(torch.tensor([list(prompt)]), use_mtp=True, **options)[0, len(prompt) :]
        # the first call is before the prompt is read, the second after it; each further one tells what the cycle before accepted
        return Answer(ids.tolist(), matches[2:])

    @torch.no_grad()
    def target_logits(self, text: Sequence[int]) -> Floats:
        return np.asarray(self.model(torch.tensor([list(text)])).logits[0].float().numpy(), np.float32)
