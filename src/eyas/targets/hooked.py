"""Models on which somebody has set hooks, or forwards of their own: steering vectors, probes, patches.

Compiled kernels and CUDA graphs do not run them. A comparison when the runner is made would not show it, as a hook may
do nothing until it is switched on. Those that come later are noticed by `targets.loading.version_of`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from eyas.core.extensions import TargetExtension
from eyas.targets.loading import hooks_of

__all__ = ["Extension"]


class Extension(TargetExtension):
    """Hooks or forwards that are there when the target is made."""

    order = 60  # after those that know why a forward is replaced, such as quantised layers
    own_forward_only: Mapping[str, str] = {
        "kernels": "the kernels would leave out the hooks or forwards that are set on its modules",
        "graphs": "no CUDA graphs: they would leave out the hooks or forwards that are set on the model's modules",
    }

    @classmethod
    def applies(cls, model: PreTrainedModel) -> bool:
        return any(_is_changed(module) for module in model.modules())


def _is_changed(module: nn.Module) -> bool:
    """Return whether calls of the module run more than its class's forward; accelerate's, which moves weights, does not
    count."""
    own_forward = "forward" in vars(module) and not hasattr(module, "_hf_hook")
    return own_forward or bool(hooks_of(module))
