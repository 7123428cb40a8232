"""From the options of a command to an LLM, or to workers on Ray, and from a result to the JSON that other programs read.

Heavy imports are inside the functions: the help of a command must not wait for torch.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from eyas import elsewhere
from eyas.cli._errors import UsageError, note
from eyas.cli._options import AdaptOptions, DraftOptions, Fields, FilterOptions, StructureOptions, TargetOptions
from eyas.errors import InputError, OptionError, UnknownOptionError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eyas.api import LLM, Result
    from eyas.core.logprobs import TokenLogprobs

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Given = TypeVar("Given")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python from looking for garbage while models are loaded: it takes a tenth of the time and finds none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Hide the output of libraries while they load; warnings of eyas itself become notes."""
    if verbose:
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from transformers.utils import logging as library

        level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
        library.set_verbosity(logging.CRITICAL)
        library.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            library.set_verbosity(level)
            if bars:
                library.enable_progress_bar()  # type: ignore[no-untyped-call]
    for warning in caught:
        # an old option name is noticed while dataclasses makes the options
        renamed = warning.category is FutureWarning and Path(warning.filename).name in ("dataclasses.py", "<string>")
        if renamed or _is_ours(Path(warning.filename).resolve()):
            note(str(warning.message))


def _is_ours(file: Path) -> bool:
    """Return whether a file belongs to eyas, or to another distribution of this project that is in use."""
    names = ("eyas", *(f"eyas_{extra}" for extra in elsewhere.DISTRIBUTIONS))
    places = [module.__file__ for name in names if (module := sys.modules.get(name)) is not None]
    return any(place and file.is_relative_to(Path(place).resolve().parent) for place in places)


def load(model: TargetOptions, draft: DraftOptions, options: Mapping[str, Any]) -> LLM:
    from eyas.api import load as load_llm

    arguments = {**asdict(model), **asdict(draft), **options}
    verbose, file = arguments.pop("verbose"), arguments.pop("chat_template")
    template = None if file is None else text_of(Path(file).expanduser(), f"--chat-template {file} cannot be read")
    if arguments["tree"] is None:
        del arguments["tree"]
    try:
        with quiet(verbose), collector_paused():
            llm = load_llm(**arguments)
    except UnknownOptionError as error:
        owners = _owners(error.option)
        if not owners:
            raise
        name = f"--{error.option.replace('_', '-')}"
        message = f"{name} is an option of {', '.join(owners)}, not of the method in use: leave it out, or choose another --method"
        raise OptionError(message) from error
    if template is not None:
        need_tokenizer(llm).chat_template = template
    return llm


def load_adapted(adapt: AdaptOptions, model: TargetOptions, draft: DraftOptions, options: Mapping[str, Any]) -> LLM:
    """Return the LLM that the options describe, with a head that learns if they say so."""
    if not adapt.adapt:
        if adapt.adapt_save is not None:
            raise UsageError("--adapt-save needs --adapt")
        return load(model, draft, options)
    learning = elsewhere.part("adapt", "--adapt")
    llm: LLM = learning.LearningLLM(load(model, draft, options), learning.Settings(share=adapt.adapt_percent / 100))
    return llm


def save_adapted(llm: LLM, options: AdaptOptions) -> None:
    if options.adapt and options.adapt_save is not None:
        llm.save_draft(options.adapt_save)  # type: ignore[attr-defined]  # of a LearningLLM


def plain_decoding(llm: LLM) -> LLM:
    from eyas import drafters
    from eyas.api import LLM

    return LLM(llm.target, drafters.find("vanilla").load(None, llm.target), llm.tokenizer)


def _owners(option: str) -> list[str]:
    from eyas import drafters
    from eyas.option_texts import list_options

    return [m for m in drafters.names() if any(o.name == option for o in list_options(drafters.find(m).Options))]


def need_packages(command: str, extra: str, *packages: str) -> None:
    for package in packages:
        try:
            import_module(package)
        except ImportError as error:
            raise OptionError(f"eyas {command} needs {package}: {elsewhere.command_of(extra)}") from error


def need_tokenizer(llm: LLM) -> PreTrainedTokenizerBase:
    if llm.tokenizer is None:
        raise InputError("this target has no tokenizer: pass one with --tokenizer")
    return llm.tokenizer


def note_no_head(llm: LLM, model: TargetOptions, draft: DraftOptions) -> None:
    """Tell the user which method drafts if neither a head nor a method was named. Printed once a request is valid."""
    if llm.draft_name is None and model.target and not draft.draft and not draft.method:
        note(
            f"no --draft: drafts are copied from the text so far ({llm.method}); a draft head for this target would be faster"
        )


