"""Sockets, into which the optional parts of eyas plug. The parts that decode (core, the methods, api) import
none of these parts; they ask a socket.

    socket       what plugs in                                              in eyas     without it
    runner       computes the target and the draft net faster               runners     the model's own forward
    policy       decides in each cycle how much is drafted                  adaptive    the method's own options, in every cycle
    feature      makes what one request may ask for beyond sampling         features    such a request is refused
    structure    makes constraints of a schema, a grammar, an expression    grammar     such a request is refused
    target       knows targets that are neither a folder nor a hub id,      named,      folders, hub ids, and models that
                 and heads for targets                                      targets     the caller has loaded

A plug is a module with the names of the socket's protocol. The module `plug_runner` of any package
directly in eyas plugs into the socket "runner"; so does the module that an entry point of another distribution
names, and it comes first:

    [project.entry-points."eyas.runner"]
    mine = "my_package.my_runner"

A plug that cannot be imported is left out, with a warning. This module knows no plug.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from eyas.core.dormant import Policy
from eyas.core.drafter import Drafter
from eyas.core.features import Constraint
from eyas.core.requests import Request, RequestFeature
from eyas.core.sampling import Processor
from eyas.core.target import Target
from eyas.errors import OptionError

__all__ = [
    "FEATURE",
    "POLICY",
    "RUNNER",
    "STRUCTURE",
    "TARGET",
    "KnownHead",
    "KnownTarget",
    "PlainRunner",
    "Socket",
    "Source",
]

PACKAGE = Path(__file__).parents[1]


class RunnerPlug(Protocol):
    """Chooses who computes: a `Runner` with its `Ops`."""

    def with_fastest_runner(
        self, target: Target, kernels: str, own: bool, weights: str, activations: str, kv: str, draft_weights: str
    ) -> Target:
        """Return the target with a runner. The parameters are as for `eyas.load`; `own`: eyas has loaded
        the model."""

    def warm_up(self, drafter: Drafter) -> None:
        """Prepare everything that would otherwise delay the first answer."""


class PolicyPlug(Protocol):
    """Makes policies."""

    def make_controller(self, drafter: Drafter, fallback: bool = True, compared: bool = False) -> Policy | None:
        """Return a new policy for a drafter; None if there is nothing to decide.

        Args:
            fallback: whether another method may draft where this one does not pay.
            compared: whether the drafter runs against others, so that measurements must be exact.
        """


class Structures(Protocol):
    """The structures of one tokenizer."""

    def constraint(self, structure: Any, eos: Collection[int]) -> Constraint:
        """Return a constraint at the beginning of its text, which tokens of `eos` may end."""


class StructurePlug(Protocol):
    """Reads the keywords of `generate` that say which texts an answer may have."""

    def structure_of(self, asked: Mapping[str, Any]) -> Any:
        """Return the structure that the keywords ask for; None if any text will do. Raise OptionError or
        InputError if they cannot be followed."""

    def json_rule(self, schema: Any) -> str:
        """Return a JSON schema as the right side of a rule in a grammar of Lark's form."""

    def Grammars(self, tokenizer: Any, vocab_size: int) -> Structures:
        """Return the structures of a tokenizer, compiled once."""


class FeaturePlug(Protocol):
    """Makes the features of requests."""

    def features(
        self,
        params: Mapping[str, Any],
        processors: tuple[Processor, ...],
        constraint: Constraint | None,
        prediction: tuple[int, ...],
    ) -> tuple[RequestFeature, ...]:
        """Return the features that these keywords of `LLM.generate` ask for.

        Args:
            params: "logprobs", "prompt_logprobs" and, for Steps with raw logits, "raw_logits".
            prediction: token ids of the text that the answer probably repeats.
        """

    def check_processor(self, processor: Processor) -> Processor:
        """Return a logits processor. Raise InputError if it cannot be asked about every node of a tree."""

    def traced(self, request: Request) -> Request:
        """Return the request whose Steps have traces, for display."""


class Source(NamedTuple):
    """The source of a target."""

    place: Any  # a local folder, a hub id, or a model of transformers
    name: str  # the target's name
    tokenizer: Any = None  # as `eyas.load` takes it; None: from `place`


class KnownTarget(NamedTuple):
    """A plug's knowledge about a target."""

    open: Callable[[Any], AbstractContextManager[Source]]  # from the `tokenizer` of `eyas.load`; until it is loaded
    takes_file: bool = False  # whether `gguf_file` may be given with its name
    best: str | None = None  # the default method
    heads: Mapping[str, Path] = {}  # its own heads, by the kind of head that a method reads


class KnownHead(NamedTuple):
    """A head for a target."""

    head: str  # a folder or a hub id
    method: str  # the kind of head, by which methods read it
    listed: str = ""  # who lists it, and for which target; "": it comes with the target
    of_family: bool = False  # it was made for a family of models: where it cannot be had, others do


class TargetPlug(Protocol):
    """Finds targets by the name that a caller of `eyas.load` names."""

    def find_target(self, target: Any, gguf_file: str | None, cache: bool, stored: bool = False) -> KnownTarget | None:
        """Return the target that these arguments of `eyas.load` name; None if this plug does not know it.
        Read nothing large yet.

        Args:
            stored: whether its weights may stay in their files, as compiled kernels on a CPU will pack them.
        """

    def heads_for(self, target: Target) -> Sequence[KnownHead]:
        """Return heads for a loaded target, in the order in which they are tried. Nothing is fetched."""


P = TypeVar("P")


class Socket(Generic[P]):
    """A socket and its plugs, which are imported when they are first asked for."""

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def plugs(self) -> tuple[P, ...]:
        """All plugs; the plugs of other distributions come first."""
        return tuple(plug for name, load in self._found() if (plug := _load(name, load)) is not None)

    @property
    def plug(self) -> P | None:
        """The first plug, for sockets that use one; None if there is none."""
        return next(iter(self.plugs), None)

    def plug_for(self, asked: str) -> P:
        """Return the first plug. Raise OptionError if there is none; `asked` names the part that needs it."""
        if (plug := self.plug) is None:
            raise OptionError(f"{asked}: no installed part of eyas serves this (nothing plugs into {self.name!r})")
        return plug

    def _found(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        for entry in entry_points(group=f"eyas.{self.name}"):
            yield entry.value, entry.load
        for file in sorted(PACKAGE.glob(f"*/plug_{self.name}.py")):
            module = f"{PACKAGE.name}.{file.parent.name}.{file.stem}"
            yield module, partial(importlib.import_module, module)


def _load(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ImportError as error:
        warnings.warn(f"{name} is left out: {error}", stacklevel=2)
        return None


class PlainRunner:
    """Serves as the plug where none is in the socket `RUNNER`: the model's own forward."""

    def with_fastest_runner(
        self, target: Target, kernels: str, own: bool, weights: str, activations: str, kv: str, draft_weights: str
    ) -> Target:
        """Return the target as it is. Raise OptionError if more is asked for."""
        asked = {"weights": weights, "activations": activations, "kv": kv, "draft_weights": draft_weights}
        rounded = [f"{name} {value}" for name, value in asked.items() if value != "exact"]
        if rounded or kernels not in ("auto", "off"):
            RUNNER.plug_for(rounded[0] if rounded else f"kernels {kernels}")
        return target

    def warm_up(self, drafter: Drafter) -> None:
        """Do nothing."""


RUNNER = Socket[RunnerPlug]("runner")
POLICY = Socket[PolicyPlug]("policy")
FEATURE = Socket[FeaturePlug]("feature")
STRUCTURE = Socket[StructurePlug]("structure")
TARGET = Socket[TargetPlug]("target")
