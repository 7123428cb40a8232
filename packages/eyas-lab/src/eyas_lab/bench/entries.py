"""The contestants of a bench, from `--methods`, `--draft`, `--heads` and the methods' own options.

An entry of --methods is NAME or NAME:option=value:..., where

    draft_with=NAME         merges another method's proposals in
    head=NAME|PATH|random   takes a head of --heads by its name, or another one, or a random one
    tree=auto|fixed         adapts the size of the tree to the machine in each cycle, or keeps it

`all` takes every method that can run here and reports why the others cannot; a method that is named must be
able to run. Plain decoding and transformers' generate always take part. Without a tree option, trees that grow
are auto and the others fixed; with simulated acceptance, which depends on no tree, all are fixed. On the
embedded model static trees are its small one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from eyas import checkpoints, drafters
from eyas.api import LLM, new_policy
from eyas.arguments import MODES, mode_of
from eyas.core.drafter import Drafter
from eyas.core.engine import Request
from eyas.core.options import build_options, option_defaults
from eyas.core.verify import verify
from eyas.drafters import DraftMethod
from eyas.errors import CheckpointError, EyasError, ModelError, OptionError, near
from eyas.option_texts import list_options, parse_option
from eyas_lab.bench.contestants import Contestant, Drafting, Question, Transformers
from eyas_lab.bench.run import VANILLA, reason_of
from eyas_lab.bench.simulate import parse_rates, simulated
from eyas_lab.small_tree import with_small_tree

__all__ = ["HEADS", "Entrants", "contestants"]

HEADS = Path("out/heads")  # where `make bench-heads` puts them
RANDOM = "random"
ENTRY_OPTIONS = ("draft_with", "head", "tree=auto", "tree=fixed")  # options of an entry, not of a method


@dataclass(frozen=True)
class Entrants:
    """The options of `eyas bench` that choose its contestants."""

    llm: LLM
    methods: str
    drafts: Sequence[str]
    heads_folder: str | None
    embedded: bool  # no --target: the embedded heads may take part
    simulate_acceptance: str | None
    options: Mapping[str, Any]  # options of methods

    @property
    def simulated(self) -> bool:
        """Whether draft tokens are accepted at random."""
        return self.simulate_acceptance is not None


def contestants(entrants: Entrants) -> tuple[list[Contestant], dict[str, str]]:
    """(the contestants, plain decoding and transformers first; those that cannot take part, and
    why)."""
    llm, rates = entrants.llm, entrants.simulate_acceptance
    texts = [part.strip() for part in entrants.methods.split(",") if part.strip()]
    every = texts == ["all"]
    texts = drafters.names() if every else texts
    verifier = verify if rates is None else simulated(parse_rates(rates))
    heads = _heads(entrants)
    _check_options(texts, entrants.options)
    skipped: dict[str, str] = {}
    entered: list[Drafting] = []
    for text in dict.fromkeys(texts):
        if text == VANILLA:
            continue
        try:
            drafter, head, mode = _drafter(entrants, text, heads)
        except EyasError as error:
            if not every:
                raise
            skipped[text] = str(error)
        except Exception as error:  # a method that is broken takes no other one down
            skipped[text] = reason_of(error)
        else:
            policy = new_policy(drafter, fallback=not entrants.simulated, compared=True) if mode == "auto" else None
            entered.append(Drafting(text, drafter, _shown_head(llm, head), verifier, policy))
    plain = Drafting(VANILLA, drafters.find(VANILLA)(llm.target))
    return [plain, *_transformers(entrants, entered, skipped), *entered], skipped


def _transformers(entrants: Entrants, entered: Sequence[Drafting], skipped: dict[str, str]) -> list[Transformers]:
    """transformers' generate, plainly and with its ways of speculation, as far as they work
    here."""
    target = entrants.llm.target
    candidates = [Transformers(target)]
    if not entrants.simulated:
        candidates.append(Transformers(target, "transformers_prompt_lookup", lookup=True))
        # a head that is a whole language model can draft for transformers as well
        nets = [entry.drafter.net for entry in entered if isinstance(entry.drafter.net, PreTrainedModel)]
        candidates += [Transformers(target, "transformers_assisted", assistant=net) for net in nets[:1]]
    working = []
    for contestant in candidates:
        try:
            contestant.answer(Question("", "", 0, Request((0, 0), 3)))
            working.append(contestant)
        except ModelError as error:
            skipped[contestant.name] = str(error)
    return working


def _shown_head(llm: LLM, head: str | None) -> str | None:
    """Return the name of a head in the summary: the target's own without its path on this machine."""
    known = {path: f"{llm.target.name} {kind}" for kind, path in llm.own_heads.items()}
    return None if head is None else known.get(head, head)


