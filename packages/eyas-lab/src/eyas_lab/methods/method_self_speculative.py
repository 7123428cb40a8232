"""self_speculative: the target drafts for itself, without some of its layers; no training, no
second model.

    Draft & Verify (Zhang et al. 2023, arXiv 2309.08168)     --skip 3,5a,7m    layer 3, the attention of layer 5, the MLP of layer 7
                                                             --skip auto       found by a search, once for a target
    LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710)       --skip exit:8     the first eight layers, then the final norm and the head

The draft model is a view of the target with fewer layers (`_skip.py`): the model itself is not
touched. The view has a cache of its own for the layers that it keeps, and reads the prompt itself.
The papers share the target's cache, which saves that and lets the draft attend to the keys and values that all
layers made. Here the draft is the smaller model alone. Kangaroo (Liu et al. 2024) exits early too, through a
trained adapter; there is none here.

This module knows no tree policy and no model family.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from eyas.checkpoints import Weights
from eyas.core.drafter import Drafter
from eyas.core.target import Target
from eyas.drafters import small_model
from eyas.errors import OptionError
from eyas.files import parse_json, user_cache, write_atomically
from eyas.targets.fingerprints import fingerprint
from eyas_lab.methods._skip import TEXT_LENGTH, TEXT_ROWS, Found, own_text, parse_parts, search, without

__all__ = ["Method", "Options", "remembered_search"]

log = logging.getLogger("eyas.self_speculative")  # the command line prints these messages

SEARCHED = f"greedy 2, own text {TEXT_ROWS} x {TEXT_LENGTH}"  # version of the search, part of the cache key


@dataclass(frozen=True)
class Options(small_model.DraftOptions):
    """Options of self_speculative."""

    skip: str = "auto"
    """Parts that the draft does without: 3,5a,7m (layers, their attention, their MLP), exit:N (all
    from N on), auto."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.skip, str) or not self.skip:
            raise OptionError(f"skip must be auto, exit:N or a list of layers like 3,5a,7m, got {self.skip!r}")


class Method(small_model.Method):
    """The target without some layers drafts for the target."""

    Options: ClassVar[type] = Options
    summary = "self-speculation: the target without some of its layers drafts; no training, no second model"
    needs_weights = False
    head_format = ""
    trainable = False

    def __init__(self, target: Target, options: Any, draft: Target) -> None:
        super().__init__(target, options, draft)
        self.net = None  # no weights besides the target's own

    def for_target(self, target: Target) -> Drafter:
        other = super().for_target(target)
        assert isinstance(other, Method)
        other.draft_model = self.draft_model.with_adapter(target.adapter)
        return other

    @classmethod
    def from_pretrained(cls, source: str | Path | None, target: Target, options: Any = None) -> Drafter:
        if source is not None:
            raise OptionError("self_speculative drafts with the target itself: leave --draft out")
        return cls.load(None, target, options)

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Raise OptionError if the layers to leave out do not exist, ModelError if their attention or
        MLP cannot be identified."""
        options = options or cls.Options()
        if options.skip == "auto":
            found = remembered_search(target)
            shaped = options.depth is not None or options.tree.choices != "chain"
            options = replace(options, skip=found.skip, depth=options.depth if shaped else found.depth)
        return cls(target, options, without(target, parse_parts(options.skip, target.num_layers)))

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Self:
        """Return the method, which has no weights to initialise."""
        return cls.load(None, target, options)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "skip": self.options.skip}


def remembered_search(target: Target) -> Found:
    """Return the result of `search` on the target's own text, computed once per target and kept in the
    user's cache folder."""
    key = hashlib.sha256(f"{fingerprint(target)} {SEARCHED}".encode()).hexdigest()[:16]
    path = user_cache() / f"skip-{key}.json"
    with suppress(OSError, ValueError, TypeError):  # not there yet, or not whole
        return Found(**parse_json(path.read_bytes()))
    log.info(
        "the layers to skip are searched for this target, once: half a minute for a small model, long for a large one "
        "(--skip exit:N goes without)"
    )
    found = search(target, own_text(target))
    with suppress(OSError):  # then it is searched again the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as stream:
            stream.write((json.dumps(asdict(found)) + "\n").encode())
    return found
