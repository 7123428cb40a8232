"""Options, declared once: as fields of dataclasses, with their constraints as annotations and their help as the
docstring below the field. cyclopts reads them.

MethodOptions and ConfigOptions are placeholders for the options of methods (`--tree.nodes` is the field `nodes` of
the field `tree` of a method's `Options`) and of a config. They are replaced by dataclasses when the command is known
(`placeholders`): the options depend on --method, and reading them imports torch. A command gets a mapping of the
options which the user gave.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter, Token
from cyclopts.types import PositiveFloat
from rich.markup import escape

from eyas.core.params import Sampling
from eyas.errors import OptionError
from eyas.option_texts import Option, field_docstrings, list_options, parse_option, plain_type

Options = TypeVar("Options")

Fields = dict[str, Any]  # keywords, or an object of JSON
STDIN = "\N{SYMBOL FOR START OF TEXT}"  # replaces the argument `-`, which would be an option otherwise
PANELS = ("Prompt", "Model", "Server", "Limits", "Method", "Data", "Training", "Sampling", "Output", "Machine", "More")


def annotate(annotation: Any, **settings: Any) -> Any:
    """Return `Annotated[int, "Sampling", "N"]` as cyclopts reads it: with the option's panel and the name of its
    value."""
    kind, *marks = get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
    parameters = [Parameter(**settings)]
    for mark in marks:
        if mark in PANELS:
            mark = Parameter(group=Group(mark, sort_key=PANELS.index(mark)))
        parameters.append(Parameter(metavar=mark) if isinstance(mark, str) else mark)
    return Annotated[kind, *parameters]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def option_group(kind: type[Options], described: Mapping[str, str] = MappingProxyType({})) -> type[Options]:
    """Make a class a frozen dataclass whose fields are options; the docstring below a field, or `described`, is its
    help."""
    kind = dataclass(frozen=True, kw_only=True)(kind)
    described = {**described, **field_docstrings(kind)}
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        default = getattr(kind, name, None)
        settings = {"help": described[name]} if name in described else {}
        shown = isinstance(default, int | float | str) and not isinstance(default, bool) and default != ""
        kind.__annotations__[name] = annotate(annotation, show_default=shown, **settings)
    return Parameter(name="*")(kind)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def sampling_options(*names: str) -> Callable[[type[Options]], type[Options]]:
    """Make an `option_group` that begins with these fields of `Sampling`, as they are declared there."""

    def decorate(kind: type[Options]) -> type[Options]:
        declared = {field.name: field for field in fields(Sampling) if field.name in names}
        types, own = get_type_hints(Sampling), inspect.get_annotations(kind)
        kind.__annotations__ = {name: Annotated[types[name], "Sampling"] for name in declared}
        kind.__annotations__ |= own
        for name, field_ in declared.items():
            setattr(kind, name, field_.default)
        described = {name: text[:1].upper() + text[1:] for name, text in field_docstrings(Sampling).items()}
        return option_group(kind, described)

    return decorate


AS_JSON = Annotated[bool, "Output", Parameter(name="--json", show_default=False, help="Print JSON as the last line.")]
VERBOSE = Annotated[bool, "More", Parameter(help="Show the output of the libraries, too.")]
TREE = Annotated[
    Literal["auto", "fixed"] | None,
    "Method",
    Parameter(
        help="auto: draft as much as pays on this machine, or nothing. fixed: use the tree options as they are. "
        "Default: auto, unless a tree option is given."
    ),
]


@option_group
class TargetOptions:
    """The target model and how it runs."""

    target: Annotated[str | None, "Model", "PATH|HUB"] = None
    """The target model: a folder, a hub id or a file in GGUF format. Default: the embedded model."""
    gguf_file: Annotated[str | None, "Model", "NAME"] = None
    """GGUF file in the target's folder or repository."""
    cache: Annotated[bool, "More", Parameter(name="--cache", negative="--no-cache")] = True
    """Keep converted GGUF files."""
    adapter: Annotated[tuple[str, ...], "Model", "PATH|HUB|NAME=PATH"] = ()
    """PEFT adapter (LoRA, DoRA) to merge. Give several NAME=PATH to let requests choose."""
    tokenizer: Annotated[str | None, "Model", "PATH|HUB"] = None
    """The tokenizer, when it is not in the target's folder."""
    chat_template: Annotated[str | None, "More", "FILE"] = None
    """A Jinja file with the chat template, instead of the tokenizer's own."""
    trust_remote_code: Annotated[bool, "Model"] = False
    """Run Python code that comes with the target."""
    dtype: Annotated[str, "Machine", "NAME"] = "auto"
    """float32, bfloat16 or float16. auto: float32 on a CPU, the checkpoint's own type elsewhere and
    if it is quantised."""
    device: Annotated[str, "Machine", "NAME"] = "auto"
    """cpu, cuda, cuda:1, ..."""
    device_map: Annotated[str | None, "More", "auto|balanced|FILE"] = None
    """auto, balanced: spread the layers over all GPUs, memory and disk. Or a JSON file with a device, "cpu" or
    "disk" for each part of the model."""
    offload_folder: Annotated[str | None, "More", "FOLDER"] = None
    """Folder for weights on disk, if not safetensors."""
    kernels: Annotated[Literal["auto", "on", "fixed", "compile", "off"], "Machine"] = "auto"
    """auto: compiled kernels on a CPU, CUDA graphs on a GPU, if they support the model. on: also say why if
    not. off: the model's own code. fixed: sum in one order, or fail. compile: torch.compile for other layers on
    a GPU."""
    weights: Annotated[Literal["exact", "auto", "bfloat16", "int8", "int4"], "Machine"] = "exact"
    """Round the target's weights: fewer bytes to read, but the text is the rounded model's.
    Needs the compiled kernels."""
    activations: Annotated[Literal["exact", "bfloat16", "int16", "int8"], "More"] = "exact"
    """Round the inputs of matrix products, too: bfloat16 for bfloat16 weights, int16 or int8 for int8 and int4
    weights."""
    kv: Annotated[Literal["exact", "bfloat16", "int8"], "More"] = "exact"
    """Round keys and values by the kernels: less memory."""
    verbose: VERBOSE = False


