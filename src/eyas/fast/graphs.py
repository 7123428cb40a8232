"""The target's pass on a GPU as a replayed CUDA graph: the model's own forward without the launches of its thousand kernels.

A graph holds one shape: rows, new nodes, nodes, and a width of the cache that is a multiple of BUCKET. What a pass reads is copied into the
graph's own inputs, masks and slots are worked out inside, logits and features lie where the graph left them. Keys and values are read where
they lie (attention.py). Prompts, and trees that are larger than LARGEST, run as ever; so does a shape whose capture fails, with a warning.

Written and tested for its shapes on a CPU, where `capture` just runs the work again. Not yet run on a GPU.
Letters: R rows, Q new nodes, T nodes in slots.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eyas.fast.attention import packed
from eyas.kernels import Team
from eyas.target import OwnForward, Target, Work
from eyas.tree import Seen

__all__ = ["BUCKET", "GraphRunner", "cuda_capture"]

BUCKET = 256  # slots: passes attend to a multiple of this
LARGEST = 128  # new nodes
MOST = 48  # graphs that are kept; those that were not used for longest are forgotten

Captured = tuple[Seen, Callable[[], None]]  # what a run leaves, always in the same place; and how to run it again
Capture = Callable[[Callable[[], Seen]], Captured]


def cuda_capture(work: Callable[[], Seen]) -> Captured:
    """Three runs on a stream of their own, then the capture, which runs nothing."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen = work()
    graph.replay()
    return seen, graph.replay


@dataclass(frozen=True)
class _Inputs:
    """A graph's own."""

    tokens_RQ: Tensor
    position_RQ: Tensor
    length_R: Tensor
    depth_RT: Tensor
    visible_RQT: Tensor

    @classmethod
    def like(cls, work: Work) -> _Inputs:
        given = (work.tokens_RQ, work.position_RQ, work.length_R, work.depth_RT, work.visible_RQT)
        return cls(*(x.clone(memory_format=torch.contiguous_format) for x in given))

    def fill(self, work: Work) -> None:
        for name in self.__dataclass_fields__:
            getattr(self, name).copy_(getattr(work, name))


class GraphRunner:
    """Runs a target's passes by graphs."""

    name, storage = "graphs", "exact"
    threads: int | None = None
    team: Team = None

    def __init__(self, target: Target, capture: Capture = cuda_capture) -> None:
        self.target, self.capture, self.own = target, capture, OwnForward()
        self._graphs: OrderedDict[tuple[object, ...], tuple[_Inputs, Captured] | None] = OrderedDict()

    def likewise(self, other: Target) -> Target:
        return other.run_with(GraphRunner(other, self.capture))

    def head(self, target: Target, hidden: Tensor) -> Tensor:
        return self.own.head(target, hidden)

    def __call__(self, work: Work) -> Seen:
        (R, Q), T = work.tokens_RQ.shape, work.visible_RQT.shape[-1]
        if work.last_only or Q > LARGEST:
            return self.own(work)
        width = -(-work.width // BUCKET) * BUCKET
        work.cache.reserve(width)
        key = (R, Q, T, width, work.span.start, work.wants, work.cache.places)
        if key not in self._graphs:
            self._graphs[key] = self._captured(replace(work, width=width))
            if len(self._graphs) > MOST:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        if (found := self._graphs[key]) is None:
            return self._run(work)
        inputs, (seen, again) = found
        inputs.fill(work)
        again()
        return Seen(seen.logits_BNV, seen.features_BNF.clone())  # features are kept for longer than until the next pass

    def _captured(self, work: Work) -> tuple[_Inputs, Captured] | None:
        inputs = _Inputs.like(work)
        mine = replace(work, **{name: getattr(inputs, name) for name in inputs.__dataclass_fields__})

        try:
            return inputs, self.capture(lambda: self._run(mine))
        except RuntimeError as error:
            warnings.warn(f"a pass cannot be captured as a CUDA graph and runs as it is: {str(error).splitlines()[0]}", stacklevel=2)
            return None

    def _run(self, work: Work) -> Seen:
        """The cache is told where the new nodes go, then the model runs."""
        T, Q = work.visible_RQT.shape[-1], work.tokens_RQ.shape[1]
        work.cache.at(work.span, work.length_R[:, None] + torch.arange(T - Q, T, device=work.length_R.device), work.width)
        with packed(self.target.family.layers):
            return self.own(work)
