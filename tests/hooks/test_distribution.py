"""The engine's scores for a list of processors are those of the list itself, in any order and on any text."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TopPLogitsWarper,
)
from transformers.generation import MaxLengthCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria

import eyas
from eyas.core.adjustments import Adjustments
from eyas.core.sampling import apply_sampling
from eyas.features.guidance import make_custom
from eyas.hooks.sampling import Batch, Distribution
from hooks.conftest import padded
from wishes import processors_of

LENGTH, EOS = 30, (2, 11)
ORDERS: dict[str, tuple[dict[str, Any], int]] = {  # settings of generate -> processors that run once for each node
    "all native": (
        {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "min_new_tokens": 8}, 0,
    ),
    "nothing": ({"top_k": 0}, 0),
    "typical after top-p": ({"temperature": 0.7, "top_k": 0, "top_p": 0.9, "typical_p": 0.8}, 3),
    "cut-offs": ({"temperature": 1.7, "top_k": 40, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02}, 4),
    "top-h": ({"temperature": 1.3, "top_h": 0.4, "top_k": 0, "min_p": 0.1}, 2),
    "bias before penalty": ({"sequence_bias": [[[7], 9.0]], "repetition_penalty": 1.7, "top_k": 20}, 2),
    "n-grams, length": ({"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_length": 12, "top_k": 20}, 2),
    "a top-p that keeps seven": ({"top_k": 0, "custom": TopPLogitsWarper(0.2, min_tokens_to_keep=7)}, 1),
    "a watermark": (
        {"watermarking_config": {"bias": 3.0, "seeding_scheme": "selfhash"}, "temperature": 0.5, "top_k": 20}, 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("row", [0, 1])
def test_scores_are_those_of_the_list(model: PreTrainedModel, order: str, row: int) -> None:
    """A step moved before another, a penalty on padding, a length without it: each changes a score."""
    given, slow = ORDERS[order]
    settings = {**given}
    custom = LogitsProcessorList([settings.pop("custom")] if "custom" in settings else [])
    inputs = padded()
    config = GenerationConfig(do_sample=True, eos_token_id=list(EOS), max_length=LENGTH, **settings)
    config._eos_token_tensor, config._pad_token_tensor = torch.tensor(EOS), torch.tensor(0)
    prepared = {"attention_mask": inputs["attention_mask"]}
    made = model._get_logits_processor(config, 9, inputs["input_ids"], None, custom, "cpu", prepared)
    criteria = StoppingCriteriaList([MaxLengthCriteria(LENGTH), EosTokenCriteria(torch.tensor(EOS))])
    batch = Batch.from_call(inputs["input_ids"], inputs["attention_mask"])
    distribution = Distribution.from_call(batch, config, made, criteria)
    if not any(type(one) is RepetitionPenaltyLogitsProcessor and one.prompt_ignore_length is None for one in made):
        # up to transformers 5.18 or so the penalty counts padding, and is run as it is
        assert len(distribution.processors) == slow
    request = distribution.request(row, logits=False)
    generator = torch.Generator().manual_seed(row)
    for emitted in (0, 2, 5, 9):
        new = torch.randint(3, 40, (3, emitted), generator=generator)
        logits_3V = torch.randn(3, 262, generator=generator) * 3
        logits_3V[:, list(EOS)] += 6.0  # so that their exclusion shows
        expected_V = made(torch.cat([inputs["input_ids"], new], 1), logits_3V.clone())[row]
        text = [*request.prompt, *new[row].tolist()]
        seen, ending = (torch.zeros(1, 262, dtype=torch.bool) for _ in range(2))
        seen[0, text] = True
        ending[0, list(EOS)] = True
        wait = torch.tensor([max(0, request.min_tokens - emitted)])
        adjustments = Adjustments(seen, None, None, ending, wait)
        slow_ones = make_custom(processors_of(request), text, False, None)
        found_1V = apply_sampling(logits_3V[row][None], request.sampling, adjustments, slow_ones)
        torch.testing.assert_close(found_1V[0].softmax(-1), expected_V.softmax(-1), atol=1e-6, rtol=1e-4)


def test_code_that_tells_rows_apart(model: PreTrainedModel) -> None:
    """Every row is shown to it alone, so all of them would be row 0."""

    def allowed(row: int, text: Any) -> list[int]:
        return [20 + row, 30 + row + len(text) % 3]

    class OfRows(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            for row in range(3):
                scores[row, 20 + row + input_ids.shape[1] % 2] += 50.0
            return scores

    for asked in ({"prefix_allowed_tokens_fn": allowed}, {"logits_processor": [OfRows()]}):
        asked |= {**padded(), "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
        custom = eyas.hf("suffix", tree="fixed")
        assert torch.equal(model.generate(**asked, custom_generate=custom), model.generate(**asked))
