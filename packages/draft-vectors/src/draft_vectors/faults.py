"""Faults that engines had, planted in the reference. The runner compares the numbers of each with a failing engine's.

A fault changes a `Decoder` before it reads anything, and returns whether the head of the case can have it. A shift of all
positions is not among them: RoPE knows differences only, so it changes no number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from draft_vectors.arrays import Doubles, Floats
from draft_vectors.decode import TARGET, Decoder, Noise
from draft_vectors.heads import Block, DSpark, Eagle1, Eagle3, Head, Mtp, PEagle

__all__ = ["FAULTS", "Fault"]

FAULTS: dict[str, Fault] = {}


@dataclass(frozen=True)
class Fault:
    """A fault: the place to look at, and the function that plants it."""

    says: str
    plant: Callable[[Decoder], bool]


def fault(says: str) -> Callable[[Callable[[Decoder], bool]], Callable[[Decoder], bool]]:
    """Add the function below to `FAULTS`, under its name."""

    def add(plant: Callable[[Decoder], bool]) -> Callable[[Decoder], bool]:
        FAULTS[plant.__name__] = Fault(says, plant)
        return plant

    return add


# --- what the head reads


def last(decoder: Decoder) -> int:
    """Return the number of the target's states after the final norm."""
    return len(decoder.target.layers)


def shift_layers(decoder: Decoder, by: int) -> bool:
    """Let the head read the states of other layers, and return whether the target has them."""
    layers = tuple(k + by for k in decoder.head.layers)
    decoder.head.layers = layers
    return max(layers) < last(decoder)


@fault(
    "the head reads the states one layer above: the ids in config.json count inputs of layers, and the engine takes outputs"
)
def layers_one_above(decoder: Decoder) -> bool:
    return decoder.head.layers[0] != last(decoder) and shift_layers(decoder, 1)


@fault(
    "the head reads the states one layer below: the ids in config.json count outputs of layers, and the engine takes inputs"
)
def layers_one_below(decoder: Decoder) -> bool:
    return shift_layers(decoder, -1)


@fault("the head reads the last layer's output before the target's final norm, not after it")
def no_final_norm(decoder: Decoder) -> bool:
    found = decoder.head.layers == (last(decoder),)
    decoder.head.layers = (last(decoder) + 1,)
    return found


@fault("pairs are (feature of token t, token t): the head needs the token after it, t+1")
def pairs_not_shifted(decoder: Decoder) -> bool:
    decoder.head.shifted = False
    return isinstance(decoder.head, Eagle1)


# --- norms and RoPE of the head


def leave_out(head: Head, names: dict[type[Head], str]) -> bool:
    """Leave out the norm that is named for the head's class."""
    for kind, name in names.items():
        if isinstance(head, kind):
            head.without.add(name)
            return True
    return False


@fault("the norm of the target's features, or of the hidden state that takes their place, is left out")
def no_norm_of_features(decoder: Decoder) -> bool:
    names = {
        PEagle: "layers.0.hidden_norm",
        Eagle3: "midlayer.hidden_norm",
        Mtp: "layers.0.hnorm",
        Block: "hidden_norm",
    }
    return leave_out(decoder.head, names)


@fault("the head's own norm before the lm_head is left out")
def no_norm_of_output(decoder: Decoder) -> bool:
    return leave_out(decoder.head, {Eagle3: "norm", Mtp: "layers.0.post_norm", Block: "norm"})


@fault("the next step reads the head's output after its norm, as in EAGLE-3.1; EAGLE-3 reads it before")
def output_carried_normed(decoder: Decoder) -> bool:
    head = decoder.head
    if isinstance(head, Eagle3):
        head.carries_normed = True
    return isinstance(head, Eagle3) and not isinstance(head, PEagle)


@fault("RoPE pairs dimension i with i+1 (GPT-J's order); these files have LLaMA's halves, i with i + h/2")
def rope_interleaved(decoder: Decoder) -> bool:
    head = decoder.head
    if not isinstance(head, Eagle1 | Block):
        return False
    for layer in head.nets:
        order = np.arange(layer.head_dim).reshape(-1, 2).T.ravel()
        changed = dict(layer.tensors)
        for part in ("q", "k"):
            name = f"{layer.prefix}self_attn.{part}_proj.weight"
            weight = changed[name].reshape(-1, layer.head_dim, changed[name].shape[1])
            changed[name] = weight[:, order].reshape(changed[name].shape)
        layer.tensors = changed
    return True


