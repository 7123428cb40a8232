"""The contestants of a bench, from `--methods`, `--draft`, `--heads` and the methods' own options.

An entry of --methods is NAME or NAME:option=value:..., where

    draft_with=NAME         merges another method's proposals in
    head=NAME|PATH|random   takes a head of --heads by its name, or another one, or a random one
    tree=auto|fixed         adapts the size of the tree to the machine in each cycle, or keeps it

`all` takes every method that can run here and reports what the others lack; a method that is named
must be able to run. Plain decoding and transformers' generate always take part. Without a tree
option, trees that grow are auto and the others fixed; with simulated acceptance, which depends on
no tree, all are fixed. On the embedded model static trees are its small one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.cli._load import quiet
from eyas.cli._options import parse_option
from eyas.errors import CheckpointError, EyasError, OptionError, near

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eyas.api import LLM
    from eyas.bench.contestants import Contestant, Drafting
    from eyas.drafters import Drafter

__all__ = ["HEADS", "Field", "contestants"]

HEADS = Path("out/heads")  # where `make bench-heads` puts them
VANILLA, RANDOM = "vanilla", "random"
ENTRY_OPTIONS = ("draft_with", "head", "tree=auto", "tree=fixed")  # of an entry, not of a method


@dataclass(frozen=True)
class Field:
    """Who may take part: the options of `eyas bench` that choose contestants."""

    llm: LLM
    methods: str
    drafts: Sequence[str]
    heads_folder: str | None
    embedded: bool  # no --target: the embedded heads may take part
    simulate_acceptance: str | None
    verbose: bool
    options: Mapping[str, Any]  # of methods

    @property
    def simulated(self) -> bool:
        return self.simulate_acceptance is not None


@dataclass(frozen=True)
class _Entry:
    """An entry of --methods."""

    method: str
    options: dict[str, Any]
    draft_with: str | None = None
    head: str | None = None
    tree: str | None = None  # "auto" or "fixed"


def contestants(field: Field) -> tuple[list[Contestant], dict[str, str]]:
    """(the contestants, plain decoding and transformers first; those that cannot take part, and why)."""
    from eyas import drafters
    from eyas.adaptive import auto
    from eyas.bench.contestants import Drafting
    from eyas.bench.run import reason_of
    from eyas.bench.simulate import parse_rates, simulated
    from eyas.core.verify import verify

    llm, rates = field.llm, field.simulate_acceptance
    texts = [part.strip() for part in field.methods.split(",") if part.strip()]
    every = texts == ["all"]
    texts = drafters.names() if every else texts
    verifier = verify if rates is None else simulated(parse_rates(rates))
    heads = _heads(field)
    _check_options(texts, field.options)
    entered = {VANILLA: Drafting(VANILLA, drafters.find(VANILLA)(llm.target))}
    skipped: dict[str, str] = {}
    for text in texts:
        if text == VANILLA:
            continue
        try:
            with quiet(field.verbose):
                drafter, head, mode = _drafter(field, text, heads)
        except EyasError as error:
            if not every:
                raise
            skipped[text] = str(error)
        except Exception as error:  # a method that is broken takes no other one down
            skipped[text] = reason_of(error)
        else:
            policy = auto(drafter, fallback=not field.simulated, compared=True) if mode == "auto" else None
            entered[text] = Drafting(text, drafter, _shown_head(head), verifier, policy)
    theirs = _transformers(llm, entered.values(), field.simulated, skipped)
    return [entered.pop(VANILLA), *theirs, *entered.values()], skipped


def _transformers(llm: LLM, drafting: Iterable[Drafting], plain_only: bool, skipped: dict[str, str]) -> list[Contestant]:
    """transformers' generate, plainly and with its ways of speculation, as far as they work here."""
    from eyas.bench.contestants import Question, Transformers
    from eyas.core.engine import Request
    from eyas.errors import ModelError

    candidates = [Transformers(llm.target)]
    if not plain_only:
        candidates.append(Transformers(llm.target, "transformers_prompt_lookup", lookup=True))
        assistant = _assistant(drafting)
        if assistant is not None:
            candidates.append(Transformers(llm.target, "transformers_assisted", assistant=assistant))
    working: list[Contestant] = []
    for contestant in candidates:
        try:
            with quiet():
                contestant.answer(Question("", "", 0, Request((0, 0), 3)))
        except ModelError as error:
            skipped[contestant.name] = str(error)
        else:
            working.append(contestant)
    return working


