"""What decoding should give: plain loops over full forwards, without cache, tree or drafter; and a drafter that knows the answer."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eyas.core.engine import Decoder, Request, Step
from eyas.core.sampling import GumbelNoise, apply_sampling
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree
from eyas.drafters import CycleInput, Drafter, DraftSession


@torch.no_grad()
def plain_decode(model: PreTrainedModel, request: Request) -> list[int]:
    """New tokens of one request, each from a forward over the whole sequence."""
    ids, new, noise = list(request.prompt), [], GumbelNoise.of([request.sampling])
    while len(new) < request.max_new_tokens and not (new and new[-1] in request.eos):
        logits_1V = model(torch.tensor([ids]), use_cache=False).logits[0, -1:]
        seen_1V = torch.zeros_like(logits_1V, dtype=torch.bool)
        seen_1V[0, ids] = True
        scores_1V = apply_sampling(logits_1V, request.sampling, seen_1V)
        if not request.sampling.greedy:
            scores_1V = scores_1V.log_softmax(-1) + noise.gumbel(torch.tensor([[len(ids)]]), logits_1V.shape[-1])[0]
        new.append(int(scores_1V.argmax()))
        ids.append(new[-1])
    return new


def run(decoder: Decoder, requests: list[Request]) -> tuple[list[list[int]], list[Step]]:
    """All requests through one decoder; tokens in order of the requests, and every step."""
    tickets, tokens, steps = [decoder.add(r) for r in requests], {}, []
    while not decoder.finished:
        for step in decoder.step():
            tokens.setdefault(step.request, []).extend(step.tokens)
            steps.append(step)
    return [tokens[t] for t in tickets], steps


class OracleSession(DraftSession):
    """Random trees in which the right continuation is hidden, cut off at random depths."""

    def __init__(self, drafter: Oracle, rows: int) -> None:
        self.drafter, self.random = drafter, random.Random(drafter.seed)
        self.prompt: list[list[int]] = [[] for _ in range(rows)]

    def begin(self, row: int, kept: int, total: int) -> None:
        self.prompt[row] = []

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        assert position == len(self.prompt[row])
        self.prompt[row] += tokens_T.tolist()

    def draft(self, roots: CycleInput) -> Draft:
        N, depth, vocab = self.drafter.nodes, self.drafter.depth, self.drafter.target.vocab_size
        parents, tokens = [], []
        for b, root in enumerate(roots.tokens_B.tolist()):
            answer = self.drafter.answers.get(tuple(self.prompt[b]), [])
            done = int(roots.position_B[b]) - len(self.prompt[b]) + 1  # tokens of the answer already emitted
            row_parents, row_tokens, level, right = [-1], [root], [0], [True]
            for _ in range(1, N):
                open_nodes = [n for n in range(len(level)) if level[n] < depth]
                deepest_right = max(n for n in open_nodes if right[n])
                parent = self.random.choice([*open_nodes, *[deepest_right] * 3])
                used = {row_tokens[n] for n in range(len(level)) if row_parents[n] == parent}
                true = answer[done + level[parent]] if right[parent] and 0 <= done + level[parent] < len(answer) else None
                if true is not None and true not in used and self.random.random() < 0.8:
                    token = true
                else:
                    token = self.random.choice([t for t in range(vocab) if t not in used])
                row_parents.append(parent)
                row_tokens.append(token)
                level.append(level[parent] + 1)
                right.append(right[parent] and token == true)
            parents.append(row_parents)
            tokens.append(row_tokens)
        return Draft(Tree.build(torch.tensor(parents), depth), torch.tensor(tokens))


class Oracle(Drafter):
    """Knows what each prompt's answer is (prompt -> new tokens)."""

    def __init__(self, target: Target, answers: dict[tuple[int, ...], list[int]], nodes: int = 12, depth: int = 5, seed: int = 0) -> None:
        super().__init__(target)
        self.answers, self.nodes, self.depth, self.seed = answers, nodes, depth, seed

    def open(self, rows: int) -> DraftSession:
        return OracleSession(self, rows)