@option_group
class ExactTarget(TargetOptions):
    """A target whose features are read. Options that round it are refused, so the help does not show them."""

    weights: Annotated[Literal["exact", "bfloat16", "int8", "int4"], Parameter(show=False)] = "exact"
    activations: Annotated[Literal["exact", "bfloat16", "int16", "int8"], Parameter(show=False)] = "exact"
    kv: Annotated[Literal["exact", "bfloat16", "int8"], Parameter(show=False)] = "exact"


@option_group
class FeatureTarget(ExactTarget):
    """A target that only its own forward reads. --kernels would change nothing, so the help does not show it."""

    kernels: Annotated[Literal["auto", "on", "fixed", "compile", "off"], Parameter(show=False)] = "auto"


DRAFT_WEIGHTS = Annotated[
    Literal["auto", "fp8", "int4", "exact"],  # "exact" is read as "auto"
    "More",
    "auto|fp8|int4",
    Parameter(
        help="Format of the draft head's weights. auto: as stored; the compiled kernels round to int8. "
        "fp8: for GPUs that multiply it. int4: for the compiled kernels. The text stays the same.",
        show_choices=False,
    ),
]


@option_group
class DraftOptions:
    """The draft head and the method."""

    draft: Annotated[str | None, "Model", "PATH|HUB|auto"] = None
    """The draft head: a folder or a hub id. auto: the one that is listed for the target
    (docs/reference/head_formats.md)."""
    method: Annotated[str | None, "Method", "NAME"] = None
    """How to draft; `eyas methods` lists the names, --method NAME --help the options of one. Default: the best
    method for the head; without a head, suffix."""
    draft_with: Annotated[str | None, "Method", "NAME"] = None
    """Second method, without a head, such as suffix. Both draft in every cycle."""
    tree: TREE = None
    draft_weights: DRAFT_WEIGHTS = "auto"


