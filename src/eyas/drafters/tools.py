"""Tools for authors of methods, in addition to `DraftMethod`, `Batch` and `Loss` of `eyas.drafters`.

A method is a module with one class named `Method` (docs/design/add_a_method.md). It need not live in eyas; these
are the parts of eyas' own methods that others build on:

    trees      DynamicTree, DraftNetSteps, grow_dynamic     a tree of the most probable paths (EAGLE-2, section 4)
               grow_static                                  a tree of a given shape (EAGLE-1)
               FusedTreeBuilder                             the same tree, grown by kernels
               Merged                                       two drafters whose trees are joined
    sessions   FeatureSession                               keeps the target's newest feature of each row
               TextSession, Index, MatchRates, ...          drafts that are copied from texts
    EAGLE      EagleMethod, DynamicEagle, EagleSession, ... methods whose net reads features and tokens
    nets       load_head, random_net, saved_head, ...       a draft net from a checkpoint, from a seed, back to a checkpoint
               check_head, layer_shape, target_sizes, ...   sizes of nets and of targets
               source_layers                                layers of the target whose keys a draft may read
    options    check_whole, check_number, ...               refuse impossible values of a method's options

Everything else in modules that begin with an underscore may change. Importing this module imports torch.
"""

from __future__ import annotations

from eyas.drafters._assistant_net import source_layers
from eyas.drafters._eagle import DynamicEagle, EagleMethod, EagleSession, Window
from eyas.drafters._feature_session import FeatureSession
from eyas.drafters._grow import DraftNetSteps, DynamicTree, FusedTreeBuilder, grow_dynamic, grow_static
from eyas.drafters._merge import Merged
from eyas.drafters._nets import (
    MARGIN,
    check_head,
    layer_config,
    layer_numbers,
    layer_shape,
    load_head,
    load_tensors,
    mask_token,
    place_net,
    random_net,
    saved_head,
    seeded,
    target_layer_shape,
    target_sizes,
)
from eyas.drafters._ngram import Index, MatchRates, TextSession
from eyas.drafters._options import check_choice, check_number, check_weight, check_whole

__all__ = [
    "MARGIN", "DraftNetSteps", "DynamicEagle", "DynamicTree", "EagleMethod", "EagleSession", "FeatureSession",
    "FusedTreeBuilder", "Index", "MatchRates", "Merged", "TextSession", "Window", "check_choice", "check_head",
    "check_number", "check_weight", "check_whole", "grow_dynamic", "grow_static", "layer_config", "layer_numbers",
    "layer_shape", "load_head", "load_tensors", "mask_token", "place_net", "random_net", "saved_head", "seeded",
    "source_layers", "target_layer_shape", "target_sizes",
]  # fmt: skip
