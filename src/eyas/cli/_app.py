"""From the arguments of `eyas` to a call of a command's function, with cyclopts.

A command is a file of this folder, or a module that another distribution names as an entry point of "eyas.commands".
It defines

    command        a function; its docstring is the help, its parameters are the options
    GROUP          the group of commands that it belongs to on the page of `eyas --help`
    EXAMPLES       a command line a line, each with `  # its purpose`
    NOTES          further lines of the help page
    COMMANDS       instead of `command`: subcommands by name

Only the file of the command that is asked for is imported, except for `eyas --help`.
"""

from __future__ import annotations

import inspect
import itertools
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, get_origin

import cyclopts
from cyclopts import App, Group, Parameter
from cyclopts.help import DefaultFormatter
from rich.markup import escape

from eyas import __version__, elsewhere
from eyas.cli._errors import UsageError
from eyas.cli._load import collector_paused
from eyas.cli._options import STDIN, annotate, given, placeholders
from eyas.errors import near, one_line

HELP = (
    "Make a language model generate faster [bold]without changing its output[/].\n\n"
    "A small draft head proposes a tree of next tokens; the unmodified model verifies all of them "
    "in one forward pass and keeps those that it would have generated itself."
)
EXAMPLES = """
eyas demo  # plain decoding and the best method side by side, on a real model (93 MB, once)
eyas generate "Why is the sky blue?"  # the embedded model
eyas generate --target MODEL --draft HEAD "Why ..."  # folders or hub ids
eyas doctor  # check the installation
"""
GROUPS = {name: Group(name, sort_key=i) for i, name in enumerate(("Answers", "Heads", "Information"))}
HELP_FLAGS = ("--help", "-h", "--help-all")


@cache
def _modules() -> Mapping[str, str]:
    """Return the module of each command, by the command's name; this folder's come first."""
    others = {point.name: point.value for point in entry_points(group="eyas.commands")}
    files = [
        m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name[0] != "_" and m.name != "tools"
    ]
    return others | {name: f"eyas.cli.{name}" for name in files}


def names() -> list[str]:
    return sorted(_modules())


def dispatch(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name and return its exit status. Raise UsageError if they do not fit."""
    place = _place(arguments)
    try:
        with collector_paused():  # torch and transformers are imported, for the options of the methods
            function, bound = parse(arguments)
        status = function(*bound.args, **bound.kwargs)
    except cyclopts.CycloptsError as error:
        raise UsageError(f"{_explain(error)} (see {place} --help)") from error
    except UsageError as error:
        raise UsageError(f"{error} (see {place} --help)") from error
    return status if isinstance(status, int) else 0


def parse(arguments: Sequence[str]) -> tuple[Callable[..., Any], inspect.BoundArguments]:
    """Return what to call, the command or its help, with its arguments."""
    tokens = [STDIN if token == "-" else token for token in arguments]
    if tokens and tokens[0] not in names() and tokens[0] not in (*HELP_FLAGS, "--version"):
        elsewhere.check("commands", tokens[0], f"eyas {tokens[0]}")
        kind = "option" if tokens[0].startswith("-") else "command"
        raise UsageError(f"unknown {kind} {tokens[0]!r}; {near(tokens[0], names())}")
    parsed = ["--help" if token == "--help-all" else token for token in tokens]
    app = _app(tokens)
    function, bound, unparsed = app.parse_args(parsed, print_error=False, exit_on_error=False)
    command: Callable[..., Any] | None = getattr(function, "command", None)
    if command is None:
        return function, bound
    values = bound.arguments
    for name, parameter in _signature(command).parameters.items():
        if name in unparsed:
            values[name] = tuple(arguments[1:])
        elif isinstance(parameter.annotation, type) and issubclass(parameter.annotation, dict):
            values[name] = given(values.get(name))
        elif _is_optional_group(parameter.annotation):
            values.setdefault(name, parameter.annotation())
    return command, inspect.BoundArguments(_signature(command), values)


def _place(arguments: Sequence[str]) -> str:
    """Return the command line up to its options: `eyas datastore build`."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    known = words[:1] if words and words[0] in names() else []
    if known and words[1:2] and words[1] in getattr(import_module(_modules()[known[0]]), "COMMANDS", {}):
        known = words[:2]
    return " ".join(["eyas", *known])


def _app(tokens: Sequence[str]) -> App:
    class Panels(DefaultFormatter):
        """Draws the panel of options that few need only with --help-all."""

        def __call__(self, console: Any, options: Any, panel: Any) -> None:
            if panel.title == "More" and "--help-all" not in tokens:
                console.print(f"More options: eyas {tokens[0]} --help-all")
            else:
                super().__call__(console, options, panel)

    app = App(
        name="eyas",
        help=HELP,
        help_format="rich",
        help_flags=["--help", "-h"],
        help_formatter=Panels(),
        help_epilogue=_epilogue(EXAMPLES),
        version=f"eyas {__version__}",
        version_format="plaintext",
        default_parameter=Parameter(negative=(), allow_repeating=True),
    )
    for name in [tokens[0]] if tokens and tokens[0] in names() else names():
        _add(app, name, tokens)
    return app


def _add(app: App, name: str, tokens: Sequence[str]) -> None:
    module = import_module(_modules()[name])
    epilogue = _epilogue(getattr(module, "EXAMPLES", ""), getattr(module, "NOTES", ()))
    group = GROUPS[module.GROUP]
    if hasattr(module, "COMMANDS"):
        inner = App(name=name, help=module.HELP, group=group, help_epilogue=epilogue)
        for inner_name, function in module.COMMANDS.items():
            inner.command(_complete(function, tokens), name=inner_name, help_epilogue=epilogue)
        app.command(inner)
        return
    function = _complete(module.command, tokens)
    app.command(function, name=name, group=group, help_epilogue=epilogue)


def _epilogue(examples: str, notes: Sequence[str] = ()) -> str:
    """Return the end of a help page; an empty line between lines keeps them apart."""
    parts = [line.partition("  # ") for line in examples.strip().splitlines()]
    lines = [f"[cyan]{escape(line)}[/][dim]{escape(sign + purpose)}[/]" for line, sign, purpose in parts]
    return "\n\n".join([*(["[bold]Examples[/]"] if lines else []), *lines, *map(escape, notes)])


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function, eval_str=True)