@option_group
class AdaptOptions:
    """Whether the head learns from its answers."""

    adapt: Annotated[bool, "Method"] = False
    """Let the head learn from the answers (EAGLE-3, MTP)."""
    adapt_percent: Annotated[PositiveFloat, "Method", "N"] = 3.0
    """Share of drafting time to spend on learning, in percent."""
    adapt_save: Annotated[str | None, "Method", "FOLDER"] = None
    """Write the head to this folder at the end."""


TEMPERATURE = ("temperature",)
PENALTIES = ("presence_penalty", "frequency_penalty", "logit_bias")


@sampling_options(*TEMPERATURE)
class TemperatureOptions:
    """The temperature, where a command takes one."""


@sampling_options(*(field.name for field in fields(Sampling) if field.name not in TEMPERATURE + PENALTIES))
class FilterOptions:
    """How tokens are sampled from the target's distribution: every other field of `eyas.Sampling`."""


@option_group
class SamplingOptions(FilterOptions, TemperatureOptions):
    """How tokens are sampled, with the temperature."""


@option_group
class LengthOptions:
    """Where an answer ends."""

    max_new_tokens: Annotated[int | None, "Sampling", "N"] = None
    """Longest answer in tokens. Default: 256, or the rest of the context if that is less."""
    stop: Annotated[tuple[str, ...], "Sampling", "TEXT"] = ()
    """End the answer before this text. May be given several times."""


@sampling_options("presence_penalty", "frequency_penalty")
class PenaltyOptions:
    """Options that change the distribution of an answer's tokens further."""

    logit_bias: Annotated[tuple[str, ...], "Sampling", "ID:NUMBER"] = ()
    """Add a number to a token's score; -100 nearly forbids the token. May be given several times."""
    min_tokens: Annotated[int, "Sampling", "N"] = 0
    """Shortest answer in tokens."""
    stop_token_id: Annotated[tuple[int, ...], "Sampling", "ID"] = ()
    """End the answer with this token, too. May be given several times."""


@option_group
class AnswerOptions(PenaltyOptions, FilterOptions, TemperatureOptions, LengthOptions):
    """How an answer is sampled, and where it ends; and with which adapter."""

    use_adapter: Annotated[str | None, "Model", "NAME"] = None
    """Adapter to answer with. Default: the model without an adapter."""


@option_group
class StructureOptions:
    """The texts that an answer may have; see docs/guide/structured_output.md."""

    json_schema: Annotated[str | None, "Output", "FILE"] = None
    """Answer in JSON of this schema."""
    json_object: Annotated[bool, "Output"] = False
    """Answer with a JSON object."""
    regex: Annotated[str | None, "Output", "EXPRESSION"] = None
    """Answer with a text that this expression matches as a whole."""
    grammar: Annotated[str | None, "Output", "FILE"] = None
    """Answer with a text of this grammar, in Lark's form or the EBNF of llama.cpp."""
    choice: Annotated[tuple[str, ...], "Output", "TEXT"] = ()
    """Answer with this text or another --choice."""


class MethodOptions(Fields):
    """The method options that were given, by dotted name, where a trained head is used."""

    uses: frozenset[str] = frozenset()


class BenchMethodOptions(MethodOptions):
    """The method options of a bench, which may make new heads with random weights."""

    uses = frozenset({"new heads only"})


class TrainMethodOptions(MethodOptions):
    """The method options of a training."""

    uses = frozenset({"new heads only", "training only"})


class ConfigOptions(Fields):
    """The fields of a dataclass that were given."""

    @staticmethod
    def declared() -> type:
        """Return the dataclass, which is imported only when its options are read."""
        raise NotImplementedError


