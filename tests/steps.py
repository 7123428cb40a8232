"""Hand-made Steps, of whose figures every number can be worked out on paper."""

from collections.abc import Sequence

import torch

from eyas.core.requests import Step
from eyas.core.tree import Draft, Tree

PARTS = {"draft": 0.1, "target": 0.4, "verify": 0.2, "commit": 0.1}  # seconds by stage

# A fork, whose second branch is one deeper, and padding:  0 --- 1 --- 3      4: no candidate
#                                                            |--- 2 --- 5 --- 6
FORK = ((-1, 0, 0, 1, 0, 2, 5), (True, True, True, True, False, True, True))


def step(
    accepted: int,
    path: Sequence[int],
    tree: tuple[Sequence[int], Sequence[bool]] = FORK,
    emitted: int | None = None,
    finish: str | None = None,
) -> Step:
    """A cycle that accepted `path`; `accepted` tokens of it are emitted, and the bonus unless `emitted` is less."""
    parents, candidates = (torch.tensor([x]) for x in tree)
    draft = Draft(Tree.build(parents, 3, candidates), torch.arange(parents.shape[1])[None])
    count = accepted + 1 if emitted is None else emitted
    return Step(1, tuple(range(count)), finish, tuple(path), draft, seconds=0.5, stage_seconds=PARTS)
