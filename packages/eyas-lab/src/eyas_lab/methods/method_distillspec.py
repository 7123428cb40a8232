"""distillspec: DistillSpec (Zhou et al. 2023, arXiv 2310.08461): a small model is trained on the texts that it drafts.

It drafts like small_model, and writes the same checkpoints, so `cascade` and `spectr` read them too. Training
differs: a share of the batches has answers that the small model samples itself (on-policy data, section 4). The small
model learns the target's distribution on them: forward KL, the first of the paper's divergences. The other batches have
the given text; `eyas regenerate` makes it the target's own. The paper's lenience (section 5.3) is lossy and not here.

Letters: R documents, T tokens of the longest, N packed tokens, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas.core.options import TRAINING
from eyas.drafters import Batch, Loss, small_model
from eyas.drafters.tools import check_number

__all__ = ["Method", "Options"]


@dataclass(frozen=True)
class Options(small_model.Options):
    """Options of distillspec."""

    own: Annotated[float, TRAINING] = 0.5
    """Share of the batches whose answers the small model samples itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("own", self.own, lambda share: 0 <= share <= 1, "from 0 to 1")


class Method(small_model.Method):
    """A small model that learns from its own drafts."""

    Options: ClassVar[type] = Options
    summary = "DistillSpec: small_model, trained on texts that it samples itself"

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Loss:
        """Return small_model's loss; in training, for a share of the batches, on answers of the small model."""
        own = (
            self.draft_model.model.training
            and float(torch.rand((), dtype=torch.float32, generator=generator)) < self.options.own
        )
        return super().loss(self.with_own_answers(batch) if own else batch, generator)

    @torch.no_grad()
    def with_own_answers(self, batch: Batch) -> Batch:
        """Return the batch with samples of the small model from the first token of each document that counts, and the
        target's features there. torch's own random numbers decide."""
        lengths = list(batch.documents.lengths)
        texts = torch.split(batch.tokens_N, lengths)
        begins = [max(1, int(counted.int().argmax())) for counted in torch.split(batch.counted_N, lengths)]
        prompts = [text[:begin] for text, begin in zip(texts, begins, strict=True)]
        prompts_RT = pad_sequence(prompts, batch_first=True, padding_side="left")
        mask_RT = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")
        count = max(length - begin for length, begin in zip(lengths, begins, strict=True))
        if count < 1:
            return batch
        model: Any = self.draft_model.model
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": count}
        answers_RT = model.generate(prompts_RT, attention_mask=mask_RT, eos_token_id=-1, pad_token_id=0, **sampling)
        answers_RT = answers_RT[:, prompts_RT.shape[1] :]
        own = [
            torch.cat([prompt, answer[: length - len(prompt)]])
            for prompt, answer, length in zip(prompts, answers_RT, lengths, strict=True)
        ]
        features_RTF = self.target.encode(pad_sequence(own, batch_first=True), self.train_feature_layers)
        parts: list[Tensor] = [features[:length] for features, length in zip(features_RTF, lengths, strict=True)]
        return replace(batch, tokens_N=torch.cat(own), features_NF=torch.cat(parts).to(batch.features_NF.dtype))
