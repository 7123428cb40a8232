"""Heads that are put in another one's place while requests run, and that learn while they serve.

    swap_draft(llm, "another_head")          from the next cycle on; requests in flight go on
    llm = adapting(eyas.load("smollm2"))     its head learns from what it answers (docs/guide/learn_online.md)
    llm.save_draft("my_head")

The weights of the head never change the text, because drafts are verified. Of a request with the feature
`Private` nothing is kept. `eyas serve` asks for `Heads` and `LearningLLM`, by the entry point "adapt".
"""

from eyas_train.adapt.heads import Heads, LearningLLM, adapting, swap_draft
from eyas_train.adapt.learner import Learner, Settings
from eyas_train.adapt.recording import Private
from eyas_train.adapt.swap import HeadMismatchError

__all__ = ["HeadMismatchError", "Heads", "Learner", "LearningLLM", "Private", "Settings", "adapting", "swap_draft"]
