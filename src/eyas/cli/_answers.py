"""From tasks to answers: the work that `eyas generate --input` does with the model, in its own process or in
workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from eyas.cli._files import InvalidLine, Task, differences
from eyas.cli._load import load, record
from eyas.cli._options import DraftOptions, Fields, TargetOptions
from eyas.errors import EyasError, OptionError

if TYPE_CHECKING:
    from eyas.api import LLM, Prompt


@dataclass(frozen=True)
class Answered:
    task: Task
    fields: Fields  # what --json prints
    emitted: int  # tokens of draft cycles
    cycles: int


class Answerer:
    """Answers tasks with a model, `batch_size` of them together."""

    def __init__(self, llm: LLM, keywords: Mapping[str, Any], batch_size: int | None) -> None:
        self.llm = llm
        self.keywords = keywords
        self.batch_size = batch_size

    def __call__(self, tasks: Sequence[Task]) -> Iterator[Answered | InvalidLine]:
        """Yield the answers in the order in which they end, and before them the tasks that cannot be answered."""
        valid: list[tuple[Task, Prompt]] = []
        for task in tasks:
            try:
                valid.append((task, self._prompt(task)))
            except EyasError as error:
                yield InvalidLine(task.line, str(error))
        keywords = {name: value for name, value in self.keywords.items() if name not in ("system", "raw")}
        prompts = [prompt for _, prompt in valid]
        for i, result in self.llm.generate_each(prompts, batch_size=self.batch_size, **keywords):
            yield Answered(valid[i][0], record(self.llm, result), result.stats.tokens, result.stats.cycles)

    def _prompt(self, task: Task) -> Prompt:
        from eyas.arguments import MediaIds
        from eyas.core.engine import Decoder

        target, drafter, _ = self.llm.view(self.llm.adapter_named(self.keywords.get("adapter")))
        request, _ = self.llm.request(task.prompt, **self.keywords, **task.template)
        probe = Decoder(target, drafter)
        probe.cancel(probe.add(request))  # Decoder.add checks a request; nothing is decoded
        return MediaIds(request.prompt, request.media) if request.media else request.prompt


@dataclass(frozen=True)
class MakeAnswerer:
    """Loads the model in a worker. `first`: the first result that is there, which must be of the same target."""

    model: TargetOptions
    draft: DraftOptions
    options: Mapping[str, Any]
    keywords: Mapping[str, Any]
    batch_size: int | None
    first: Mapping[str, Any]

    def __call__(self) -> Callable[[Sequence[Task]], Iterable[Answered | InvalidLine]]:
        llm = load(self.model, self.draft, self.options)
        if other := differences(self.first, described(llm)):
            raise OptionError(
                f"the output holds answers made with other settings: {'; '.join(other)}; use another file"
            )
        answerer = Answerer(llm, self.keywords, self.batch_size)
        return lambda tasks: sorted(
            answerer(tasks), key=lambda one: one.line if isinstance(one, InvalidLine) else one.task.line
        )


def described(llm: LLM) -> Fields:
    from eyas.arguments import dtype_name

    target = llm.target
    return {"target": target.name, "dtype": dtype_name(target.dtype), **asdict(target.runner.weight_format)}