def _complete(function: Callable[..., Any], tokens: Sequence[str]) -> Callable[..., Any]:
    """Return a stand-in for a command, as cyclopts takes it: placeholders are dataclasses, groups have defaults."""
    wants_help = any(token in HELP_FLAGS for token in tokens)
    parameters = []
    for parameter in _signature(function).parameters.values() if tokens and tokens[0] in names() else ():
        kind = placeholders(parameter.annotation, tokens, wants_help)
        if kind is not None:
            parameter = parameter.replace(annotation=kind)
        elif get_origin(parameter.annotation) is Annotated:
            parameter = parameter.replace(annotation=annotate(parameter.annotation))
        if _is_optional_group(parameter.annotation):
            parameter = parameter.replace(default=parameter.annotation())
        if kind is None or fields(kind):
            parameters.append(parameter)

    def stand_in() -> None:
        """Do nothing: it is never called."""

    stand_in.__doc__ = function.__doc__
    stand_in.__annotations__ = {p.name: p.annotation for p in parameters}
    stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    stand_in.command = function  # type: ignore[attr-defined]
    return stand_in


def _is_optional_group(annotation: Any) -> bool:
    return (
        isinstance(annotation, type)
        and is_dataclass(annotation)
        and all(field.default is not MISSING or field.default_factory is not MISSING for field in fields(annotation))
    )


def _explain(error: cyclopts.CycloptsError) -> str:
    if isinstance(error, cyclopts.UnknownOptionError):
        name = error.token.keyword or error.token.value
        shown = [argument for argument in error.argument_collection if argument.parse and argument.show]
        known = [spelling for argument in shown for spelling in argument.names]
        return f"unknown option {name}; {near(name, known)}"
    if isinstance(error, cyclopts.UnusedCliTokensError):
        return f"unexpected argument {(error.unused_tokens or ['?'])[0]!r}: give texts with spaces in quotes"
    if isinstance(error, cyclopts.MissingArgumentError) and error.argument is not None:
        name = error.argument.name
        needs = "needs a value" if error.keyword else "is missing"
        return f"option {name} {needs}" if name.startswith("-") else f"argument {name} {needs}"
    text = one_line(str(error).replace('"', "'")).rstrip(".")
    return text[:1].lower() + text[1:]
