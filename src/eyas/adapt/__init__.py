"""Drafts that learn while they serve, and heads that are put in another one's place while requests run.

    llm = adapting(eyas.load("smollm2"))     its head learns from what it answers (docs/guide/learn_online.md)
    llm.save_draft("my_head")
    swap_draft(llm, "another_head")          from the next cycle on; requests in flight go on

The text is the same whatever the weights of the head are: drafts are verified. Of a request with the feature
`Private` nothing is kept.
"""

from eyas.adapt.learner import Learner, Settings
from eyas.adapt.llm import Heads, LearningLLM, adapting
from eyas.adapt.recording import Private
from eyas.adapt.swap import HeadMismatchError, swap_draft

__all__ = ["HeadMismatchError", "Heads", "Learner", "LearningLLM", "Private", "Settings", "adapting", "swap_draft"]