@fault("the head's RoPE has another theta than its config.json says (1,000,000 for 10,000)")
def other_rope_theta(decoder: Decoder) -> bool:
    head = decoder.head
    if isinstance(head, Eagle1 | Block):
        for layer in head.nets:
            layer.theta *= 100
    return isinstance(head, Eagle1 | Block)


def runs_on_drafts(decoder: Decoder) -> bool:
    """Return whether the head reads tokens that it has drafted, or masks that stand for them."""
    return isinstance(decoder.head, Eagle1 | Block) and decoder.case.depth > 1


@fault("drafted tokens, or masks, have positions one too large in the head; committed ones are right")
def draft_positions_one_too_large(decoder: Decoder) -> bool:
    decoder.head.offset = 1
    return runs_on_drafts(decoder)


# --- from the head's output to tokens


@fault("draft ids are taken for the target's: the map d2t is not applied")
def draft_ids_without_map(decoder: Decoder) -> bool:
    decoder.head.ids = np.arange(len(decoder.head.ids))
    return isinstance(decoder.head, Eagle3)


@fault(
    "slots of the block predict other tokens: DFlash's slot i the token at its own place, DSpark's slot i the next one"
)
def slots_one_off(decoder: Decoder) -> bool:
    head = decoder.head
    if isinstance(head, Block):
        head.first_slot = 1 - head.first_slot
    return isinstance(head, Block)


@fault("the block has as many slots as tokens are drafted; the head was trained with more, and slots see each other")
def block_cut_short(decoder: Decoder) -> bool:
    head = decoder.head
    if not isinstance(head, Block):
        return False
    whole, head.block = head.block, decoder.case.depth + head.first_slot
    return bool(head.block < whole)


@fault("DSpark's Markov head is not added to the logits")
def no_markov_head(decoder: Decoder) -> bool:
    name = "markov_head.markov_w2.weight"
    if isinstance(decoder.head, DSpark):
        decoder.head.tensors = {**decoder.head.tensors, name: 0 * decoder.head.tensors[name]}
    return isinstance(decoder.head, DSpark)


# --- caches and verification


@fault("after a rejection the head's cache keeps what it had drafted: cut it back to the committed tokens")
def stale_draft_keys(decoder: Decoder) -> bool:
    decoder.head.stale = True
    return runs_on_drafts(decoder) and decoder.case.window is None


@fault("after a rejection the target's cache keeps the rejected tokens, so the text differs from plain decoding")
def stale_target_keys(decoder: Decoder) -> bool:
    decoder.stale = True
    return True


@fault(
    "the target's cache keeps the first nodes of the tree in place of the accepted ones, so the text differs from plain decoding"
)
def accepted_path_not_moved(decoder: Decoder) -> bool:
    decoder.unmoved = True
    return decoder.case.branch > 1


@fault("the target's pass gives nodes below the root positions one too large, so the text differs from plain decoding")
def target_positions_one_too_large(decoder: Decoder) -> bool:
    decoder.offset = 1
    return True


@fault(
    "the engine accepts drafts with twice their chance, or among the target's two best, so the text differs from plain decoding"
)
def lenient_acceptance(decoder: Decoder) -> bool:
    decoder.lenient = 2
    return True


class Repeated(Noise):
    """Noise that every cycle begins anew."""

    def of_target(self, length: int, depth: int, vocab: int) -> Floats:
        return self.gumbel(TARGET, depth + 1, vocab)

    def of_tests(self, length: int, depth: int, siblings: int) -> Doubles:
        return super().of_tests(0, depth, siblings)

    def of_drafts(self, length: int, nodes: int, node: int, vocab: int) -> Floats:
        return super().of_drafts(0, nodes, node, vocab)


@fault("random numbers are read twice: every cycle begins with the same ones again")
def noise_read_twice(decoder: Decoder) -> bool:
    decoder.noise = Repeated(decoder.case.seed)
    return decoder.case.rule != "greedy"
