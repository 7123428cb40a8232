"""SafeAILab's code, the package eagle-llm 1.2.1, in this process:
`python -m draft_vectors draft_vectors.engines.safeailab:SafeAILab`.

It is EAGLE-1 with static trees. The vectors' random numbers stand in for `torch.multinomial` and `random.random`, so recursive
rejection is compared too. `make interop` of eyas installs it in .venv-reference.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from eagle.model import cnets, ea_model, utils_c  # type: ignore[import-not-found]
from safetensors.torch import load_file

from draft_vectors.arrays import Floats
from draft_vectors.decode import ACCEPT, DRAFT, TARGET, Case, Noise
from draft_vectors.runner import Answer, Drafted, Engine

__all__ = ["SafeAILab"]


class SafeAILab(Engine):
    """EAGLE-1 as its authors published it in April 2024."""

    name = "SafeAILab's code"

    def __init__(self, data: Path, dtype: str = "float32") -> None:
        super().__init__(data, dtype)
        with tempfile.TemporaryDirectory() as head, mock.patch.object(ea_model, "AutoTokenizer"):
            tensors = load_file(data / "eagle1" / "model.safetensors")
            tensors["embed_tokens.weight"] = load_file(data / "target" / "model.safetensors")[
                "model.embed_tokens.weight"
            ]
            torch.save(
                tensors, Path(head) / "pytorch_model.bin"
            )  # their code reads a pickle, with the target's embeddings
            (Path(head) / "config.json").write_text((data / "eagle1" / "config.json").read_text())
            places = {"base_model_path": str(data / "target"), "ea_model_path": head}
            self.model = ea_model.EaModel.from_pretrained(**places, torch_dtype=getattr(torch, dtype)).eval()
        self.model.tokenizer = SimpleNamespace(eos_token_id=None)

    def generate(self, case: Case, prompt: Sequence[int]) -> Answer | None:
        if case.method != "eagle1":
            return None
        run = _Run(case, len(prompt))
        return Answer(run.ids(self.model, prompt, case.new_tokens), run.accepted)

    def draft(self, case: Case, text: Sequence[int]) -> Drafted:
        run = _Run(case, len(text) - 1, text[-1])
        run.ids(self.model, text[:-1], 1)
        parents = [-1, *(0 if len(path) == 1 else run.number[path[:-1]] for path in run.number)]
        return Drafted(run.trees[0], parents)

    @torch.no_grad()
    def target_logits(self, text: Sequence[int]) -> Floats:
        ea_model.reset_tree_mode(self.model)
        return np.asarray(self.model.base_model(torch.tensor([list(text)])).logits[0].float().numpy(), np.float32)


class _Run:
    """One text: it watches their functions, and gives them the random numbers of the vectors."""

    def __init__(self, case: Case, length: int, root: int | None = None) -> None:
        self.case, self.noise, self.root = case, Noise(case.seed), root
        paths = case.choices or tuple((0,) * depth for depth in range(1, case.depth + 1))
        self.number = {path: n for n, path in enumerate(paths, 1)}  # of each node below the root
        parents = sorted({path[:-1] for path in paths}, key=lambda path: (len(path), path))
        self.levels = [[self.number.get(path, 0) for path in parents if len(path) == d] for d in range(case.depth)]
        self.length = length - 1  # of the text before the root; the first token follows a root, so to say
        self.path, self.level, self.depth, self.sibling = 0, 0, 0, 0
        self.accepted, self.trees = list[int](), list[list[int]]()

    def ids(self, model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
        choices = [list(path) for path in self.number]
        model.ea_layer.tree_buffer = utils_c.generate_tree_buffers(choices, device="cpu")
        judge, grow = ea_model.evaluate_posterior, cnets.Model.topK_genrate

        def judged(*arguments: Any) -> Any:
            self.depth = self.sibling = 0
            best, self.path, rest = judge(*arguments)
            self.accepted.append(int(self.path))
            self.trees.append(arguments[6][0].tolist())
            return best, self.path, rest

        def grown(net: Any, states: Any, input_ids: Any, *arguments: Any, **more: Any) -> Any:
            self.length, self.level = input_ids.shape[1] - 1, 0
            return grow(net, states, input_ids, *arguments, **more)

        with (
            mock.patch.object(ea_model, "evaluate_posterior", judged),
            mock.patch.object(cnets.Model, "topK_genrate", grown),
            mock.patch.object(torch, "multinomial", self.choose),
            mock.patch.object(random, "random", partial(_Uniform, self)),
        ):
            temperature = float(self.case.rule != "greedy")
            text = model.eagenerate(
                torch.tensor([list(prompt)]), temperature, max_new_tokens=new_tokens, tree_choices=choices
            )
        new: list[int] = text[0, len(prompt) :].tolist()
        return new[:new_tokens]

    def choose(self, p: torch.Tensor, count: int, replacement: bool = False) -> torch.Tensor:
        """Stand in for torch.multinomial."""
        if count == 1 and self.root is not None:
            return torch.full((*p.shape[:-1], 1), self.root)
        places = [(TARGET, self.length + 1 + int(self.path))]
        if count > 1:
            size = 1 + len(self.number)
            places = [(DRAFT, self.length * size + number) for number in self.levels[self.level]]
            self.level += 1
        g = torch.from_numpy(np.stack([self.noise.gumbel(*place, p.shape[-1]) for place in places]))
        return (p.log() + g.view_as(p)).topk(count).indices


class _Uniform(float):
    """A number of the vectors, which sees whether its test accepts."""

    run: _Run

    def __new__(cls, run: _Run) -> _Uniform:
        u = run.noise.uniform(ACCEPT, run.length + run.depth + 1, run.sibling + 1)[-1]
        made = super().__new__(cls, u)
        made.run = run
        run.sibling += 1
        return made

    def __le__(self, other: Any) -> bool:
        accepts = float(self) <= float(other)
        if accepts:
            self.run.depth, self.run.sibling = self.run.depth + 1, 0
        return accepts