def placeholders(annotation: Any, tokens: Sequence[str], wants_help: bool) -> type | None:
    """Return the dataclass that replaces an annotation of a command; None for an ordinary annotation. A help page
    shows the options of the methods after --method, or all with --help-all. A command takes the options of every
    method."""
    if not isinstance(annotation, type):
        return None
    if issubclass(annotation, ConfigOptions):
        return _config_class(annotation.declared(), wants_help)
    if not issubclass(annotation, MethodOptions):
        return None
    named = tuple(name for name in (_value_of("--method", tokens) or "").split(",") if name)
    if wants_help and not named and "--help-all" not in tokens:
        return _options_class((), "Method")
    return _method_class(annotation.uses, named, wants_help)


def given(options: Any) -> Fields:
    """Return the options that were given, by dotted name, from an instance of a placeholder's dataclass."""
    if options is None:
        return {}
    values = {field.metadata["option"]: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if value is not None}


def _value_of(option: str, tokens: Sequence[str]) -> str | None:
    parts = [part for token in tokens for part in token.split("=", token.startswith(f"{option}="))]
    return parts[parts.index(option) + 1] if option in parts[:-1] else None


@functools.cache
def _method_class(uses: frozenset[str], named: tuple[str, ...], for_help: bool) -> type:
    """Return a dataclass with the options of the methods, those at dotted paths after --method included."""
    from eyas import drafters

    outside = [name for name in named if "." in name]
    methods = named if for_help and named else [*drafters.names(), *outside]
    by_name: dict[str, dict[str, Option]] = {}
    for method in methods:
        for option in list_options(drafters.find(method).Options, described=for_help):
            if not option.use or option.use in uses:
                by_name.setdefault(option.name, {})[method] = option
    return _options_class(map(_merge, by_name.values()), "Method")


def _merge(by_method: Mapping[str, Option]) -> Option:
    """Return an option of several methods as one: its help lists the defaults that differ."""
    options = list(by_method.values())
    option = next((option for option in options if option.help), options[0])
    by_default: dict[str, list[str]] = {}
    for method, one in by_method.items():
        by_default.setdefault(one.shown_default, []).append(method)
    defaults = "; ".join(f"{', '.join(methods)}: {default}" for default, methods in by_default.items())
    if len(options) == 1:
        defaults = option.shown_default
    use = f"{option.use.capitalize()}: " if option.use else ""
    return replace(option, help=f"{use}{option.help} [default: {defaults}]")


@functools.cache
def _config_class(config: type, for_help: bool) -> type:
    shown = (
        o if str(o.default) in ("None", "False", "") else replace(o, help=f"{o.help} [default: {o.shown_default}]")
        for o in list_options(config, described=for_help)
    )
    return _options_class(shown, "Training", flags=True)


def _options_class(options: Iterable[Any], panel: str, flags: bool = False) -> type:
    """Return a dataclass with a field for each option, None if it is not given. `flags`: a bool takes no value."""
    declared = []
    for option in options:
        flag = flags and option.annotation is bool
        name = Parameter(name=f"--{option.name.replace('_', '-')}", n_tokens=None if flag else 1)
        kind: Any = Annotated[_value_type(option) | None, panel, name]
        annotation = annotate(kind, help=escape(option.help), show_default=False)
        default = field(default=None, metadata={"option": option.name})
        declared.append((re.sub(r"\W", "__", option.name), annotation, default))
    made = make_dataclass("Options", declared, frozen=True, kw_only=True)
    made.__module__ = __name__
    return Parameter(name="*")(made)


def _value_type(option: Option) -> Any:
    def numbers(kind: Any, tokens: Sequence[Token]) -> Any:
        try:
            return parse_option(option, tokens[0].value)
        except OptionError as error:
            raise ValueError(str(error)) from None

    kind = plain_type(option.annotation)
    return Annotated[tuple[float, ...], Parameter(converter=numbers, metavar="N,N")] if kind is tuple else kind
