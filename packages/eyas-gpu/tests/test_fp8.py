"""Linear layers in fp8; drafts by them are in test_cycles.py."""

from __future__ import annotations

import pytest
import torch

from eyas_gpu._fp8 import Fp8Linear, fp8
from fp8_support import needs_fp8


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
