"""Plain decoding by full forwards, without cache, tree or drafter; and a drafter that knows the answers."""

import copy
import hashlib
import inspect
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from eyas.core.drafter import CycleInput
from eyas.core.engine import Decoder, Request, Step
from eyas.core.requests import check_steps
from eyas.core.sampling import GumbelNoise, Sampling, apply_sampling
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree
from eyas.drafters import Drafter, DraftSession
from wishes import constraint_of

# The settings that most tests of losslessness share.
SAMPLINGS = (
    Sampling(),
    Sampling(1.0, seed=3),
    Sampling(0.7, top_k=20, top_p=0.9, seed=4),
    Sampling(1.3, repetition_penalty=1.2, seed=5),
)


_decoded: dict[tuple[Any, ...], list[int]] = {}  # many tests ask the same small models for the same texts
LARGEST_KEPT = 1 << 20  # bytes of a model whose texts are kept: to compare more costs more than to decode


def plain_decode(model: PreTrainedModel, request: Request, cached: bool = False) -> list[int]:
    """New tokens of one request, each from a forward over all of the text, or with transformers' cache (`cached`).
    Computed once for all models of the same class, configuration and numbers."""
    asked = (request.prompt, request.max_new_tokens, request.eos, request.min_tokens, request.sampling, cached)
    if constraint_of(request) is not None or (same := _identity(model)) is None:
        return _plain_decode(model, request, cached)
    key = (*same, repr(asked))
    if key not in _decoded:
        _decoded[key] = _plain_decode(model, request, cached)
    return list(_decoded[key])


def generated(model: PreTrainedModel, prompt: Sequence[int], new: int) -> list[int]:
    """The greedy ids of transformers' own generate, which nothing ends early."""
    ids = torch.tensor([list(prompt)], device="cpu")
    settings = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, "eos_token_id": -1}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


def _identity(model: PreTrainedModel) -> tuple[Any, ...] | None:
    """What the texts of a model depend on; None if that is large, or not all of it is in its numbers."""
    parts, tensors = list(model.modules()), [*model.named_parameters(), *model.named_buffers()]
    if sum(tensor.nbytes for _, tensor in tensors) > LARGEST_KEPT:
        return None
    if any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in parts):
        return None
    if any(hasattr(part, "lora_A") for part in parts):  # which adapter is active is no number
        return None
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device.type != "cpu" for _, tensor in tensors):
        return None
    digest = hashlib.blake2b()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    kinds = tuple(map(type, parts))
    return kinds, model.config.to_json_string(), model.config._attn_implementation, digest.hexdigest()


@torch.no_grad()
def _plain_decode(model: PreTrainedModel, request: Request, cached: bool) -> list[int]:
    ids, new, noise = list(request.prompt), [], GumbelNoise.from_sampling([request.sampling])
    cache: DynamicCache | None = None
    constraint = constraint_of(request)
    while len(new) < request.max_new_tokens and not (new and new[-1] in request.eos):
        if cached:
            logits_1V, cache = _by_cache(model, ids, cache)
        else:
            logits_1V = model(torch.tensor([ids]), use_cache=False).logits[0, -1:]
        adjust(request, new, logits_1V)
        rest = replace(
            request.sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=()
        )
        if constraint is not None:
            logits_1V[~constraint.mask([-1], ids[-1:])] = -torch.inf
        scores_1V = apply_sampling(logits_1V, rest)
        if not request.sampling.greedy:
            scores_1V = scores_1V.log_softmax(-1) + noise.gumbel(torch.tensor([[len(ids)]]), logits_1V.shape[-1])[0]
        new.append(int(scores_1V.argmax()))
        ids.append(new[-1])
        if constraint is not None:
            constraint.accept(new[-1:])
            if constraint.finished:
                break
    return new


def _by_cache(model: PreTrainedModel, ids: list[int], cache: DynamicCache | None) -> tuple[Tensor, DynamicCache]:
    """Logits [1, V] of the last token, and the cache after it. No cache: all tokens are read."""
    name = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
    new = ids if cache is None else ids[-1:]
    cache = DynamicCache(config=model.config) if cache is None else cache
    positions = {} if name == "cache_params" else {"position_ids": torch.arange(len(ids) - len(new), len(ids))[None]}
    return model(torch.tensor([new]), use_cache=True, **{name: cache}, **positions).logits[0, -1:], cache


