"""Heads that learn while they serve; `eyas.adapt` asks for this, and has the code that replaces a head.

    llm = eyas.adapt.adapting(eyas.load("smollm2"))     its head learns from what it answers (docs/guide/learn_online.md)
    llm.save_draft("my_head")

The weights of the head never change the text, because drafts are verified. Of a request with the feature
`eyas.adapt.Private` nothing is kept.
"""

from eyas_train.adapt.learner import Learner, Settings
from eyas_train.adapt.llm import LearningLLM

__all__ = ["Learner", "LearningLLM", "Settings"]