def sampling_of(options: FilterOptions) -> Fields:
    """Return the keywords of `LLM.request` from options. Refuses impossible values before a model is loaded."""
    from eyas.core.sampling import Sampling

    keywords = asdict(options)
    if "logit_bias" in keywords:
        keywords["logit_bias"] = tuple(map(_token_and_number, keywords["logit_bias"]))
        keywords["stop_token_ids"] = keywords.pop("stop_token_id")
        adapter = keywords.pop("use_adapter")
        keywords |= {} if adapter is None else {"adapter": adapter}
    sampling_names = {field.name for field in fields(Sampling)}
    Sampling(**{name: value for name, value in keywords.items() if name in sampling_names})
    return keywords


def structure_of(options: StructureOptions) -> Fields:
    """Return the keywords of `LLM.request` for structured output. Refuses unreadable values."""
    from eyas import grammar

    structure: Fields = {"regex": options.regex, "choice": list(options.choice) or None}
    if options.grammar is not None:
        structure["grammar"] = text_of(Path(options.grammar), f"cannot read {options.grammar}")
    if options.json_object and options.json_schema:
        raise UsageError("give only one of --json-object and --json-schema")
    if options.json_object:
        structure["response_format"] = {"type": "json_object"}
    if options.json_schema:
        schema = text_of(Path(options.json_schema), f"cannot read {options.json_schema}")
        structure["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    keywords = {name: value for name, value in structure.items() if value is not None}
    grammar.structure_of(keywords)
    return keywords


def text_of(path: Path, failure: str) -> str:
    """Return the text of a file that an option names; the error begins with `failure`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{failure}: {getattr(error, 'strerror', None) or error}") from None


def _token_and_number(text: str) -> tuple[int, float]:
    from eyas.arguments import as_logit_bias

    token, _, number = text.partition(":")
    try:
        return as_logit_bias({token: float(number)})[0]
    except ValueError:
        raise OptionError(f"--logit-bias takes a token id and a number, as in 50256:-100; got {text!r}") from None


def record(llm: LLM, result: Result) -> Fields:
    """Return a result as the object that `--json` prints."""
    from eyas import hardware, named
    from eyas.arguments import dtype_name

    stats = result.stats
    return {
        "token_ids": list(result.token_ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
        **_logprobs("logprobs", result.logprobs),
        **_logprobs("prompt_logprobs", result.prompt_logprobs),
        "cycles": stats.cycles,
        "accepted_lengths": list(stats.accepted_lengths),
        "tau": stats.tau,
        "seconds": stats.seconds,
        "prefill_seconds": stats.prefill_seconds,
        "tokens_per_second": stats.tokens_per_second,
        "method": llm.method,
        "target": llm.target.name,
        "draft": named.shown_head(llm.draft_name),
        "tree": llm.drafter.describe(),
        "policy": "fixed" if llm.policy is None else "auto",
        "decisions": dict(stats.decisions),
        "predicted_tokens": stats.predicted_tokens,
        "dtype": dtype_name(llm.target.dtype),
        "device": str(llm.target.device),
        "runs_by": llm.target.runner.name,
        **asdict(llm.target.runner.weight_format),
        "versions": hardware.versions(),
    }


def _logprobs(name: str, entries: Sequence[TokenLogprobs | None] | None) -> Fields:
    return {} if entries is None else {name: [None if entry is None else asdict(entry) for entry in entries]}


@dataclass(frozen=True)
class Here(Generic[Given]):
    """A function to call in another process, but in the folder of this one, from which relative paths are meant."""

    function: Callable[..., Given]
    folder: str = field(default_factory=os.getcwd)

    def __call__(self, *arguments: object) -> Given:
        with suppress(OSError):  # another machine need not have it
            os.chdir(self.folder)
        return self.function(*arguments)


def wants_gpu(device: str) -> bool:
    """Return whether a process whose --device this is takes a GPU."""
    if device != "auto":
        return device != "cpu"
    import torch

    return torch.cuda.is_available()


def on_cluster() -> bool:
    """Return whether RAY_ADDRESS names a cluster, or asks with "local" for Ray on this machine."""
    return bool(os.environ.get("RAY_ADDRESS"))


def cores_for(processes: int) -> int:
    return max(1, (os.cpu_count() or 1) // processes)


def spread(
    items: Sequence[Item],
    make: Callable[[], Callable[[Sequence[Item]], Iterable[Outcome]]],
    workers: int,
    device: str,
) -> Iterator[Outcome]:
    """Yield the outcomes of items, by workers of Ray's that `make` makes, in the order of the items."""
    need_packages("--workers", "ray", "ray")
    ray = elsewhere.part("workers", "--workers")
    share = ray.Workers(workers, cpus=cores_for(workers), gpus=float(wants_gpu(device)))
    outcomes: Iterator[Outcome] = ray.worked(items, Here(make), share)
    return outcomes
