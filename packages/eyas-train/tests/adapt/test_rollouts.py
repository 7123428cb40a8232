"""The recipe of docs/guide/learn_online.md for reinforcement learning: rollouts by `model.generate`, between which the target's
weights change, while the head learns to draft for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import eyas
import zoo
from eyas import checkpoints
from eyas.core.target import Target
from eyas_train.adapt import Learner, Settings
from test_lossless import make


@pytest.mark.exhaustive
def test_rollouts_while_the_target_is_trained(tmp_path: Path) -> None:
    """Guards that `attach` notices every update, so that rollouts are those of the present weights; that the head
    goes on from what it has learnt; and that learning leaves no gradients in the policy. Greedy, so that the ids can
    be compared with transformers' own loop."""
    policy: Any = zoo.tiny("llama")
    checkpoints.save(make("eagle3", Target(policy)).weights(), tmp_path)  # type: ignore[attr-defined]
    prompts = torch.tensor([[5, 6, 7], [9, 8, 4], [5, 6, 7]])
    asked = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts), "max_new_tokens": 24, "pad_token_id": 0}
    tree = {"nodes": 8, "depth": 3, "branch": 2}
    head = eyas.load(policy, tmp_path, tokenizer=False, kernels="off", tree=tree).drafter
    learner = Learner(head, Settings(share=1e9, lr=5e-3, steps=1))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    texts = list[torch.Tensor]()
    with eyas.attach(policy, learner.drafter, kernels="off"):
        for step in range(3):
            policy.eval()
            rollouts = policy.generate(**asked)
            assert learner.rest()
            while learner.rest():  # before the update: the texts are what these weights wrote
                pass
            assert all(parameter.grad is None for parameter in policy.parameters())
            assert learner.steps > step
            plain = type(policy).generate(policy, **asked)
            assert torch.equal(rollouts, plain)
            texts.append(rollouts)
            policy.train()
            policy(input_ids=rollouts, labels=rollouts).loss.backward()  # instead of a reward's gradient
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            learner.forget()
            assert not learner.texts.texts
    assert not torch.equal(texts[0], texts[-1])  # the weights have changed enough to matter
    assert learner.given.net is not learner.student.net
    assert learner.trial is not None or learner.kept or learner.undone
