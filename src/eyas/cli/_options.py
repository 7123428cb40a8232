"""Flags that several commands share, and the flags that methods bring with them.

A method's flags come from the fields of its `Options`: `--tree.nodes` is the field `nodes` of the field `tree`. They are collected
from all methods of the folder when a command that takes them is run or asked for help (`eyas --help` itself imports no method), and from
the method at the dotted path after `--method`, if there is one. Whether a method has the flags that were given is for `build_options` to
say.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import rich_click as click
from rich.markup import escape

__all__ = [
    "DRAFT_WEIGHTS",
    "LAW",
    "LAW_BASE",
    "MODEL",
    "MODEL_BASE",
    "SAMPLING",
    "SAMPLING_LAW",
    "TRAINING",
    "TREE",
    "VERBOSE",
    "Command",
    "Flag",
    "MethodCommand",
    "examples",
    "field_option",
    "flags_of",
    "method_options",
    "option",
    "read_value",
    "stack",
]

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[[Any], Any]

_OUTSIDE = "eyas.cli.outside_method"  # key of Context.meta: the dotted path after --method


def stack(*decorators: Decorator) -> Callable[[Decorated], Decorated]:
    """Several decorators as one; their options appear in this order."""

    def decorate(function: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def examples(*lines: tuple[str, str], more: tuple[str, ...] = ()) -> str:
    """The end of a help page: commands with what they are for, then lines of markup. (rich-click joins lines that no blank line parts.)"""
    shown = [f"[cyan]{escape(line)}[/]  [dim]{what}[/]" for line, what in lines]
    return "\n\n".join(["[bold]Examples[/]", *shown, *([" ", *more] if more else [])])


def option(panel: str, *names: str, **settings: Any) -> Decorator:
    """A click option in a panel of the help page; a default is shown there."""
    return click.option(*names, panel=panel, show_default="default" in settings, **settings)


VERBOSE = option("Machine", "--verbose", is_flag=True, help="Show what the libraries below say while they load.")

TREE = option(
    "Method", "--tree", type=click.Choice(["auto", "fixed"]), metavar="auto|fixed",
    help="auto: drafts as large as pays on this machine, or none; fixed: as the options below say. Default: auto, unless one is given.",
)  # fmt: skip

MODEL_BASE = stack(
    option("Model", "--target", metavar="PATH|HUB", help="The model: a folder or a hub id. Default: the embedded model."),
    option("Model", "--tokenizer", metavar="PATH|HUB", help="Where it is not in the target's folder."),
    option("Model", "--trust-remote-code", is_flag=True, help="Run Python code that comes with the target."),
    option(
        "Machine", "--dtype", default="auto", metavar="NAME", help="float32, bfloat16, float16; auto: float32 on a CPU, else as stored."
    ),
    option("Machine", "--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1, ..."),
    option(
        "Machine",
        "--kernels",
        type=click.Choice(["auto", "on", "compile", "off"]),
        default="auto",
        help="On a CPU compiled kernels: where they know the model; on: say it where they do not; off: its own forward. On a GPU on: CUDA "
        "graphs; compile: with layers by torch.compile.",
    ),
    option(
        "Machine",
        "--weights",
        type=click.Choice(["exact", "bfloat16", "int8", "int4"]),
        default="exact",
        help="Of the target: as they are; bfloat16, int8, int4: rounded, by the kernels: another target, faster if these are fewer bytes.",
    ),
    option(
        "Machine",
        "--activations",
        type=click.Choice(["exact", "bfloat16", "int16", "int8"]),
        default="exact",
        help="What weights are multiplied by: as exact as float32, or rounded: larger trees pay, and another target. bfloat16 for weights "
        "kept so, int16 and int8 for int8 and int4.",
    ),
    VERBOSE,
)

DRAFT_WEIGHTS = option(
    "Machine",
    "--draft-weights",
    type=click.Choice(["exact", "fp8", "int4"]),
    default="exact",
    help="Of the head; fp8: rounded, on GPUs that multiply it; int4: by the kernels. The text stays the same.",
)

MODEL = stack(
    MODEL_BASE,
    DRAFT_WEIGHTS,
    option("Model", "--draft", metavar="PATH|HUB", help="Its draft head: a folder or a hub id."),
    option(
        "Model", "--method", metavar="NAME", help="How to draft: `eyas methods`. Default: the best for this head; without a head suffix."
    ),
    option("Model", "--draft-with", metavar="NAME", help="A second method, without a head; both draft in every cycle: suffix, ..."),
    TREE,
)

LAW_BASE = stack(
    option("Sampling", "--top-k", type=int, default=0, help="Only the k most probable tokens; 0: all."),
    option("Sampling", "--top-p", type=float, default=1.0, help="Only the most probable tokens that hold this mass."),
    option("Sampling", "--min-p", type=float, default=0.0, help="Only tokens of at least this share of the best one's."),
    option("Sampling", "--repetition-penalty", type=float, default=1.0, help="Above 1: repeat less."),
    option("Sampling", "--seed", type=int, default=0, help="Same seed, same text."),
)

LAW = stack(
    option("Sampling", "--temperature", type=float, default=0.0, help="0: always the most probable token."),
    LAW_BASE,
)

SAMPLING = stack(
    option("Sampling", "--max-new-tokens", type=int, metavar="N", help="Default: 256, or what fits the context."),
    LAW,
    option("Sampling", "--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."),
)
SAMPLING_LAW = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


PANELS = ("Prompt", "Model", "Method", "Data", "Training", "Sampling", "Output", "Machine", "Options")


class Command(click.RichCommand):
    """A command whose help shows the panels in one order everywhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.panels = [click.RichOptionPanel(name) for name in PANELS]


