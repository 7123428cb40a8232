"""Linear layers in fp8, and drafts by them."""

from __future__ import annotations

import pytest
import torch

import zoo
from eyas import drafters
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas_gpu._fp8 import TORCH, Fp8Linear, fp8
from eyas_gpu.graphs import GraphRunner
from fake_graphs import captured_without_gpu, prompt
from fp8_support import needs_fp8
from reference import plain_decode, run
from test_lossless import OPTIONS


@needs_fp8
@pytest.mark.parametrize("bias", [True, False])
def test_fp8(bias: bool) -> None:
    """Guards scales: each output's and each row's own, whatever their sizes. Rounding to 3 bits
    behind the point, sums of 64: below 4 %."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48, bias=bias)
    with torch.no_grad():
        linear.weight.mul_(torch.logspace(-4, 4, 48)[:, None])
    x = torch.randn(3, 5, 64) * torch.logspace(-3, 3, 15).view(3, 5, 1)
    expected, found = linear(x), Fp8Linear(linear)(x)
    rest = 0 if linear.bias is None else linear.bias
    scale = (x.norm(dim=-1, keepdim=True) * linear.weight.norm(dim=1) / 8).detach()
    assert found.shape == expected.shape
    assert ((found - rest - (expected - rest)).abs() <= 0.04 * 4 * scale + 1e-2 * (expected - rest).abs()).all()


def test_fp8_leaves_the_net_as_it_is() -> None:
    """Guards a net that is still trained or saved: only the copy's linear layers are rounded,
    everything else is shared."""
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 32), torch.nn.Sequential(torch.nn.Linear(32, 24), torch.nn.Linear(24, 32))
    )
    other = fp8(net)
    assert [type(m) for m in net.modules() if not isinstance(m, torch.nn.Sequential)] == [torch.nn.Linear] * 3
    assert isinstance(other[0], Fp8Linear)
    assert type(other[1][0]) is type(other[1][1]) is torch.nn.Linear, "24 is no multiple of 16"
    assert other[1][0].weight is net[1][0].weight


@pytest.mark.cover(name=2)
@needs_fp8
@pytest.mark.slow
@pytest.mark.usefixtures("without_cpu_kernels")
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "hydra", "medusa"])
def test_drafts_in_fp8(name: str) -> None:
    """Guards `draft_weights="fp8"`, as far as a CPU can: other guesses, the same text, and nothing
    that a graph cannot hold."""
    model, requests = zoo.FAMILIES["llama"](), [Request(prompt(n), 16, Sampling()) for n in (7, 30)]
    target, kind, drafts, rounded = Target(model), drafters.find(name), [], 0
    for draft_weights in ("auto", "fp8"):
        target.draft_weights = draft_weights
        recorded = target.run_with(GraphRunner(target, captured_without_gpu, ops=TORCH))
        drafter = kind.random(recorded, build_options(kind.Options, OPTIONS.get(name, {})), seed=1)
        tokens, steps = run(Decoder(drafter.target, drafter, 2), requests)
        assert [list(t) for t in tokens] == [list(plain_decode(model, r)) for r in requests]
        drafts.append([s.draft.log_q_BN for s in steps if s.draft is not None])
        rounded = sum(isinstance(m, Fp8Linear) for m in drafter.decoding_net.modules())
    assert rounded
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*drafts, strict=False))
