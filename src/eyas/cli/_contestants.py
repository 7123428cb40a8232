"""Who takes part in a bench: from `--methods`, `--draft`, `--heads` and the methods' own flags to contestants.

A part of --methods is NAME or NAME:option=value:..., where draft_with=NAME merges another method's proposals in, head=NAME|PATH takes a
head of --heads by its name, or another one, and head=random one that knows nothing. `all` takes every method of the folder that can run
here and says of the others what they lack; a method that is named must be able to run. Plain decoding and transformers' generate are
always among them; what transformers refuses to do with this target is said.

tree=auto lets a policy say how large a tree is drafted in each cycle, or that none is (eyas.adaptive); tree=fixed takes it as it is. Where
nothing is said of trees, those that grow are auto, and the others fixed: a bench compares methods, and a method that plain decoding stands
in for would not be seen. Simulated acceptance says nothing about trees: fixed. With the embedded model static trees are its small one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from eyas.cli._load import quiet
from eyas.cli._options import Flag, flags_of, read_value
from eyas.errors import CheckpointError, EyasError, OptionError, near

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eyas.api import LLM
    from eyas.bench.contestants import Contestant, Drafting
    from eyas.drafters import Drafter

__all__ = ["HEADS", "contestants"]

HEADS = Path("out/heads")  # where `make bench-heads` puts them
VANILLA, RANDOM = "vanilla", "random"
OF_SPECS = ("draft_with", "head", "tree=auto", "tree=fixed")  # that no method has


def contestants(llm: LLM, given: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[list[Contestant], dict[str, str]]:
    """(who takes part, plain decoding and transformers first; who cannot, and why)."""
    from eyas import drafters
    from eyas.adaptive import auto
    from eyas.bench.contestants import Drafting
    from eyas.bench.run import reason_of
    from eyas.bench.simulate import parse_rates, simulated
    from eyas.core.verify import verify

    specs = [part.strip() for part in given["methods"].split(",") if part.strip()]
    every = specs == ["all"]
    specs = drafters.names() if every else specs
    rates = given["simulate_acceptance"]
    judge = verify if rates is None else simulated(parse_rates(rates))
    heads = _heads(llm, given)
    _check_flags(specs, options)
    found: dict[str, Drafting] = {VANILLA: Drafting(VANILLA, drafters.find(VANILLA)(llm.target))}
    skipped: dict[str, str] = {}
    for spec in specs:
        if spec == VANILLA:
            continue
        try:
            with quiet(given["verbose"]):
                drafter, head, mode = _drafter(llm, spec, heads, options, random=rates is not None)
        except EyasError as error:
            if not every:
                raise
            skipped[spec] = str(error)
        except Exception as error:  # a method that is broken takes no other one down
            skipped[spec] = reason_of(error)
        else:
            policy = auto(drafter, fallback=rates is None, compared=True) if mode == "auto" else None
            found[spec] = Drafting(spec, drafter, _called(head), judge, policy)
    theirs = _theirs(llm, found.values(), plain=rates is not None, skipped=skipped)
    return [found.pop(VANILLA), *theirs, *found.values()], skipped


def _theirs(llm: LLM, ours: Iterable[Drafting], plain: bool, skipped: dict[str, str]) -> list[Contestant]:
    """transformers' generate in its ways, those that work here. `plain`: without speculation."""
    from eyas.bench.contestants import Question, Transformers
    from eyas.core.engine import Request
    from eyas.errors import ModelError

    every = [Transformers(llm.target)]
    if not plain:
        every.append(Transformers(llm.target, "transformers_prompt_lookup", lookup=True))
        assistant = _assistant(ours)
        every += [] if assistant is None else [Transformers(llm.target, "transformers_assisted", assistant=assistant)]
    works: list[Contestant] = []
    for contestant in every:
        try:
            with quiet():
                contestant.answer(Question("", "", 0, Request((0, 0), 3)))
        except ModelError as error:
            skipped[contestant.name] = str(error)
        else:
            works.append(contestant)
    return works


def _called(head: str | None) -> str | None:
    """How the summary names it: an embedded head not by where it lies on this machine."""
    from eyas import tiny

    mine = {str(path): f"embedded {name}" for name, path in tiny.HEADS.items()}
    return None if head is None else mine.get(head, head)