def _assistant(drafting: Iterable[Drafting]) -> PreTrainedModel | None:
    """A head that is a whole language model: it can draft for transformers as well."""
    from transformers import PreTrainedModel

    nets = (contestant.drafter.net for contestant in drafting)
    return next((net for net in nets if isinstance(net, PreTrainedModel)), None)


def _shown_head(head: str | None) -> str | None:
    """The name of a head in the summary: an embedded head without its path on this machine."""
    from eyas import tiny

    embedded = {str(path): f"embedded {name}" for name, path in tiny.HEADS.items()}
    return None if head is None else embedded.get(head, head)


def _heads(field: Field) -> dict[str, str]:
    """Method, or the name of a head that several methods read -> the head. --draft wins over --heads."""
    from eyas import checkpoints, drafters, tiny

    heads = {name: str(path) for name, path in tiny.HEADS.items()} if field.embedded else {}
    folder = Path(field.heads_folder or HEADS)
    if field.heads_folder and not folder.is_dir():
        raise OptionError(f"--heads {folder} is no folder")
    if field.heads_folder or field.embedded:
        heads |= {path.name: str(path) for path in sorted(folder.glob("*")) if path.is_dir()}
    for draft in field.drafts:
        name, _, path = draft.rpartition("=")
        if name and name not in drafters.names():
            raise OptionError(f"--draft {draft}: unknown method {name!r}; {near(name, drafters.names())}")
        heads[name or checkpoints.load(path).method] = path
    return heads


def _drafter(field: Field, text: str, heads: Mapping[str, str]) -> tuple[Drafter, str | None, str]:
    """(a method with its head and options, the head's name, "auto" or "fixed")."""
    from eyas import drafters, tiny
    from eyas.adaptive import mode_of
    from eyas.core.drafter import build_options, flags

    llm, entry = field.llm, _parsed(text)
    kind = drafters.find(entry.method)
    known = flags(kind.Options)
    asked = {
        **{name: value for name, value in field.options.items() if name in known},
        **entry.options,
    }
    options = build_options(kind.Options, tiny.with_small_tree(asked, known) if llm.target.name == "embedded" else asked)
    random_head = entry.head == RANDOM and RANDOM not in heads
    head = None
    if not random_head:
        head = heads.get(entry.head, entry.head) if entry.head else heads.get(entry.method) or heads.get(kind.reads)
    if head is None and kind.needs_weights and not (field.simulated or random_head):
        raise CheckpointError(f"{entry.method} has no head here: {_how_to_get(llm, kind.reads)}")
    if head is None and (field.simulated or random_head):
        drafter = kind.random(llm.target, options)
    else:
        drafter = kind.from_pretrained(head, llm.target, options)
    if entry.draft_with is not None:
        from eyas.drafters._merge import Merged

        drafter = Merged(drafter, _drafter(field, entry.draft_with, heads)[0])
    usual = mode_of(asked)[0] if drafter.max_tree is not None and not field.simulated else "fixed"
    return drafter, RANDOM if random_head else head, entry.tree or usual


def _how_to_get(llm: LLM, reads: str) -> str:
    """How to get a head of that kind for this target."""
    if llm.target.name == "embedded":
        return f"`make bench-heads` trains it into {HEADS / reads}, or name one: --draft {reads}=FOLDER"
    train = f"eyas train --method {reads} --target {llm.target.name} --data CHATS --output HEAD"
    return f"`{train}` trains one; name it: --draft {reads}=HEAD"


def _parsed(text: str) -> _Entry:
    """NAME:option=value:... as an entry."""
    from eyas import drafters
    from eyas.adaptive import MODES
    from eyas.core.options import list_options

    name, *parts = text.split(":")
    kind = drafters.find(name)
    known = {option.name: option for option in list_options(kind.Options)}
    options = dict[str, Any]()
    entry: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.replace("-", "_")
        if equals and (key == "draft_with" or (key == "head" and kind.reads) or (key == "tree" and value in MODES)):
            entry[key] = value
        elif key not in known or not equals:
            raise OptionError(f"--methods {text}: unknown option {key!r}; {near(key, [*known, *ENTRY_OPTIONS])}")
        else:
            try:
                options[key] = parse_option(known[key], value)
            except OptionError as error:
                raise OptionError(f"--methods {text}: {error}") from error
    return _Entry(name, options, **entry)


def _check_options(texts: Sequence[str], options: Mapping[str, Any]) -> None:
    """OptionError for a method option that none of the contestants has: it would be ignored."""
    from eyas import drafters
    from eyas.core.drafter import flags

    known = {name for text in texts for name in flags(drafters.find(text.partition(":")[0]).Options)}
    for name in options:
        if name not in known:
            raise OptionError(f"none of the methods has the option --{name.replace('_', '-')}")
