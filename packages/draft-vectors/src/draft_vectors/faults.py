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


@dataclass(frozen=True)
class Fault:
    """A fault: the place to look at, and the function that plants it."""

    says: str
    plant: Callable[[Decoder], bool]


def put(changed: Decoder | Head, **values: object) -> bool:
    """Set attributes, and return True."""
    vars(changed).update(values)
    return True


def last(decoder: Decoder) -> int:
    """Return the number of the target's states after the final norm."""
    return len(decoder.target.layers)


def shift_layers(decoder: Decoder, by: int) -> bool:
    """Let the head read the states of other layers, and return whether the target has them."""
    decoder.head.layers = tuple(k + by for k in decoder.head.layers)
    return max(decoder.head.layers) < last(decoder)


def no_final_norm(decoder: Decoder) -> bool:
    """Let the head read the last layer's output, and return whether it read that after the final norm."""
    read = decoder.head.layers
    return put(decoder.head, layers=(last(decoder) + 1,)) and read == (last(decoder),)


def leave_out(head: Head, names: dict[type[Head], str]) -> bool:
    """Leave out the norm that is named for the head's class."""
    name = next((name for kind, name in names.items() if isinstance(head, kind)), None)
    return name is not None and put(head, without={name})


def rope_interleaved(decoder: Decoder) -> bool:
    """Give queries and keys the order of GPT-J."""
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


def other_rope_theta(decoder: Decoder) -> bool:
    """Give the head's layers another theta."""
    head = decoder.head
    if isinstance(head, Eagle1 | Block):
        for layer in head.nets:
            layer.theta *= 100
    return isinstance(head, Eagle1 | Block)


def runs_on_drafts(decoder: Decoder) -> bool:
    """Return whether the head reads tokens that it has drafted, or masks that stand for them."""
    return isinstance(decoder.head, Eagle1 | Block) and decoder.case.depth > 1


def block_cut_short(decoder: Decoder) -> bool:
    """Give the block as many slots as tokens are drafted, and return whether it had more."""
    head = decoder.head
    if not isinstance(head, Block):
        return False
    whole, head.block = head.block, decoder.case.depth + head.first_slot
    return bool(head.block < whole)


def no_markov_head(decoder: Decoder) -> bool:
    """Set the matrix of DSpark's Markov head to zero."""
    head, name = decoder.head, "markov_head.markov_w2.weight"
    return isinstance(head, DSpark) and put(head, tensors={**head.tensors, name: 0 * head.tensors[name]})


class Repeated(Noise):
    """Noise that every cycle begins anew."""

    def of_target(self, length: int, depth: int, vocab: int) -> Floats:
        return self.gumbel(TARGET, depth + 1, vocab)

    def of_tests(self, length: int, depth: int, siblings: int) -> Doubles:
        return super().of_tests(0, depth, siblings)

    def of_drafts(self, length: int, nodes: int, node: int, vocab: int) -> Floats:
        return super().of_drafts(0, nodes, node, vocab)


FEATURE_NORMS: dict[type[Head], str] = {
    PEagle: "layers.0.hidden_norm", Eagle3: "midlayer.hidden_norm", Mtp: "layers.0.hnorm", Block: "hidden_norm"
}  # fmt: skip
OUTPUT_NORMS: dict[type[Head], str] = {Eagle3: "norm", Mtp: "layers.0.post_norm", Block: "norm"}
FAULTS = {
    # what the head reads
    "layers_one_above": Fault(
        "the head reads the states one layer above: the ids in config.json count inputs of layers, and the engine takes outputs",
        lambda d: d.head.layers[0] != last(d) and shift_layers(d, 1),
    ),
    "layers_one_below": Fault(
        "the head reads the states one layer below: the ids in config.json count outputs of layers, and the engine takes inputs",
        lambda d: shift_layers(d, -1),
    ),
    "no_final_norm": Fault(
        "the head reads the last layer's output before the target's final norm, not after it", no_final_norm
    ),
    "pairs_not_shifted": Fault(
        "pairs are (feature of token t, token t): the head needs the token after it, t+1",
        lambda d: put(d.head, shifted=False) and isinstance(d.head, Eagle1),
    ),
    # norms and RoPE of the head
    "no_norm_of_features": Fault(
        "the norm of the target's features, or of the hidden state that takes their place, is left out",
        lambda d: leave_out(d.head, FEATURE_NORMS),
    ),
    "no_norm_of_output": Fault(
        "the head's own norm before the lm_head is left out", lambda d: leave_out(d.head, OUTPUT_NORMS)
    ),
    "output_carried_normed": Fault(
        "the next step reads the head's output after its norm, as in EAGLE-3.1; EAGLE-3 reads it before",
        lambda d: isinstance(d.head, Eagle3) and put(d.head, carries_normed=True) and not isinstance(d.head, PEagle),
    ),
    "rope_interleaved": Fault(
        "RoPE pairs dimension i with i+1 (GPT-J's order); these files have LLaMA's halves, i with i + h/2",
        rope_interleaved,
    ),
    "other_rope_theta": Fault(
        "the head's RoPE has another theta than its config.json says (1,000,000 for 10,000)", other_rope_theta
    ),
    "draft_positions_one_too_large": Fault(
        "drafted tokens, or masks, have positions one too large in the head; committed ones are right",
        lambda d: put(d.head, offset=1) and runs_on_drafts(d),
    ),
    # from the head's output to tokens
    "draft_ids_without_map": Fault(
        "draft ids are taken for the target's: the map d2t is not applied",
        lambda d: put(d.head, ids=np.arange(len(d.head.ids))) and isinstance(d.head, Eagle3),
    ),
    "slots_one_off": Fault(
        "slots of the block predict other tokens: DFlash's slot i the token at its own place, DSpark's slot i the next one",
        lambda d: isinstance(d.head, Block) and put(d.head, first_slot=1 - d.head.first_slot),
    ),
    "block_cut_short": Fault(
        "the block has as many slots as tokens are drafted; the head was trained with more, and slots see each other",
        block_cut_short,
    ),
    "no_markov_head": Fault("DSpark's Markov head is not added to the logits", no_markov_head),
    # caches and verification
    "stale_draft_keys": Fault(
        "after a rejection the head's cache keeps what it had drafted: cut it back to the committed tokens",
        lambda d: put(d.head, stale=True) and runs_on_drafts(d) and d.case.window is None,
    ),
    "stale_target_keys": Fault(
        "after a rejection the target's cache keeps the rejected tokens, so the text differs from plain decoding",
        lambda d: put(d, stale=True),
    ),
    "accepted_path_not_moved": Fault(
        "the target's cache keeps the first nodes of the tree in place of the accepted ones, so the text differs from plain decoding",
        lambda d: put(d, unmoved=True) and d.case.branch > 1,
    ),
    "target_positions_one_too_large": Fault(
        "the target's pass gives nodes below the root positions one too large, so the text differs from plain decoding",
        lambda d: put(d, offset=1),
    ),
    "lenient_acceptance": Fault(
        "the engine accepts drafts with twice their chance, or among the target's two best, so the text differs from plain decoding",
        lambda d: put(d, lenient=2),
    ),
    "noise_read_twice": Fault(
        "random numbers are read twice: every cycle begins with the same ones again",
        lambda d: put(d, noise=Repeated(d.case.seed)) and d.case.rule != "greedy",
    ),
}
