"""Replace the head that drafts by another one of the same method and sizes, between two cycles.

A drafter keeps more of its weights than the net: copies that are rounded or packed for kernels
(`decoding_net`), a builder of whole trees (`fused_tree_builder`), a compiled forward. All of these are attributes
of the drafter itself, and sessions ask the drafter for them in every cycle. So a drafter that takes over all
attributes of another one drafts with the other's weights from the next cycle on, and nothing old is left.

Sessions keep the keys and values that the old head made of their texts. Drafts may fit less until those
requests end. The texts do not change, as every draft is verified by the distribution that it was drawn from.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from eyas.core.drafter import Drafter
from eyas.drafters import DraftMethod
from eyas.drafters.tools import EagleMethod
from eyas.errors import CheckpointError, OptionError


class HeadMismatchError(CheckpointError):
    """A head that cannot take the place of the one in use."""


def head_of(drafter: Drafter) -> EagleMethod:
    """Return the method whose head may be replaced.

    Raises:
        OptionError: the drafter has none, or its cycles are recorded with the addresses of its weights.
    """
    method = drafter
    while method.parts:
        method = method.parts[0]
    if not isinstance(method, EagleMethod):
        raise OptionError("only heads of EAGLE's methods and MTP modules can be replaced or can learn while they serve")
    if method.target.runner.records_cycles or method.target.runner.backend is not None:
        raise OptionError("cycles are recorded on this device, with the weights in them: use kernels off")
    if method.target.adapters is not None:
        raise OptionError("several adapters share the head, each with a view of its own: load the target with one")
    return method


def load_like(drafter: EagleMethod, source: str | Path) -> EagleMethod:
    """Return the head of a folder or hub id, ready to take the drafter's place.

    Raises:
        CheckpointError: there is no head of this method.
        HeadMismatchError: it has other sizes.
    """
    head = type(drafter).from_pretrained(source, drafter.target, drafter.options)
    check_same(drafter, head, str(source))
    assert isinstance(head, EagleMethod), "it is of the drafter's class"
    prepare(head)
    return head


def check_same(drafter: EagleMethod, head: Any, source: str) -> None:
    """Raise HeadMismatchError unless the head has the method and the sizes of the drafter's."""
    if type(head) is not type(drafter):
        raise HeadMismatchError(f"{source} holds a head of another method than the one in use")
    ours, theirs = _sizes(drafter), _sizes(head)
    for name in ours | theirs:
        own, other = ours.get(name), theirs.get(name)
        if own != other:
            shown, in_use = ("missing" if size is None else size for size in (other, own))
            raise HeadMismatchError(
                f"{source}: its {name} is {shown}, but {in_use} in the head in use: start with that head to use it"
            )


def _sizes(head: EagleMethod) -> dict[str, Any]:
    """Return the properties that sessions, and copies of the weights, rely on."""
    return {
        "architecture": getattr(head.net, "architecture", None),
        "layer": head.shape,
        "list of fused layers": head.feature_layers,
        "window": head.window(),
        "draft vocabulary": None if head.draft_ids_v is None else len(head.draft_ids_v),
        "embedding table": None if head.embed_tokens is None else tuple(head.embed_tokens.shape),
        **{name: (tuple(value.shape), value.dtype) for name, value in head.net.state_dict().items()},
    }


def prepare(head: DraftMethod) -> None:
    """Make the copies that decoding needs, so that no cycle waits for them."""
    for name in kept_names(head):
        getattr(head, name)


def put(drafter: EagleMethod, head: EagleMethod) -> None:
    """Let the drafter be the head from now on. Call it between cycles."""
    drafter.__dict__ = dict(vars(head))


def kept_names(drafter: Drafter) -> set[str]:
    """Return the names of all that a drafter computes once, of which each may hold its weights."""
    kinds = type(drafter).__mro__
    return {name for kind in kinds for name, value in vars(kind).items() if isinstance(value, cached_property)}
