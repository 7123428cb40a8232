"""The speculators library's own EAGLE-3, P-EAGLE and MTP classes compute our logits, in every setting that an export has."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import eyas
import zoo
from eyas import checkpoints
from eyas.core.target import Target
from eyas.drafters import find
from eyas.nn import Documents
from eyas_train import exports
from eyas_train.own_outputs import in_parallel, training_time_test
from heads import make
from interop_engines import compute

pytestmark = pytest.mark.slow
STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "fc_norm": {"head.fc_norm": True},
    "norm_output": {"head.norm_output": True},
    "five layers": {"head.layers": "1,4,8,11,13"},
    "a small vocabulary": {"head.draft_vocab": 500},
    "three layers of its own": {"head.depth": 3},
}


def test_logits(
    interop: Path, llm: eyas.LLM, known: checkpoints.ExportTarget, exported: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Guards against a setting that the library reads otherwise: layers by their outputs, a norm
    left out, a residual that is normed; and against a tensor that it fills itself, as it did with
    absent embeddings.

    No false alarms: equal arithmetic in another order differs by 1e-4 of logits whose deviation is 2.
    """
    methods, features, tokens_N = run_on("eagle3", interop, llm, known, exported("eagle3", "speculators"), tmp_path)
    for name, method in methods.items():
        theirs_INV = load_file(tmp_path / name / "logits.safetensors")["logits"]
        ours_INV = logits(method, llm.target, tokens_N, features[name])
        for step in range(STEPS):
            known_slots = len(tokens_N) - 1 - step  # behind them the next token is not known
            theirs, mine = theirs_INV[step, :known_slots], ours_INV[step, :known_slots]
            torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-3, msg=name)
        largest = (theirs_INV - ours_INV)[:, :-STEPS].abs().max()
        print(f"{name}: largest difference {largest:.1e}, deviation {ours_INV.std():.1f}")


