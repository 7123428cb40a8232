"""From the flags of a command to an LLM, and from a result to the JSON that other programs read.

Heavy imports stand inside the functions: `--help` of a command must not wait for torch.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.cli._errors import note

if TYPE_CHECKING:
    from eyas.api import LLM, Result

__all__ = ["ITSELF", "check_exact", "check_sampling", "load", "note_no_head", "quiet", "record", "sampling_of", "versions"]

PACKAGE = Path(__file__).resolve().parents[1]
EMBEDDED = "embedded"
ITSELF = {"draft": None, "method": "vanilla", "kernels": "off", "weights": "exact", "activations": "exact"}  # a target, by its own forward


@contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """What libraries say while they load goes nowhere; warnings of eyas itself become notes."""
    if verbose:
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from transformers.utils import logging as speech

        level, bars = speech.get_verbosity(), speech.is_progress_bar_enabled()
        speech.set_verbosity(logging.CRITICAL)
        speech.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            speech.set_verbosity(level)
            if bars:
                speech.enable_progress_bar()  # type: ignore[no-untyped-call]
    for warning in caught:
        if Path(warning.filename).resolve().is_relative_to(PACKAGE):
            note(str(warning.message))


def load(given: Mapping[str, Any], options: Mapping[str, Any]) -> LLM:
    """The LLM that the flags of MODEL name, with the method's own options."""
    with quiet(given["verbose"]):
        from eyas.api import load as load_llm

        names = (
            "target", "draft", "method", "tokenizer", "dtype", "device", "trust_remote_code", "kernels", "weights", "activations",
            "draft_weights",
        )  # fmt: skip
        asked = {**options, "tree": given["tree"]} if given.get("tree") else options
        return load_llm(**{name: given[name] for name in names if name in given}, draft_with=given.get("draft_with"), **asked)


def check_exact(given: Mapping[str, Any]) -> None:
    """Features come from the target as it is: refuse what would be ignored."""
    from eyas.errors import OptionError

    for name in ("weights", "activations"):
        if given[name] != "exact":
            raise OptionError(f"--{name} {given[name]}: features are those of the target as it is; a head serves a rounded one as well")


def note_no_head(llm: LLM, given: Mapping[str, Any]) -> None:
    """Say what drafts when nothing was named that could. Said once a request was found good."""
    if given["target"] and not given["draft"] and not given["method"]:
        note(f"no --draft: the text itself drafts ({llm.method}); a draft head for this target would make it faster")


def sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `LLM.request` takes of the flags of SAMPLING."""
    from eyas.cli._options import SAMPLING_LAW

    return {name: given[name] for name in (*SAMPLING_LAW, "max_new_tokens", "stop")}


def check_sampling(given: Mapping[str, Any]) -> None:
    """Refuse impossible values before a model is loaded for them."""
    from eyas.cli._options import SAMPLING_LAW
    from eyas.core.sampling import Sampling

    Sampling(**{name: given[name] for name in SAMPLING_LAW})


def record(llm: LLM, result: Result) -> dict[str, Any]:
    """A result as the object that `--json` prints."""
    from eyas import tiny

    stats = result.stats
    return {
        "token_ids": list(result.token_ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "cycles": stats.cycles,
        "accepted_lengths": list(stats.accepted_lengths),
        "tau": stats.tau,
        "seconds": stats.seconds,
        "prefill_seconds": stats.prefill_seconds,
        "tokens_per_second": stats.tokens_per_second,
        "method": llm.method,
        "target": llm.target.name,
        "draft": EMBEDDED if llm.draft_name in {str(head) for head in tiny.HEADS.values()} else llm.draft_name,
        "tree": llm.drafter.describe(),
        "policy": "fixed" if llm.policy is None else "auto",
        "decisions": dict(stats.decisions),
        "dtype": str(llm.target.dtype).removeprefix("torch."),
        "device": str(llm.target.device),
        "runs_by": llm.target.run.name,
        **asdict(llm.target.run.form),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    from eyas.hardware import versions as found

    return found()
