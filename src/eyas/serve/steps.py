"""From the Steps of a Decoder to the Deltas of a job: text, tokens and figures, without tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from eyas.api import TextReader
from eyas.core.engine import Step
from eyas.core.tree import Draft
from eyas.serve.cycles import CycleWriter
from eyas.serve.records import CycleFigures, Delta

__all__ = ["DeltaMaker", "drafted_nodes"]


class DeltaMaker:
    """Turns the Steps of one sequence into Deltas, in order.

    Args:
        index: number of the sequence in its job.
        stop_ids: tokens that end the sequence because the job says so.
        writer: says what happened in each cycle, if that is asked for.
    """

    def __init__(
        self, index: int, reader: TextReader, stop_ids: Collection[int] = (), writer: CycleWriter | None = None
    ) -> None:
        self.index = index
        self.reader = reader
        self.stop_ids = stop_ids
        self.writer = writer

    def make(self, step: Step, drafted: int) -> Delta:
        """Return the Delta of one Step, for whose cycle `drafted` nodes were drafted in this row."""
        return Delta(
            self.index,
            text=self.reader.take(final=step.finish is not None),
            token_ids=step.tokens,
            finish=step.finish,
            stop_reason=self.reader.stop_string or self._stop_id(step),
            cycles=() if step.prefill else (figures(step, drafted),),
            prefill=step.prefill,
            cached_tokens=step.cached_tokens,
            predicted=step.extra.get("predicted", 0),
            logprobs=step.extra.get("logprobs", ()),
            prompt_logprobs=step.extra.get("prompt_logprobs", ()),
            cycle=None if self.writer is None else self.writer.write(step),
            error=step.error,
        )

    def _stop_id(self, step: Step) -> int | None:
        """Return the last token, if it ended the sequence because the job says so."""
        ended = step.finish == "stop" and step.tokens[-1] in self.stop_ids
        return step.tokens[-1] if ended else None


def figures(step: Step, drafted: int) -> CycleFigures:
    """Return the numbers of one cycle."""
    return CycleFigures(len(step.tokens), max(0, len(step.path) - 1), drafted, step.seconds, step.drafted_by)


def drafted_nodes(steps: Sequence[Step]) -> list[int]:
    """Return for each Step how many nodes, the root excluded, its cycle's draft had for its row. Each draft is read
    once."""
    counts: dict[int, list[int]] = {}

    def counted(draft: Draft) -> list[int]:
        if id(draft) not in counts:
            counts[id(draft)] = (draft.tree.acceptable_BN.sum(1) - 1).tolist()
        return counts[id(draft)]

    return [0 if step.draft is None else counted(step.draft)[step.row] for step in steps]
