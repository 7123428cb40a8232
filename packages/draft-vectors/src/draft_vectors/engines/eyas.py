"""eyas, in this process: `python -m draft_vectors draft_vectors.engines.eyas:Eyas`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draft_vectors.arrays import Floats
from draft_vectors.decode import Case
from draft_vectors.runner import Answer, Drafted, Engine, head_folder
from eyas.core.drafter import CycleInput
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.drafters import find
from eyas.targets.loading import load_target

__all__ = ["Eyas"]


class Eyas(Engine):
    """eyas' engine without kernels, the nets in torch."""

    name = "eyas"
    decoder_options: dict[str, Any]  # of eyas' Decoder; empty but in tests, which plant faults

    def __init__(self, data: Path, dtype: str = "float32") -> None:
        super().__init__(data, dtype)
        self.target = self.load_target()
        self.drafters: dict[str, Any] = {}
        self.decoder_options = {}

    def load_target(self) -> Target:
        """Load the target of the vectors on the CPU."""
        return load_target(self.data / "target", dtype=self.dtype, device="cpu")

    def drafter(self, case: Case) -> Any:
        """Return the head of a case, with the options of its tree."""
        if case.name not in self.drafters:
            method = find(case.method)
            options = build_options(method.Options, options_of(case))
            self.drafters[case.name] = method.from_pretrained(head_folder(self.data, case), self.target, options)
        return self.drafters[case.name]

    def run(self, case: Case, prompt: Sequence[int], new_tokens: int, **options: Any) -> tuple[list[int], list[int]]:
        """Return the new tokens, and how many drafted tokens each cycle accepted."""
        decoder = Decoder(self.target, self.drafter(case), **self.decoder_options, **options)
        decoder.add(Request(tuple(prompt), new_tokens, sampling_of(case)))
        ids, accepted = list[int](), list[int]()
        while not decoder.finished:
            for step in decoder.step():
                ids += step.tokens
                accepted += [len(step.path) - 1] if step.path else []
        return ids, accepted

    def generate(self, case: Case, prompt: Sequence[int]) -> Answer:
        return Answer(*self.run(case, prompt, case.new_tokens))

    @torch.inference_mode()
    def draft(self, case: Case, text: Sequence[int]) -> Drafted:
        drafter, length = self.drafter(case), len(text) - 1
        tokens, session = torch.tensor(text[:-1]), drafter.open(1)
        session.begin(0, 0, length)
        session.prefill(0, tokens, self.target.encode(tokens[None], drafter.feature_layers)[0], 0)
        draft = session.draft(self.root(case, text[-1], length))
        log_q = None if draft.log_q_BN is None else draft.log_q_BN[0].numpy()
        return Drafted(draft.tokens_BN[0].tolist(), draft.tree.parents_BN[0].tolist(), log_q)

    def root(self, case: Case, token: int, position: int) -> CycleInput:
        """Return the input of the cycle that begins with this root."""
        samplings, here = (sampling_of(case),), torch.tensor([position])
        noise = GumbelNoise.from_sampling(samplings)
        return CycleInput(torch.tensor([token]), here, torch.ones(1, dtype=torch.bool), samplings, noise, position)

    @torch.inference_mode()
    def target_logits(self, text: Sequence[int]) -> Floats:
        states = self.target.encode(torch.tensor([list(text)]), (self.target.num_layers,))
        return np.asarray(self.target.head(states[0]).float().detach().numpy(), np.float32)


def sampling_of(case: Case) -> Sampling:
    """Return the sampling of a case: greedy, or temperature 1 with its seed."""
    return Sampling() if case.rule == "greedy" else Sampling(1.0, seed=case.seed)


def options_of(case: Case) -> dict[str, Any]:
    """Return the options of eyas' method for a case."""
    if case.method in ("eagle1", "medusa"):
        choices = case.choices if case.tree == "static" else f"chain-{case.depth}"
        return {"tree.choices": choices, **({} if case.method == "eagle1" else {"tree.noise": "none"})}
    paper = {"tree.noise": "none", "tree.confidence_temperature": 1.0}
    window = {"window.sink": case.window[0], "window.size": case.window[1]} if case.window else {}
    return {"tree.nodes": case.nodes, "tree.depth": case.depth, "tree.branch": case.branch, **paper, **window}