def adjust(request: Request, new: list[int], logits_1V: Tensor) -> None:
    """Biases, penalties and min_tokens written out token by token, in place."""
    sampling = request.sampling
    for token, bias in sampling.logit_bias:
        logits_1V[0, token] += bias
    for token in {*request.prompt, *new}:
        score = logits_1V[0, token]
        logits_1V[0, token] = score * sampling.repetition_penalty if score < 0 else score / sampling.repetition_penalty
    for token, count in Counter(new).items():
        logits_1V[0, token] -= sampling.frequency_penalty * count
        logits_1V[0, token] -= sampling.presence_penalty
    if len(new) < request.min_tokens:
        logits_1V[0, list(request.eos)] = -torch.inf


def run(decoder: Decoder, requests: list[Request]) -> tuple[list[list[int]], list[Step]]:
    """All requests through one decoder; new tokens in the order of the requests, and every step."""
    tickets, tokens, steps = [decoder.add(r) for r in requests], {}, []
    while not decoder.finished:
        for step in check_steps(decoder.step()):
            tokens.setdefault(step.request_id, []).extend(step.tokens)
            steps.append(step)
    return [tokens[t] for t in tickets], steps


def run_at_random(decoder: Decoder, requests: list[Request], seed: int) -> tuple[list[list[int]], list[Step]]:
    """Like `run`, with requests that are added at random moments while others run."""
    dice, tickets, tokens, steps = random.Random(seed), list[int](), dict[int, list[int]](), list[Step]()
    while len(tickets) < len(requests) or not decoder.finished:
        if len(tickets) < len(requests) and (decoder.finished or dice.random() < 0.4):
            tickets.append(decoder.add(requests[len(tickets)]))
        for step in decoder.step():
            tokens.setdefault(step.request_id, []).extend(step.tokens)
            steps.append(step)
    return [tokens[request_id] for request_id in tickets], steps


@contextmanager
def widths_of(model: Any, axis: int = 1) -> Iterator[list[int]]:
    """How many tokens (axis 1), or rows (axis 0), each forward of a model's layers reads."""
    widths: list[int] = []
    hook = model.model.layers[0].register_forward_hook(lambda module, args, out: widths.append(args[0].shape[axis]))
    yield widths
    hook.remove()


class OracleSession(DraftSession):
    """Drafts random trees in which the right continuation is hidden, cut off at random depths."""

    def __init__(self, drafter: "Oracle", rows: int) -> None:
        self.drafter, self.random = drafter, random.Random(drafter.seed)
        self.prompt: list[list[int]] = [[] for _ in range(rows)]

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        self.prompt[row] = []

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        assert position == len(self.prompt[row])
        self.prompt[row] += tokens_T.tolist()

    def draft(self, roots: CycleInput) -> Draft:
        parents, tokens = [], []
        for b, root in enumerate(roots.tokens_B.tolist()):
            answer = self.drafter.answers.get(tuple(self.prompt[b]), [])
            emitted = int(roots.position_B[b]) - len(self.prompt[b]) + 1
            row_parents, row_tokens = self._row(root, answer[emitted:] if emitted >= 0 else [])
            parents.append(row_parents)
            tokens.append(row_tokens)
        here = roots.tokens_B.device
        return Draft(
            Tree.build(torch.tensor(parents, device=here), self.drafter.depth), torch.tensor(tokens, device=here)
        )

    def _row(self, root: int, continuation: list[int]) -> tuple[list[int], list[int]]:
        """Parents and tokens of one random tree; siblings have different tokens."""
        parents, tokens, level, on_path = [-1], [root], [0], [True]
        for _ in range(1, self.drafter.nodes):
            open_nodes = [n for n in range(len(level)) if level[n] < self.drafter.depth]
            deepest_right = max(n for n in open_nodes if on_path[n])
            parent = self.random.choice([*open_nodes, *[deepest_right] * 3])
            used = {tokens[n] for n in range(len(level)) if parents[n] == parent}
            right = continuation[level[parent]] if on_path[parent] and level[parent] < len(continuation) else None
            if right is not None and right not in used and self.random.random() < 0.8:
                token = right
            else:
                token = self.random.choice([t for t in range(self.drafter.target.vocab_size) if t not in used])
            parents.append(parent)
            tokens.append(token)
            level.append(level[parent] + 1)
            on_path.append(on_path[parent] and token == right)
        return parents, tokens


class Oracle(Drafter):
    """Knows the answer to each prompt: prompt -> new tokens."""

    def __init__(
        self, target: Target, answers: dict[tuple[int, ...], list[int]], nodes: int = 12, depth: int = 5, seed: int = 0
    ) -> None:
        super().__init__(target)
        self.answers, self.nodes, self.depth, self.seed = answers, nodes, depth, seed

    def open(self, rows: int) -> DraftSession:
        return OracleSession(self, rows)


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model in float64. The distance of two forwards in float32 is judged by the model's own from it."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # torch multiplies no groups in float64
    return exact
