"""A drafter that shows the learner each cycle, and keeps the texts that its method reads, with the target's features of
them, in bounded memory.

It stands between the engine and the method, and returns the method's drafts:

    draft     the learner chooses the weights of the cycle; texts of rows that have ended go to the learner
    commit    the features of the accepted path are kept, and the learner counts its length

The target is asked for the features of one more layer than the method reads, where its training loss needs it.
Letters: B rows, P places of the longest path, T tokens, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput, Drafter, DraftSession, TreeSize
from eyas.core.features import RowFeature
from eyas.core.requests import Request, RequestFeature
from eyas.core.target import Target
from eyas.core.tree import Draft, TargetOutput, Verdict
from eyas.drafters import Batch
from eyas.drafters.tools import EagleMethod
from eyas.nn import Documents

MAX_TEXT = 512  # tokens of one text; of a longer one the end is kept
MIN_COUNTED = 4  # tokens of an answer: from fewer there is nothing to learn


class Private(RequestFeature):
    """Feature that keeps a request private: the learner gets nothing of its text."""

    def open(self, request: Request, target: Target) -> RowFeature:
        return PrivateRow()


class PrivateRow(RowFeature):
    """Marks a row whose text is not kept."""


@dataclass(eq=False)
class Text:
    """Consecutive tokens of one request, and the target's outputs for them."""

    tokens: list[int]
    features_TF: Tensor
    answer: int  # index of the first token that the target wrote
    uses: int = 0  # how many steps have read it


class Texts:
    """The newest texts. The oldest ones leave when there are too many, and each leaves when it has been used often.

    Args:
        max_tokens, max_bytes: of all texts.
        max_uses: steps that read a text.
    """

    def __init__(self, max_tokens: int = 16_384, max_bytes: int = 256 * 2**20, max_uses: int = 4) -> None:
        self.max_tokens, self.max_bytes, self.max_uses = max_tokens, max_bytes, max_uses
        self.texts: list[Text] = []  # the oldest first

    @property
    def tokens(self) -> int:
        """The number of tokens of all texts."""
        return sum(len(text.tokens) for text in self.texts)

    @property
    def bytes(self) -> int:
        """The bytes of all features."""
        return sum(text.features_TF.nbytes for text in self.texts)

    def add(self, text: Text) -> None:
        """Keep a text, unless its answer is too short, and drop the oldest beyond the limits."""
        if len(text.tokens) - text.answer < MIN_COUNTED:
            return
        self.texts.append(text)
        while self.texts and (self.tokens > self.max_tokens or self.bytes > self.max_bytes):
            self.texts.pop(0)

    def take(self, tokens: int) -> list[Text]:
        """Return texts of about so many tokens for one step: those that were used least, the newest first."""
        taken, count = list[Text](), 0
        for text in sorted(reversed(self.texts), key=lambda text: text.uses):
            if count < tokens:
                taken.append(text)
            count += len(text.tokens)
        for text in taken:
            text.uses += 1
        self.texts = [text for text in self.texts if text.uses < self.max_uses]
        return taken


def batch_of(texts: Sequence[Text], device: torch.device) -> Batch:
    """Return a batch in which the tokens that the target wrote count."""
    counted = [place >= text.answer for text in texts for place in range(len(text.tokens))]
    tokens_N = torch.tensor([token for text in texts for token in text.tokens], device=device)
    # features were made in inference mode, in which nothing can be learnt: this is a copy
    features_NF = torch.cat([text.features_TF for text in texts]).clone()
    documents = Documents(tuple(len(text.tokens) for text in texts))
    return Batch(tokens_N, features_NF, torch.tensor(counted, device=device), documents)


class Recorded(Drafter):
    """A method, with an observer of its cycles: `learner.Learner`."""

    def __init__(self, drafter: EagleMethod, observer: Any) -> None:
        super().__init__(drafter.target, drafter.options)
        self.drafter, self.observer = drafter, observer
        more = [layer for layer in drafter.train_feature_layers if layer not in drafter.feature_layers]
        self.feature_layers = (*drafter.feature_layers, *more)

    @property
    def parts(self) -> tuple[Drafter, ...]:  # type: ignore[override]
        """The drafter that is recorded."""
        return (self.drafter,)

    @property
    def max_tree(self) -> TreeSize | None:
        return self.drafter.max_tree

    @property
    def samples_children(self) -> bool:
        return self.drafter.samples_children

    def open(self, rows: int) -> DraftSession:
        return RecordingSession(self, rows)

    def describe(self) -> dict[str, Any]:
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
        """Return the text and forget it; None if there is none to learn from."""
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
        self.observer.sessions.add(self)

    def truncate(self, row: int, length: int) -> int:
        return self.session.truncate(row, length)

    def copy(self, source: int, row: int, length: int) -> int:
        return self.session.copy(source, row, length)

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        """The row's last request has ended by now."""
        self._give(row)
        self.kept[row] = _Row(prompt=total, first=cached_tokens)
        self.session.begin(row, cached_tokens, total)

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        self.session.prefill(row, tokens_T, features_TF[:, : self.width], position)
        self.kept[row].add(features_TF, position)

    def end(self, row: int) -> None:
        self._give(row)
        self.session.end(row)

    def clear(self, row: int) -> None:
        """Nothing is learnt from a text that failed."""
        self.kept[row] = _Row()
        self.session.clear(row)

    def draft(self, cycle_input: CycleInput) -> Draft:
        self.observer.begin_cycle()
        self.positions = {}
        for number, row in enumerate(self.kept):
            if number not in cycle_input.active_rows:
                if row.drafted:
                    self._give(number)
                continue
            row.text, row.drafted = cycle_input.row_tokens[number], True
            features = cycle_input.features[number] if cycle_input.features else ()
            row.private = any(isinstance(feature, PrivateRow) for feature in features)
            if row.private:
                row.parts, row.count = [], 0
            self.positions[number] = len(row.text) - 1
        return self.session.draft(cycle_input)

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
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