def _heads(entrants: Entrants) -> dict[str, str]:
    """Method, or the name of a head that several methods read -> the head. --draft wins over
    --heads."""
    heads = entrants.llm.own_heads
    folder = Path(entrants.heads_folder or HEADS)
    if entrants.heads_folder and not folder.is_dir():
        raise OptionError(f"--heads {folder} is not a folder")
    if entrants.heads_folder or entrants.embedded:
        heads |= {path.name: str(path) for path in sorted(folder.glob("*")) if path.is_dir()}
    for draft in entrants.drafts:
        name, _, path = draft.rpartition("=")
        if name and name not in drafters.names():
            raise OptionError(f"--draft {draft}: unknown method {name!r}; {near(name, drafters.names())}")
        heads[name or checkpoints.load(path).method] = path
    return heads


def _drafter(entrants: Entrants, text: str, heads: Mapping[str, str]) -> tuple[Drafter, str | None, str]:
    """(a method with its head and options, the head's name, "auto" or "fixed")."""
    llm, (name, kind, given, entry) = entrants.llm, _parsed(text)
    known = option_defaults(kind.Options)
    values = {**{option: value for option, value in entrants.options.items() if option in known}, **given}
    options = build_options(kind.Options, with_small_tree(values, known) if llm.target.name == "embedded" else values)
    wanted = entry.get("head")
    is_random = wanted == RANDOM and RANDOM not in heads
    head = heads.get(wanted, wanted) if wanted else heads.get(name) or heads.get(kind.head_format)
    if is_random or (head is None and entrants.simulated):
        drafter: Drafter = kind.random(llm.target, options)
    elif head is None and kind.needs_weights:
        raise CheckpointError(f"{name} has no head here: {_how_to_get(llm, kind.head_format)}")
    else:
        drafter = kind.from_pretrained(head, llm.target, options)
    if "draft_with" in entry:
        drafter = drafters.merge(drafter, _drafter(entrants, entry["draft_with"], heads)[0])
    usual = mode_of(values)[0] if drafter.max_tree is not None and not entrants.simulated else "fixed"
    return drafter, head, entry.get("tree", usual)


def _how_to_get(llm: LLM, head_format: str) -> str:
    """Return how to get a head of this format for this target."""
    if llm.target.name == "embedded":
        return f"`make bench-heads` trains it into {HEADS / head_format}, or name one: --draft {head_format}=FOLDER"
    train = f"eyas train --method {head_format} --target {llm.target.name} --data CHATS --output HEAD"
    return f"`{train}` trains one; name it: --draft {head_format}=HEAD"


def _parsed(text: str) -> tuple[str, type[DraftMethod], dict[str, Any], dict[str, str]]:
    """Return the method of NAME:option=value:..., its class, its own options, and the options of the entry."""
    name, *parts = text.split(":")
    kind = drafters.find(name)
    known = {option.name: option for option in list_options(kind.Options)}
    options, entry = dict[str, Any](), dict[str, str]()
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.replace("-", "_")
        is_of_entry = key == "draft_with" or (key == "head" and kind.head_format) or (key == "tree" and value in MODES)
        if equals and is_of_entry:
            entry[key] = value
        elif key not in known or not equals:
            raise OptionError(f"--methods {text}: unknown option {key!r}; {near(key, [*known, *ENTRY_OPTIONS])}")
        else:
            try:
                options[key] = parse_option(known[key], value)
            except OptionError as error:
                raise OptionError(f"--methods {text}: {error}") from error
    return name, kind, options, entry


def _check_options(texts: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise OptionError for a method option that none of the contestants has: it would be ignored."""
    known = {name for text in texts for name in option_defaults(drafters.find(text.partition(":")[0]).Options)}
    for name in options:
        if name not in known:
            raise OptionError(f"none of the methods has the option --{name.replace('_', '-')}")
