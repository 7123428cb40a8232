"""How many draft tokens of a chain the target accepts, without decoding.

The target's greedy answer is known, so a head runs once at every place of it. It reads the true tokens where a chain
reads its own drafts: they are equal until a draft is refused, and later drafts do not count. The result says for every
place which drafts are right. Decoding with chains follows from it exactly.

Letters: N tokens of a text, M places (roots of chains), K depths, D hidden, F features, S slots of a block, V
vocabulary, W slots of a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.blocks import BlockMethod
from eyas.core.target import Target
from eyas.drafters import DraftMethod, peagle
from eyas.drafters.tools import EagleMethod
from eyas.errors import InputError
from eyas_lab.metrics import Cycle

__all__ = ["DEPTH", "AsGiven", "Inputs", "KeptAnswer", "cycles", "keep", "run_lengths", "which_are_right"]

DEPTH = 5  # draft tokens of a chain


class Inputs(NamedTuple):
    """The inputs of a head that no field of a file sets."""

    raw: bool = False  # the target's last hidden states before its final norm, instead of after it
    late: int = 0  # places by which features lag behind their tokens
    offset: int = 0  # added to the positions of a block, or of each further step of a chain


AsGiven = Inputs()


@dataclass(frozen=True)
class KeptAnswer:
    """A prompt with the target's greedy answer, and the hidden states at each of its tokens."""

    ids_N: Tensor
    first: int  # index of the answer's first token
    # by layer, as `Target.tap` counts them; the last one more is the last layer's output before the final norm
    states: tuple[Tensor, ...]

    @property
    def places(self) -> int:
        """M: the roots after which at least one token follows."""
        return max(0, len(self.ids_N) - 1 - self.first)

    def shortened(self, tokens: int) -> KeptAnswer:
        """Return the beginning of it, with at most so many tokens of the answer."""
        end = self.first + tokens
        return replace(self, ids_N=self.ids_N[:end], states=tuple(state[:end] for state in self.states))

    def features(self, layers: Sequence[int], inputs: Inputs) -> Tensor:
        """Return the features [N, F] that a head reads."""
        final = len(self.states) - 2
        chosen = [self.states[final + 1 if inputs.raw and k == final else k] for k in layers]
        features_NF = torch.cat(chosen, dim=-1)
        return features_NF.roll(inputs.late, dims=0) if inputs.late else features_NF


