"""From conversations to the target's own replies: the work that `eyas regenerate` does with the model, in its
own process or in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from eyas.cli.tools import DraftOptions, TargetOptions, differences, load, need_tokenizer
from eyas.errors import OptionError

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas_train.regenerate import Conversation, Regenerated, Skipped

    Reply = tuple[Regenerated | Skipped, Mapping[str, Any]]  # and what a line says about who has answered
    Replies = Callable[[Iterable[Conversation], int, Callable[[int], None]], Iterator[Reply]]

ROWS = {"cpu": 8}  # elsewhere 16


@dataclass(frozen=True)
class ReplyOptions:
    """Options of `eyas regenerate` that concern a reply, and the rows."""

    max_new_tokens: int
    last_only: bool
    drop_cut: bool
    rows: int | None


class Replier:
    """Answers conversations with a model.

    Args:
        sampling: the keywords of `Sampling`.
    """

    def __init__(self, llm: LLM, sampling: Mapping[str, Any], options: ReplyOptions) -> None:
        from eyas.core.sampling import Sampling
        from eyas.targets.fingerprints import fingerprint
        from eyas_train.regenerate import GenerationSettings

        need_tokenizer(llm)
        self.llm = llm
        self.rows = options.rows or ROWS.get(llm.target.device.type, 16)
        self.config = GenerationSettings(
            Sampling(**sampling), options.max_new_tokens, options.last_only, options.drop_cut
        )
        self.settings = {
            **sampling,
            "max_new_tokens": options.max_new_tokens,
            "last_only": options.last_only,
            "drop_cut": options.drop_cut,
            **asdict(llm.target.runner.weight_format),
        }
        self.by = {"target": llm.target.name, "fingerprint": fingerprint(llm.target), **self.settings}

    def check_same(self, first: Mapping[str, Any], path: str) -> None:
        """Raise OptionError if the first conversation of a file was answered by another target or with other
        settings."""
        from eyas.targets.fingerprints import has_fingerprint

        there = first.get("by")
        other = differences(there, self.settings)
        recorded = there.get("fingerprint", "") if isinstance(there, dict) else ""
        if there and not has_fingerprint(self.llm.target, str(recorded)):
            name = there.get("target") if isinstance(there, dict) else there
            other.insert(0, f"target {name!r} there, {self.llm.target.name!r} now")
        if other:
            raise OptionError(f"{path} holds answers made with other settings: {'; '.join(other)}; use another file")

    def replies(
        self, conversations: Iterable[Conversation], total: int, on_step: Callable[[int], None]
    ) -> Iterator[Reply]:
        """Yield the outcomes of conversations, `total` of them, in the order in which they end. `on_step` is told the
        tokens of each cycle."""
        from eyas.core.dormant import with_policy
        from eyas_train.regenerate import regenerate

        llm = self.llm
        assert llm.tokenizer is not None
        drafter = with_policy(llm.drafter, llm.policy)
        rows = min(self.rows, max(1, total))
        for outcome in regenerate(drafter, llm.tokenizer, llm.eos, conversations, self.config, rows, on_step):
            yield outcome, self.by

    def __call__(self, conversations: Sequence[Conversation]) -> Iterator[Reply]:
        """Yield the outcomes of conversations in their own order, as a worker does."""
        replies = self.replies(conversations, len(conversations), _ignore)
        answered = {id(outcome.conversation): (outcome, by) for outcome, by in replies}
        return (answered[id(conversation)] for conversation in conversations)


def _ignore(tokens: int) -> None:
    """Tell nobody."""


def tokens_of(outcome: Regenerated | Skipped) -> int:
    """Return how many tokens were generated for a conversation."""
    return sum(outcome.tokens) if isinstance(outcome.tokens, tuple) else outcome.tokens


@dataclass(frozen=True)
class MakeReplier:
    """Loads the model in a worker.

    Attributes:
        first: the first conversation that is there already; it must have been answered in the same way.
    """

    model: TargetOptions
    draft: DraftOptions
    options: Mapping[str, Any]
    sampling: Mapping[str, Any]
    reply: ReplyOptions
    first: Mapping[str, Any]

    def __call__(self) -> Replier:
        """Return the function that answers conversations. Raise EyasError if the options do not fit, or other
        answers are there."""
        replier = Replier(load(self.model, self.draft, self.options), self.sampling, self.reply)
        replier.check_same(self.first, "the output")
        return replier
