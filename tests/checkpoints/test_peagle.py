"""P-EAGLE heads on disk: the two published forms, what is refused, and writing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.checkpoints import load, save
from golden import same
from published import D, Head, deep, read, refused, without

MASK = torch.arange(3 * D).float()


def flat(**changes: Any) -> Head:
    config, held = deep("vllm", 2, **{"pard_token": 9, **changes})
    return config, {**held, "mask_hidden": MASK[None]}


def speculators(**changes: Any) -> Head:
    config, held = deep("speculators", 2)
    methods = [{"proposal_type": "greedy", "speculative_tokens": 6}]
    config["speculators_config"] = {"algorithm": "peagle", "proposal_methods": methods}
    named = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": 9}
    return {**config, **named, **changes}, {**held, "mask_hidden": MASK[None, None]}


FORMS = {"flat": flat, "speculators": speculators}


@pytest.mark.parametrize("form", FORMS)
def test_both_forms(tmp_path: Path, form: str) -> None:
    """Guards mask, token and levels, and that the rest is EAGLE-3's; what is written is read back the same."""
    config, held = FORMS[form]()
    weights = read(tmp_path / "a", (config, held))
    assert weights.method == "peagle"
    assert torch.equal(weights.tensors["mask_hidden"], MASK)
    levels = 6 if form == "speculators" else None
    assert [weights.config[name] for name in ("mask_token", "levels", "layers")] == [9, levels, 2]
    eagle3 = deep("vllm" if form == "flat" else form, 2)[0]
    plain = read(tmp_path / "b", (eagle3, without(held, "mask_hidden")))
    assert plain.method == "eagle3"
    assert same(plain.tensors, without(weights.tensors, "mask_hidden"))
    assert plain.config.items() <= weights.config.items()
    save(weights, tmp_path / "c")
    again = load(tmp_path / "c")
    assert same(again.tensors, weights.tensors)
    assert again.config == weights.config


@pytest.mark.parametrize(("head", "changed", "says"), [
    (flat(pard_token=None), {}, "must name one mask token"),
    (flat(ptd_token_id=8), {}, "must name one mask token"),
    (flat(pard_token="9"), {}, "must name one mask token"),
    (speculators(mask_token_id=None), {}, "must name one mask token"),
    (flat(), {"mask_hidden": MASK[:-1]}, "should hold 24 numbers"),
    (flat(), {"mask_hidden": MASK.view(3, D)}, "should hold 24 numbers"),
    (speculators(), {"mask_hidden": None}, "has no mask_hidden"),
    (flat(parallel_drafting=False), {}, "parallel_drafting False"),
    (flat(parallel_draft_step=4), {}, "parallel_draft_step 4"),
    (flat(eyas={"levels": 0}), {}, "has levels 0"),
    (flat(), {"fc.bias": torch.zeros(D)}, "biases"),
    (flat(), {"state": torch.zeros(3)}, "unexpected state"),
    (speculators(norm_before_residual=None), {}, "no norm_before_residual"),
])  # fmt: skip
def test_faults(tmp_path: Path, head: Head, changed: dict[str, Tensor | None], says: str) -> None:
    """Guards against a head that runs as what it is not."""
    refused(tmp_path, head, says, **changed)