@torch.inference_mode()
def keep(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> KeptAnswer:
    """Read a text once, and keep the inputs of all layers of the target."""
    ids_N, layers = torch.tensor([*prompt, *answer], device=target.device), range(target.num_layers + 1)
    raw: list[Tensor] = []

    def after(module: Any, args: Any, output: Any) -> None:
        raw.append(output if isinstance(output, Tensor) else output[0])

    hook = target.family.layers[-1].register_forward_hook(after)
    try:
        states_NF = target.encode(ids_N[None], layers)[0]
    finally:
        hook.remove()
    return KeptAnswer(ids_N, len(prompt), (*states_NF.chunk(len(layers), dim=-1), raw[0].reshape(len(ids_N), -1)))


@torch.inference_mode()
def which_are_right(drafter: DraftMethod, answer: KeptAnswer, depth: int, inputs: Inputs = AsGiven) -> Tensor:
    """Return bool [M, K]: whether the draft at this depth is the answer's token, if all drafts before it are. After the
    answer's end nothing is right.

    Raises:
        InputError: the head is of a kind that drafts no chains here.
    """
    if isinstance(drafter, BlockMethod):
        steps = _block_steps(drafter, answer, inputs)
    elif isinstance(drafter, EagleMethod):
        steps = _eagle_steps(drafter, answer, inputs)
    else:
        raise InputError(
            f"heads of {drafter.head_format} are not examined: give one of EAGLE-1, EAGLE-3, P-EAGLE, MTP, DFlash or DSpark"
        )
    ids_N, root_M = answer.ids_N, answer.first + torch.arange(answer.places, device=answer.ids_N.device)
    right_MK = torch.zeros(answer.places, depth, dtype=torch.bool, device=ids_N.device)
    for step, logits_MV in zip(range(depth), steps, strict=False):
        token_M = logits_MV.argmax(-1)
        draft_ids_v = drafter.draft_ids_v
        token_M = token_M if draft_ids_v is None else draft_ids_v[token_M]
        goal_M = root_M + 1 + step
        right_MK[:, step] = (token_M == ids_N[goal_M.clamp(max=len(ids_N) - 1)]) & (goal_M < len(ids_N))
    return right_MK.cpu()


def _eagle_steps(drafter: EagleMethod, answer: KeptAnswer, inputs: Inputs) -> Iterator[Tensor]:
    """Yield the logits [M, V or v] of each depth, by a net that reads pairs (feature of a token, next token)."""
    net: Any = drafter.net
    session: Any = drafter.open(1)
    cache = session.cache
    ids_N, device = answer.ids_N, answer.ids_N.device
    features_NF = answer.features(drafter.feature_layers, inputs).to(drafter.dtype)
    to_inputs = getattr(drafter, "net_inputs", None)  # of EAGLE-1's ablation
    features_NF = features_NF if to_inputs is None else to_inputs(ids_N, features_NF)
    pairs = len(ids_N) - 1
    slot_M = torch.arange(answer.first - 1, answer.first - 1 + answer.places, device=device)
    masks = isinstance(drafter, peagle.Method)

    def run(hidden_ND: Tensor, ids: Tensor, position_N: Tensor, begin: int, visible_NW: Tensor) -> Tensor:
        slots_1N = torch.arange(begin, begin + len(ids), device=device)[None]
        cache.prepare(range(1), lambda: slots_1N, begin + len(ids))
        cache.set_mask(torch.zeros(1, dtype=torch.long, device=device), visible_NW[None])
        return net(hidden_ND[None], drafter.embed(ids).to(drafter.dtype)[None], position_N[None], cache)[0]  # type: ignore[no-any-return]

    index_N = torch.arange(pairs, device=device)
    visible_NW = index_N[:, None] >= index_N
    hidden_MD = run(net.fuse(features_NF[:-1]), ids_N[1:], index_N, 0, visible_NW)[slot_M]
    visible_MW, step = visible_NW[slot_M], 0
    while True:
        yield drafter.head(hidden_MD)
        step += 1
        next_M = ids_N[(slot_M + 1 + step).clamp(max=pairs)]
        if masks:
            hidden_MD = net.fuse(net.mask_hidden[None]).expand(len(slot_M), -1)
            next_M = torch.full_like(next_M, drafter.mask_token)  # type: ignore[attr-defined]
        own_MM = torch.eye(len(slot_M), dtype=torch.bool, device=device)
        visible_MW = torch.cat([visible_MW, own_MM], dim=1)
        position_M = slot_M + step * (1 + inputs.offset)
        hidden_MD = run(hidden_MD, next_M, position_M, pairs + (step - 1) * len(slot_M), visible_MW)


class _Context:
    """A store of a layer's keys and values that joins a block's to the text's."""

    def __init__(self, key_1KNh: Tensor, value_1KNh: Tensor) -> None:
        self.kept = key_1KNh, value_1KNh

    def update(self, key_MKSh: Tensor, value_MKSh: Tensor, *others: object) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the text and of each block, [M, K, N + S, h] each."""
        key, value = (
            torch.cat([kept.expand(len(own), -1, -1, -1), own], dim=2)
            for kept, own in zip(self.kept, (key_MKSh, value_MKSh), strict=True)
        )
        return key, value


def _block_steps(drafter: BlockMethod, answer: KeptAnswer, inputs: Inputs) -> Iterator[Tensor]:
    """Yield the logits [M, V or v] of each depth, by one pass over a block at every place."""
    net, block_format = drafter.net, drafter.block_format
    ids_N, S = answer.ids_N, block_format.block
    N, device = len(ids_N), ids_N.device
    features_NF = answer.features(drafter.feature_layers, inputs).to(drafter.dtype)
    context_1ND, position_1N = net.context(features_NF)[None], torch.arange(N, device=device)[None]
    stores = [
        _Context(*(x.transpose(1, 2) for x in layer.attention.rotated_key_value(context_1ND, position_1N)))
        for layer in net.typed_layers
    ]
    root_M = answer.first + torch.arange(answer.places, device=device)
    slot_MS = root_M[:, None] + torch.arange(S, device=device)
    block_MS = torch.full_like(slot_MS, block_format.mask_token)
    block_MS[:, 0] = ids_N[root_M]
    # the slots of the text, then the slots of the block, which a session has after its root
    place_MW = torch.cat([position_1N.expand(len(root_M), N), slot_MS], dim=1)
    text_MW = torch.arange(N + S, device=device) < N
    open_MSW = (~text_MW | (place_MW < root_M[:, None]))[:, None].expand(-1, S, -1)
    masks = []
    for layer in range(len(net.layers)):
        shown_MSW = block_format.visible(layer, root_M, N + S)
        if shown_MSW is not None:
            shown_MSW = shown_MSW.gather(2, place_MW[:, None].expand(-1, S, -1))
        masks.append((open_MSW if shown_MSW is None else open_MSW & shown_MSW)[:, None])
    hidden_MSD = net(drafter.embed(block_MS), slot_MS + inputs.offset, stores, masks)[:, block_format.first_slot :]
    logits_MSV = drafter.head(hidden_MSD, net)
    for level in range(block_format.levels):
        parent_M1 = ids_N[(root_M + level).clamp(max=N - 1)][:, None]
        yield drafter.level_logits(net, logits_MSV, hidden_MSD, parent_M1, level)[:, 0]


def run_lengths(right_MK: Tensor) -> Tensor:
    """Return how many drafts are accepted in a chain from each place, float [M]."""
    return right_MK.float().cumprod(1).sum(1)


def cycles(right_MK: Tensor) -> Iterator[Cycle]:
    """Yield the cycles of decoding by chains, from the first place to the last token of the answer."""
    places, depth = right_MK.shape
    place = 0
    while place < places:
        offered = min(depth, places - place)
        accepted = int(run_lengths(right_MK[place : place + 1, :offered])[0])
        emitted = min(accepted + 1, places - place)
        tested = accepted + (accepted < offered)
        yield Cycle(emitted, accepted, 0.0, tested=tested)
        place += emitted
