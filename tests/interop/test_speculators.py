"""The speculators library's own EAGLE-3 class computes our logits, in every setting that an export has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import eyas
import processes
from eyas import checkpoints, exports
from eyas.drafters import find
from eyas.nn import Documents
from heads import make
from interop_engines import PROGRAMS

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
    target = llm.target
    made = {"embedded": exported("eagle3", "speculators")}
    for name, options in SETTINGS.items():
        made[name] = tmp_path / name.replace(" ", "-")
        exports.export(make("eagle3", target, **options).weights(), "speculators", made[name], known)
    residual = make("eagle3", target).weights()
    residual.config["norm_before_residual"] = True
    made["norm_before_residual"] = tmp_path / "residual"
    exports.export(residual, "speculators", made["norm_before_residual"], known)

    tokens_N = torch.tensor(llm.ids("I want to book a table for two in San Jose tonight."))
    methods = {name: find("eagle3").load(checkpoints.load(place), target) for name, place in made.items()}
    features = {name: target.encode(tokens_N[None], method.feature_layers)[0] for name, method in methods.items()}
    inputs = {"tokens": tokens_N, **{f"features.{i}": value.contiguous() for i, value in enumerate(features.values())}}
    save_file(inputs, tmp_path / "inputs.safetensors")
    outside = {name: value for name, value in processes.environment().items() if name != "PYTHONPATH"}
    program = [interop, PROGRAMS / "speculators_logits.py", STEPS, tmp_path / "inputs.safetensors", *made.values()]
    done = processes.run(program, env=outside)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for name, method in methods.items():
        theirs_INV = load_file(made[name] / "logits.safetensors")["logits"]
        ours_INV = logits(method, target, tokens_N, features[name])
        for step in range(STEPS):
            known_slots = len(tokens_N) - 1 - step  # behind them the next token is not known
            torch.testing.assert_close(
                theirs_INV[step, :known_slots], ours_INV[step, :known_slots], rtol=1e-3, atol=1e-3, msg=name
            )
        print(
            f"{name}: largest difference {(theirs_INV - ours_INV)[:, :-STEPS].abs().max():.1e}, deviation {ours_INV.std():.1f}"
        )


def logits(method: Any, target: Any, tokens_N: Tensor, features_NF: Tensor) -> Tensor:
    """Our logits [steps, N, V']."""
    rows_N, documents = torch.arange(len(tokens_N)), Documents((len(tokens_N),))
    with torch.no_grad():
        hidden = method.net.training_time_test(
            features_NF, lambda i: target.embed(tokens_N[i]), rows_N, documents, STEPS
        )
        return torch.stack([method.head(hidden_ND) for hidden_ND in hidden])
