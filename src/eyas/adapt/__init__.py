"""Heads that are put in another one's place while requests run, and that learn while they serve.

    swap_draft(llm, "another_head")          from the next cycle on; requests in flight go on
    llm = adapting(eyas.load("smollm2"))     its head learns from what it answers (docs/guide/learn_online.md)

The weights of the head never change the text, because drafts are verified. Of a request with the feature
`Private` nothing is kept.
"""

from eyas.adapt.heads import Heads, Private, adapting
from eyas.adapt.swap import HeadMismatchError, swap_draft

__all__ = ["HeadMismatchError", "Heads", "Private", "adapting", "swap_draft"]
