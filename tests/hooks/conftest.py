"""A tiny model whose greedy text repeats itself, so that drafts are accepted, and a padded batch of prompts."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import zoo
from toy_tokenizer import VOCAB

PAD = 0


def padded() -> dict[str, Tensor]:
    """Three prompts of 9, 4 and 1 tokens, padded on the left, two of them with repetitions."""
    prompts = [[7, 8, 9, 7, 8, 9, 7, 8, 9], [30, 31, 30, 31], [40]]
    ids_BT = torch.tensor([[PAD] * (9 - len(prompt)) + prompt for prompt in prompts])
    mask_BT = torch.tensor([[0] * (9 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids_BT, "attention_mask": mask_BT}


@pytest.fixture
def model() -> PreTrainedModel:
    """A llama for the vocabulary of the toy tokenizer; token 5 pads."""
    return zoo.tiny("llama", vocab_size=VOCAB, seed=4)
