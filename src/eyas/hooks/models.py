"""For each model eyas keeps its LLMs, in the model's attribute `_eyas`: they refer to the model, so they
are freed together with it.

Copies of the model (deepcopy, pickle) begin without them. Nothing else of a model is touched.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from eyas import api
from eyas.core.drafter import Drafter
from eyas.errors import ModelError, OptionError
from eyas.targets.loading import version_of

ATTRIBUTE = "_eyas"
MAX_LLMS = 4  # LLMs that are kept for a model; each may hold a draft head, and kernels' copy of the weights
# options of `eyas.load` that describe the target, which is loaded already
TARGET_OPTIONS = (
    "target",
    "gguf_file",
    "cache",
    "tokenizer",
    "dtype",
    "torch_dtype",
    "device",
    "device_map",
    "offload_folder",
    "trust_remote_code",
)


@dataclass(frozen=True)
class Settings:
    draft: Any = None
    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in TARGET_OPTIONS:
            if name in self.options:
                raise OptionError(f"{name} is the model's, which is loaded already: leave it out")

    @property
    def key(self) -> Hashable:
        """Equal for settings that make the same LLM."""
        draft = self.draft if isinstance(self.draft, Drafter) or self.draft is None else str(self.draft)
        return draft, self.method, repr(sorted(self.options.items()))


class _ModelState:
    def __init__(self) -> None:
        # LLMs by settings and version of the weights
        self.llms: OrderedDict[tuple[Hashable, Hashable], api.LLM] = OrderedDict()

    def __deepcopy__(self, memo: Any) -> _ModelState:
        return _ModelState()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()  # so that a saved model does not ask for eyas when it is loaded


_creation = threading.Lock()


def _state_of(model: PreTrainedModel) -> _ModelState:
    with _creation:
        state = model.__dict__.get(ATTRIBUTE)
        if not isinstance(state, _ModelState):
            state = model.__dict__[ATTRIBUTE] = _ModelState()
        return state


def llm_for(model: PreTrainedModel, settings: Settings) -> api.LLM:
    """Return the LLM of this model with these settings; made again if the weights, hooks or forwards have changed."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"eyas drafts for causal language models of transformers, not for {type(model).__name__}")
    if model.training:
        raise ModelError("the model is in training mode: call model.eval() first")
    llms = _state_of(model).llms
    key = settings.key, version_of(model)
    if key not in llms:
        for old in [old for old in llms if old[0] == settings.key]:
            del llms[old]
        llms[key] = api.load(model, settings.draft, settings.method, tokenizer=False, **settings.options)
        while len(llms) > MAX_LLMS:
            llms.popitem(last=False)
    llms.move_to_end(key)
    return llms[key]


def forget(model: PreTrainedModel) -> None:
    with _creation:
        model.__dict__.pop(ATTRIBUTE, None)
