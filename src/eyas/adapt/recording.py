"""A drafter that shows the learner each cycle, and keeps the features of the texts that its method reads.

It stands between the engine and the method, and drafts what the method drafts:

    draft     the learner chooses the weights of the cycle; texts of rows that have ended go to the learner
    commit    the features of the accepted path are kept, and the learner counts its length

The target is asked for the features of one more layer than the method reads, where its training loss needs it.
Letters: B rows, P places of the longest path, T tokens, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from eyas.adapt.texts import MAX_TEXT, Text, Texts
from eyas.core.drafter import CycleInput, Drafter, DraftSession, TreeSize
from eyas.core.features import RowFeature
from eyas.core.requests import Request, RequestFeature
from eyas.core.target import Target
from eyas.core.tree import Draft, TargetOutput, Verdict
from eyas.drafters.tools import EagleMethod

__all__ = ["Private", "Recorded"]


class Private(RequestFeature):
    """Feature that keeps a request private: the learner gets nothing of its text."""

    def open(self, request: Request, target: Target) -> RowFeature:
        """See `RequestFeature`."""
        return _PrivateRow()


class _PrivateRow(RowFeature):
    """Marks a row whose text is not kept."""


class Observer(Protocol):
    """Interface that the recorder calls; `learner.Learner` implements it."""

    texts: Texts

    def opened(self, session: RecordingSession) -> None:
        """Know a session, whose texts are wanted when nothing is in flight."""

    def begin_cycle(self) -> None:
        """Choose the weights of the cycle that begins."""

    def end_cycle(self, lengths: Sequence[int]) -> None:
        """Count the tokens that each row has got in the cycle that ends."""


class Recorded(Drafter):
    """A method, with a learner that sees its cycles."""

    def __init__(self, drafter: EagleMethod, observer: Observer) -> None:
        super().__init__(drafter.target, drafter.options)
        self.drafter, self.observer = drafter, observer
        more = [layer for layer in drafter.train_feature_layers if layer not in drafter.feature_layers]
        self.feature_layers = (*drafter.feature_layers, *more)

    @property
    def parts(self) -> tuple[Drafter, ...]:  # type: ignore[override]
        """The method."""
        return (self.drafter,)

    @property
    def max_tree(self) -> TreeSize | None:
        """See `Drafter.max_tree`."""
        return self.drafter.max_tree

    @property
    def samples_children(self) -> bool:
        """See `Drafter.samples_children`."""
        return self.drafter.samples_children

    def open(self, rows: int) -> DraftSession:
        """See `Drafter.open`."""
        return RecordingSession(self, rows)

    def describe(self) -> dict[str, Any]:
        """See `Drafter.describe`."""
        return self.drafter.describe()

    def columns_of_training(self, features_TF: Tensor) -> Tensor:
        """Return the features of the layers that the training loss reads, in its order."""
        D, place = self.target.hidden_size, {layer: i for i, layer in enumerate(self.feature_layers)}
        layers = self.drafter.train_feature_layers
        if layers == self.feature_layers:
            return features_TF
        return torch.cat([features_TF[:, place[layer] * D : (place[layer] + 1) * D] for layer in layers], dim=1)


@dataclass
class _Row:
    """Tokens and features of the text in one row, kept for the learner."""

    prompt: int = 0  # tokens of the prompt
    first: int = 0  # absolute position of the first token that is kept
    count: int = 0  # tokens that are kept
    parts: list[Tensor] = field(default_factory=list)  # their features [T, F], in order
    text: Sequence[int] = ()  # prompt and emitted tokens; it grows while the request is in flight
    drafted: bool = False  # whether a cycle has drafted for the request
    private: bool = False

    def add(self, features_TF: Tensor, position: int) -> None:
        """Keep the features of tokens from this position on; a gap begins a new text."""
        if position != self.first + self.count:
            self.first, self.count, self.parts = position, 0, []
        self.parts.append(features_TF)
        self.count += len(features_TF)
        while self.count - len(self.parts[0]) >= MAX_TEXT:
            dropped = len(self.parts.pop(0))
            self.first += dropped
            self.count -= dropped

    def take(self) -> Text | None:
        """Return the text, which is kept no longer; None if there is none to learn from."""
        parts, first, end = self.parts, self.first, min(self.first + self.count, len(self.text))
        self.first, self.count, self.parts = self.first + self.count, 0, []
        if not parts or not self.drafted or self.private or end <= first:
            return None
        begin = max(first, end - MAX_TEXT)
        features_TF = torch.cat(parts)[begin - first : end - first]
        return Text(list(self.text[begin:end]), features_TF, max(1, self.prompt - begin))


class RecordingSession(DraftSession):
    """The method's session, which is called as the engine calls this one."""

    def __init__(self, drafter: Recorded, rows: int) -> None:
        self.drafter, self.observer = drafter, drafter.observer
        self.session = drafter.drafter.open(rows)
        self.width = drafter.target.hidden_size * len(drafter.drafter.feature_layers)
        self.kept = [_Row() for _ in range(rows)]
        self.positions: dict[int, int] = {}  # of the roots of the current cycle, by row
        self.observer.opened(self)

    def truncate(self, row: int, length: int) -> int:
        """See `DraftSession.truncate`."""
        return self.session.truncate(row, length)

    def copy(self, source: int, row: int, length: int) -> int:
        """See `DraftSession.copy`."""
        return self.session.copy(source, row, length)

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        """See `DraftSession.begin`. The row's last request has ended by now."""
        self._give(row)
        self.kept[row] = _Row(prompt=total, first=cached_tokens)
        self.session.begin(row, cached_tokens, total)

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        """See `DraftSession.prefill`."""
        self.session.prefill(row, tokens_T, features_TF[:, : self.width], position)
        self.kept[row].add(features_TF, position)

    def end(self, row: int) -> None:
        """See `DraftSession.end`."""
        self._give(row)
        self.session.end(row)

    def clear(self, row: int) -> None:
        """See `DraftSession.clear`. Nothing is learnt from a text that failed."""
        self.kept[row] = _Row()
        self.session.clear(row)

    def draft(self, cycle_input: CycleInput) -> Draft:
        """See `DraftSession.draft`."""
        self.observer.begin_cycle()
        self.positions = {}
        for number, row in enumerate(self.kept):
            if number not in cycle_input.active_rows:
                if row.drafted:
                    self._give(number)
                continue
            row.text, row.drafted = cycle_input.row_tokens[number], True
            features = cycle_input.features[number] if cycle_input.features else ()
            row.private = any(isinstance(feature, _PrivateRow) for feature in features)
            if row.private:
                row.parts, row.count = [], 0
            self.positions[number] = len(row.text) - 1
        return self.session.draft(cycle_input)

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        """See `DraftSession.commit`."""
        self.session.commit(draft, verdict, replace(output, features_BNF=output.features_BNF[..., : self.width]))
        path_BPF, lengths = output.features_at(verdict.path_BP), verdict.length_B.tolist()
        for row, position in self.positions.items():
            if not self.kept[row].private:
                self.kept[row].add(path_BPF[row, : lengths[row]].clone(), position)
        self.observer.end_cycle([lengths[row] for row in self.positions])

    def give_all(self) -> None:
        """Give all texts to the learner. Called when no request is in flight."""
        for row in range(len(self.kept)):
            self._give(row)

    def _give(self, row: int) -> None:
        text = self.kept[row].take()
        if text is not None:
            text.features_TF = self.drafter.columns_of_training(text.features_TF)
            self.observer.texts.add(text)