def test_logits_of_parallel_heads(
    interop: Path, llm: eyas.LLM, known: checkpoints.ExportTarget, exported: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Guards what stands in a mask's place, its position, and what it attends to, besides what `test_logits` guards."""
    methods, features, tokens_N = run_on("peagle", interop, llm, known, exported("peagle", "speculators"), tmp_path)
    for name, method in methods.items():
        theirs = load_file(tmp_path / name / "logits.safetensors")
        rows_N, documents = torch.arange(len(tokens_N)), Documents((len(tokens_N),))
        with torch.no_grad():
            mask_D = llm.target.embed(torch.tensor([method.mask_token]))[0]
            embed = embeddings_of(llm.target, tokens_N)
            hidden = in_parallel(method.net, features[name], embed, mask_D, rows_N, documents, STEPS)
            ours_INV = torch.stack([method.head(hidden_ND) for hidden_ND in hidden])
        # behind the last slot the next token is not known; the class also draws masks before the text, at slot -1
        known_M = (theirs["slots"] >= 0) & (theirs["slots"] < len(tokens_N) - 1)
        assert all((theirs["depths"][known_M] == depth).sum() > len(tokens_N) / 2 for depth in range(STEPS))
        ours_MV = ours_INV[theirs["depths"][known_M], theirs["slots"][known_M]]
        theirs_MV = theirs["logits"][known_M]
        torch.testing.assert_close(theirs_MV, ours_MV, rtol=1e-3, atol=1e-3, msg=name)
        print(f"{name}: largest difference {(theirs_MV - ours_MV).abs().max():.1e}, deviation {ours_MV.std():.1f}")


def run_on(
    kind: str, interop: Path, llm: eyas.LLM, known: checkpoints.ExportTarget, embedded: Path, folder: Path
) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Export heads in every setting and let the library's class read a text with them; its logits stand in `folder`/NAME.

    Returns:
        Our methods by name, the features [N, F] that each reads, and the text [N].
    """
    target = llm.target
    made = {"embedded": checkpoints.load(embedded)}
    made |= {name: make(kind, target, **options).weights() for name, options in SETTINGS.items()}
    residual = make(kind, target).weights()
    made["norm_before_residual"] = replace(residual, config={**residual.config, "norm_before_residual": True})
    made["Qwen3's layers"] = with_head_norms(make(kind, target, **{"head.depth": 2}).weights())
    for name, weights in made.items():
        exports.export(weights, "speculators", folder / name, known)
    tokens_N = torch.tensor(llm.ids("I want to book a table for two in San Jose tonight."))
    methods = {name: find(kind).load(checkpoints.load(folder / name), target) for name in made}
    features = {name: target.encode(tokens_N[None], method.feature_layers)[0] for name, method in methods.items()}
    inputs = {"tokens": tokens_N, **{f"features.{i}": value.contiguous() for i, value in enumerate(features.values())}}
    save_file(inputs, folder / "inputs.safetensors")
    program = {"eagle3": "speculators_logits.py", "peagle": "peagle_logits.py"}[kind]
    compute(interop, program, STEPS, folder / "inputs.safetensors", *(folder / name for name in made))
    return methods, features, tokens_N


def with_head_norms(head: checkpoints.Weights) -> checkpoints.Weights:
    """The head with Qwen3's layers, which norm queries and keys."""
    noise, h = torch.Generator().manual_seed(0), head.config["head_dim"]
    layers = ["layer", *(f"later.{i}" for i in range(head.config["layers"] - 1))]
    names = [f"{layer}.attention.{x}_norm.weight" for layer in layers for x in "qk"]
    norms = {name: 1 + 0.3 * torch.randn(h, generator=noise) for name in names}
    return replace(head, config={**head.config, "qk_norm": True}, tensors={**head.tensors, **norms})


def test_logits_of_mtp_modules(interop: Path, tmp_path: Path) -> None:
    """Guards the order of the halves, which norm reads what, and names: the library's class, with random weights, saves a
    module that eyas reads; in the first step both see the same. No false alarms, as above."""
    target = Target(zoo.HYBRIDS["qwen3_5"]())
    tokens_N = torch.arange(3, 23)
    features_ND = target.encode(tokens_N[None], (target.num_layers,))[0]
    (tmp_path / "layer.json").write_text(json.dumps(target.model.config.to_dict(), default=str))
    tables = {"embed": target.family.embedding.weight, "lm_head": target.family.head.weight}
    inputs = {
        "tokens": tokens_N,
        "features": features_ND,
        **{name: table.detach().clone() for name, table in tables.items()},
    }
    save_file({name: value.contiguous() for name, value in inputs.items()}, tmp_path / "inputs.safetensors")
    compute(interop, "mtp_logits.py", tmp_path)
    theirs_NV = load_file(tmp_path / "logits.safetensors")["logits"]
    method: Any = find("mtp").from_pretrained(tmp_path / "head", target)
    ours_NV = logits(method, target, tokens_N, features_ND)[0, : len(theirs_NV)]
    print(f"mtp: largest difference {(theirs_NV - ours_NV).abs().max():.1e}, deviation {ours_NV.std():.1f}")
    torch.testing.assert_close(theirs_NV, ours_NV, rtol=1e-3, atol=1e-3)


def embeddings_of(target: Any, tokens_N: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function from slots [M] to embeddings [M, D]."""
    return lambda slots_M: target.embed(tokens_N[slots_M.clamp(max=len(tokens_N) - 1)])


def logits(method: Any, target: Any, tokens_N: Tensor, features_NF: Tensor) -> Tensor:
    """Our logits [steps, N, V']."""
    rows_N, documents = torch.arange(len(tokens_N)), Documents((len(tokens_N),))
    with torch.no_grad():
        hidden = training_time_test(method.net, features_NF, embeddings_of(target, tokens_N), rows_N, documents, STEPS)
        return torch.stack([method.head(hidden_ND) for hidden_ND in hidden])