def _heads(llm: LLM, given: Mapping[str, Any]) -> dict[str, str]:
    """Method, or what heads are called that several methods read -> where one is. What --draft names comes before a folder of --heads."""
    from eyas import checkpoints, drafters, tiny

    found: dict[str, str] = {}
    if not given["target"]:
        found |= {name: str(path) for name, path in tiny.HEADS.items()}
    folder = Path(given["heads"] or HEADS)
    if given["heads"] and not folder.is_dir():
        raise OptionError(f"--heads {folder} is no folder")
    if given["heads"] or not given["target"]:
        found |= {path.name: str(path) for path in sorted(folder.glob("*")) if path.is_dir()}
    for draft in given["drafts"]:
        name, _, path = draft.rpartition("=")
        if name and name not in drafters.names():
            raise OptionError(f"--draft {draft}: unknown method {name!r}; {near(name, drafters.names())}")
        found[name or checkpoints.load(path).method] = path
    return found


def _drafter(
    llm: LLM, spec: str, heads: Mapping[str, str], common: Mapping[str, Any], random: bool
) -> tuple[Drafter, str | None, str]:  # fmt: skip
    """A method with its head and options, and whether trees are auto or fixed; `random`: with random weights where it has no head."""
    from eyas import drafters, tiny
    from eyas.adaptive import mode_of
    from eyas.core.drafter import build_options, flags

    name, options, beside, head = _parsed(spec)
    said, options = options.get("tree"), {k: v for k, v in options.items() if k != "tree"}
    kind = drafters.find(name)
    known = flags(kind.Options)
    asked = {**{k: v for k, v in common.items() if k in known}, **options}
    chosen = build_options(kind.Options, tiny.with_small_tree(asked, known) if llm.target.name == "embedded" else asked)
    useless = head == RANDOM and RANDOM not in heads
    head = None if useless else heads.get(head, head) if head else heads.get(name) or heads.get(kind.reads)
    if head is None and kind.needs_weights and not (random or useless):
        raise CheckpointError(f"{name} has no head here: {_how_to_get(llm, kind.reads)}")
    drafter = kind.random(llm.target, chosen) if head is None and (random or useless) else kind.from_pretrained(head, llm.target, chosen)
    if beside is not None:
        from eyas.drafters._merge import Merged

        drafter = Merged(drafter, _drafter(llm, beside, heads, common, random)[0])
    mode = said or (mode_of(asked)[0] if drafter.max_tree is not None and not random else "fixed")
    return drafter, RANDOM if useless else head, mode


def _how_to_get(llm: LLM, reads: str) -> str:
    """A head of that kind for this target."""
    if llm.target.name == "embedded":
        return f"`make bench-heads` trains it into {HEADS / reads}, or name one: --draft {reads}=FOLDER"
    return f"`eyas train --method {reads} --target {llm.target.name} --data CHATS --output HEAD` trains one; name it: --draft {reads}=HEAD"


def _parsed(spec: str) -> tuple[str, dict[str, Any], str | None, str | None]:
    """NAME:option=value:... -> (name, options, the method that is merged in, the head that is named)."""
    from eyas import drafters
    from eyas.adaptive import MODES

    name, *parts = spec.split(":")
    kind = drafters.find(name)
    known = {flag.name: flag for flag in flags_of(kind.Options)}
    options = dict[str, Any]()
    beside = head = None
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.replace("-", "_")
        if key == "draft_with" and equals:
            beside = value
        elif key == "head" and equals and kind.reads:
            head = value
        elif key == "tree" and value in MODES:
            options[key] = value
        elif key not in known or not equals:
            raise OptionError(f"--methods {spec}: unknown option {key!r}; {near(key, [*known, *OF_SPECS])}")
        else:
            options[key] = _value(known[key], value, spec)
    return name, options, beside, head


def _value(flag: Flag, text: str, spec: str) -> Any:
    try:
        return read_value(flag, text)
    except click.BadParameter as error:
        raise OptionError(f"--methods {spec}: {flag.name}: {error.message}") from error


def _check_flags(specs: Sequence[str], options: Mapping[str, Any]) -> None:
    """A method's flag that none of them has would be ignored."""
    from eyas import drafters
    from eyas.core.drafter import flags

    known = {name for spec in specs for name in flags(drafters.find(spec.partition(":")[0]).Options)}
    for name in options:
        if name not in known:
            raise OptionError(f"none of the methods has the option --{name.replace('_', '-')}")


def _assistant(ours: Iterable[Drafting]) -> PreTrainedModel | None:
    """A head that is a whole language model: it may draft for transformers too."""
    from transformers import PreTrainedModel

    nets = (contestant.drafter.net for contestant in ours)
    return next((net for net in nets if isinstance(net, PreTrainedModel)), None)