# How the help of fields begins that mean nothing where a trained head is only used.
TRAINING, NEW_HEADS = "training only", "new heads only"


class MethodCommand(Command):
    """A command that takes the flags of every method, but for those that would be ignored there: `without`, beginnings of their help."""

    def __init__(self, *args: Any, without: tuple[str, ...] = (TRAINING, NEW_HEADS), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.without = without

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own = super().get_params(ctx)
        taken = [flag for flag in _method_flags(ctx.meta.get(_OUTSIDE)) if not str(flag.help).startswith(self.without)]
        return [*own[:-1], *taken, *own[-1:]]  # --help stays the last

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        name = _value_of("--method", args)
        if name and "." in name:
            ctx.meta[_OUTSIDE] = name
        return super().parse_args(ctx, args)


def method_options(ctx: click.Context) -> dict[str, Any]:
    """The method's options that were given, by their dotted names."""
    return dict(ctx.meta.get("Method", {}))


def _value_of(option: str, args: list[str]) -> str | None:
    for i, argument in enumerate(args):
        if argument == option and i + 1 < len(args):
            return args[i + 1]
        if argument.startswith(option + "="):
            return argument.partition("=")[2]
    return None


@functools.cache
def _method_flags(outside: str | None) -> tuple[click.RichOption, ...]:
    """One click option for each name that any method has. The same objects at every call: click compares them."""
    from eyas import drafters

    found: dict[str, dict[str, Flag]] = {}
    for method in [*drafters.names(), *([outside] if outside else [])]:
        for flag in flags_of(drafters.find(method).Options):
            found.setdefault(flag.name, {})[method] = flag
    options = []
    for by_method in found.values():
        by_default: dict[str, list[str]] = {}
        for method, flag in by_method.items():
            by_default.setdefault(flag.shown, []).append(method)
        where = "; ".join(f"{', '.join(methods)}: {default}" for default, methods in by_default.items())
        explained = next((flag.help for flag in by_method.values() if flag.help), "")
        options.append(field_option(next(iter(by_method.values())), "Method", f"{explained} [{where}]"))
    return tuple(options)


# --- fields of a dataclass as options --------------------------------------------------------------------------------------------------


class Flag(NamedTuple):
    """A field of an options dataclass, or of a dataclass in it."""

    name: str  # dotted
    default: Any
    annotation: Any
    help: str

    @property
    def shown(self) -> str:
        """Its default, for people."""
        value = self.default
        return "none" if value is None else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def flags_of(kind: type) -> Iterator[Flag]:
    """Every field, with the help that stands below it."""
    from eyas.core.options import list_options

    for option in list_options(kind):
        yield Flag(option.name, option.default, option.annotation, f"{option.use}: {option.help}" if option.use else option.help)


def field_option(flag: Flag, panel: str, said: str) -> click.RichOption:
    """A click option that puts what is given into `ctx.meta[panel]`, by the flag's name; nothing when it is not given."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            ctx.meta.setdefault(panel, {})[flag.name] = value

    kind, metavar = _click_type(flag.annotation)
    return click.RichOption(
        [f"--{flag.name.replace('_', '-')}", re.sub(r"\W", "__", flag.name)],
        type=kind, metavar=metavar, callback=keep, expose_value=False, help=escape(said.strip()), panel=panel,
    )  # fmt: skip


def read_value(flag: Flag, text: str) -> Any:
    """A flag's value from its text; click's BadParameter when it is none."""
    kind, _ = _click_type(flag.annotation)
    return kind.convert(text, None, None)


def _click_type(annotation: Any) -> tuple[Any, str | None]:
    """How a value of this annotation is read from the command line, and how it is shown."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) in (Union, UnionType) and parts:
        return _click_type(parts[0])
    if get_origin(annotation) is Literal:
        return click.Choice([str(part) for part in parts]), None
    if get_origin(annotation) is tuple:
        return _Numbers(), ",".join("N" * max(2, len(parts)))
    plain: dict[Any, Any] = {int: click.INT, float: click.FLOAT, bool: click.BOOL}
    return plain.get(annotation, click.STRING), None


class _Numbers(click.ParamType):  # type: ignore[type-arg]
    """Numbers separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers separated by commas", param, ctx)
