"""Whole decoder layers by the CPU kernels, against float64: every head size, every format of weights,
a tree behind committed slots, and what must not spread from one row to another.

As in test_kernels.py, every test runs for each instruction set that this machine has.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eyas import kernels
from eyas.core.cache import from_int8
from eyas.kernels import HEAD_DIMS, Layer, Layers, LayerSizes, Matrix, Pass, WeightFormat
from test_kernels import _kernels, needs  # noqa: F401

R, HIDDEN, INNER, SLOTS, WINDOW = 3, 64, 96, 48, 7
LENGTHS = (11, 0, 33)
OLD, PARENTS = 2, (-1, -1, 0, 2, 2, 3, 1)  # nodes of an earlier pass, then the new ones
HEADS = ((4, 2), (2, 2), (3, 1), (6, 2), (26, 1))  # with their key-value heads; 26: more than are read together
FORMATS = ("float32", "bfloat16", "int8", "int4")
# with formats of keys and values
KINDS = [*((kind, "float32") for kind in FORMATS), *(("float32", kv) for kv in ("bfloat16", "int8"))]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_format(store: Tensor, kv: str) -> Tensor:
    """Return a cache in float32 as the kernels have it in another format."""
    if kv != "int8":
        return store.to(getattr(torch, kv))
    scale = store.abs().amax(-1, keepdim=True) / 127
    return torch.cat([(store / scale).round().to(torch.int8), scale.view(torch.int8)], -1)


def as_numbers(store: Tensor) -> Tensor:
    return from_int8(store) if store.dtype == torch.int8 else store


def stored(kind: str, outputs: int, inputs: int, seed: int) -> Tensor:
    """Weights that a format holds without loss."""
    if kind in ("float32", "bfloat16"):
        weight = random(outputs, inputs, seed=seed) * inputs**-0.5
        return weight.bfloat16().float() if kind == "bfloat16" else weight
    largest = 127 if kind == "int8" else 7
    integers = torch.randint(-largest, largest + 1, (outputs, inputs), generator=torch.Generator().manual_seed(seed))
    integers[:, ::32] = 127 if kind == "int8" else -8  # every scale is known
    return integers / (8.0 * largest + 8)


@dataclass
class Weights:
    """A decoder layer: matrices [O, I] and biases as they are, and packed."""

    sizes: LayerSizes
    kind: str
    seed: int
    window: int = 0
    head_norms: bool = False
    with_sinks: bool = False

    def __post_init__(self) -> None:
        s = self.sizes
        width, context = (s.heads + 2 * s.kv_heads) * s.head_dim, s.heads * s.head_dim
        shapes = {"qkv": (width, HIDDEN), "o": (HIDDEN, context), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN)}
        shapes["down"] = HIDDEN, INNER
        self.matrices = {
            name: stored(self.kind, *shape, seed=self.seed + n) for n, (name, shape) in enumerate(shapes.items())
        }
        self.bias = random(width, seed=self.seed + 10)
        self.norm, self.mlp_norm = (1 + 0.3 * random(HIDDEN, seed=self.seed + n) for n in (11, 12))
        self.q_norm, self.k_norm = (
            1 + 0.3 * random(s.head_dim, seed=self.seed + n) if self.head_norms else None for n in (13, 14)
        )
        self.sinks = 3 * random(s.heads, seed=self.seed + 15) if self.with_sinks else None

    def packed(self) -> Layer:
        form = WeightFormat(self.kind) if self.kind == "int4" else kernels.EXACT

        def pack(name: str, bias: Tensor | None = None) -> Matrix:
            return kernels.pack(self.matrices[name], bias, form)

        gate_up = kernels.pack_gated(self.matrices["gate"], self.matrices["up"], weight_format=form)
        return Layer(
            pack("qkv", self.bias), pack("o"), gate_up, pack("down"),
            self.norm, self.mlp_norm, self.q_norm, self.k_norm, self.window, sinks=self.sinks,
        )  # fmt: skip

    def reference(self, x_RQD: Tensor, forward: Pass, store: Tensor) -> Tensor:
        """What the layer makes of x, in float64; a rounded store [2, R, K, slots, h] has the rounded keys already."""
        s, h = self.sizes, self.sizes.head_dim
        visible_RQT = forward.visible_in_window_RQT if self.window else forward.visible_RQT
        x_RQD = x_RQD.double()
        qkv = F.linear(rms_norm(x_RQD, self.norm), self.matrices["qkv"].double(), self.bias.double())
        q, k, v = qkv.unflatten(2, (-1, h)).transpose(1, 2).split((s.heads, s.kv_heads, s.kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm), rms_norm(k, self.k_norm)
        q, k = rotated(q, forward), rotated(k, forward)
        context_RQ = torch.empty(*x_RQD.shape[:2], s.heads * h, dtype=torch.double)
        for r, length in enumerate(forward.length_R.tolist()):
            end = length + visible_RQT.shape[2]
            cached = as_numbers(store[:, r, :, :end]).double()
            new = torch.stack([k[r], v[r]])
            if store.dtype == torch.bfloat16:
                torch.testing.assert_close(cached[:, :, end - k.shape[2] :], new, rtol=2**-8, atol=1e-5)
            elif store.dtype == torch.int8:
                error = (cached[:, :, end - k.shape[2] :] - new).abs()
                assert (error <= new.abs().amax(-1, keepdim=True) / 254 + 1e-5).all()
            else:
                cached[:, :, end - k.shape[2] :] = new
            keys, values = cached.repeat_interleave(s.heads // s.kv_heads, 1)
            sees_Q = torch.ones(k.shape[2], end, dtype=torch.bool)
            sees_Q[:, length:] = visible_RQT[r]
            if self.window:
                sees_Q[:, :length] = torch.arange(length) > forward.position_RQ[r][:, None] - self.window
            scores = (q[r] @ keys.transpose(1, 2) * s.scale).masked_fill(~sees_Q, -torch.inf)
            if self.sinks is not None:
                sinks = self.sinks.double()[:, None, None].expand(-1, k.shape[2], 1)
                scores, values = torch.cat([scores, sinks], -1), F.pad(values, (0, 0, 0, 1))
            context_RQ[r] = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
        x_RQD = x_RQD + F.linear(context_RQ, self.matrices["o"].double())
        normed = rms_norm(x_RQD, self.mlp_norm)
        gate, up, down = (self.matrices[name].double() for name in ("gate", "up", "down"))
        return x_RQD + F.linear(gated(F.linear(normed, gate), F.linear(normed, up), s.activation), down)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == "silu_gated":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.double(), 1e-5)


def rotated(x_RHQh: Tensor, forward: Pass) -> Tensor:
    cosine, sine = (table[forward.position_RQ][:, None] for table in (forward.cosine, forward.sine))
    left, right = x_RHQh.chunk(2, -1)
    return x_RHQh * cosine + torch.cat([-right, left], -1) * sine


def tree_pass(sizes: LayerSizes, layers: int, parents: tuple[int, ...] = PARENTS, old: int = OLD) -> Pass:
    """Return a pass over the nodes of a tree; all rows have committed slots and `old` nodes before the new ones."""
    N, h = len(parents), sizes.head_dim
    sees_NN, depth_N = torch.eye(N, dtype=torch.bool), torch.zeros(N, dtype=torch.long)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees_NN[node] |= sees_NN[parent]
            depth_N[node] = depth_N[parent] + 1
    length_R = torch.tensor(LENGTHS)
    near_NN = sees_NN & (depth_N > depth_N[:, None] - WINDOW)
    new = slice(old, None)
    angles = torch.arange(64)[:, None] * 0.5 ** torch.arange(h // 2)
    return Pass(
        length_R=length_R,
        position_RQ=(length_R[:, None] + depth_N[new]).contiguous(),
        visible_RQT=sees_NN[new].expand(R, -1, -1).contiguous(),
        visible_in_window_RQT=near_NN[new].expand(R, -1, -1).contiguous(),
        cosine=angles.cos().repeat(1, 2),
        sine=angles.sin().repeat(1, 2),
        store=random(2 * layers, R, sizes.kv_heads, SLOTS, h, seed=9),
        rows=range(R),
    )


def layer_sizes(head_dim: int, heads: tuple[int, int]) -> LayerSizes:
    return LayerSizes(HIDDEN, *heads, head_dim, INNER, 1e-5, head_dim**-0.5)


@needs
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("kind", "kv"), KINDS)
def test_a_layer_computes_what_float64_does(kind: str, kv: str, head_dim: int) -> None:
    """Guards every head size, group, window, norm, sink, gate, slot and format of weights, keys and values."""
    if kind == "int4" and not kernels.has_dots():
        pytest.skip("no integer dot products, so no int4")
    turn = KINDS.index((kind, kv)) % len(FORMATS) + HEAD_DIMS.index(head_dim) + (kv != "float32")
    sizes = layer_sizes(head_dim, HEADS[turn % len(HEADS)])
    head_norms, with_sinks = turn % 2 == 1, turn % 3 > 0
    sizes = replace(sizes, activation="clamped_gated" if with_sinks else "silu_gated")
    weights = [Weights(sizes, kind, 20 * n, window, head_norms, with_sinks) for n, window in enumerate((0, WINDOW))]
    forward = tree_pass(sizes, len(weights))
    forward = replace(forward, store=in_format(forward.store, kv))
    Q = forward.position_RQ.shape[1]
    atol = 2e-4 if kv == "int8" else 2e-5  # with 8 bits queries and weights of a softmax have 16
    x_RQD, before = random(R, Q, HIDDEN, seed=1), forward.store.clone()
    exact, ours = x_RQD.double(), x_RQD.flatten(0, 1).clone()
    taps_MF = torch.zeros(R * Q, 2 * HIDDEN)
    Layers(sizes, [w.packed() for w in weights])(ours, forward, (0, 1), taps_MF)
    torch.testing.assert_close(taps_MF[:, :HIDDEN], x_RQD.flatten(0, 1), rtol=0, atol=0)
    for n, layer in enumerate(weights):
        cached = before if kv == "float32" else forward.store
        exact = layer.reference(exact, forward, cached[2 * n : 2 * n + 2])
        if n == 0:
            torch.testing.assert_close(taps_MF[:, HIDDEN:].double(), exact.flatten(0, 1), rtol=1e-5, atol=atol)
            exact = taps_MF[:, HIDDEN:].double().view_as(exact)  # so that the second layer has the same input
    torch.testing.assert_close(ours.double(), exact.flatten(0, 1), rtol=1e-5, atol=atol)
    for r, length in enumerate(LENGTHS):
        for slots in (slice(length + OLD), slice(length + OLD + Q, None)):
            assert torch.equal(forward.store[:, r, :, slots], before[:, r, :, slots]), "only new nodes are stored"


@needs
@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
@pytest.mark.parametrize(("kind", "kv"), KINDS)
def test_what_is_not_finite_stays_in_its_row(kind: str, kv: str, broken: float) -> None:
    """Guards rows beside one another: a NaN or an infinity in one of them changes no bit of the others."""
    sizes = layer_sizes(32, (4, 2))
    layer, forward = Layers(sizes, [Weights(sizes, kind, 3).packed()]), tree_pass(sizes, 1)
    forward = replace(forward, store=in_format(forward.store, kv))
    again = replace(forward, store=forward.store.clone())
    x_RQD = random(R, forward.position_RQ.shape[1], HIDDEN, seed=1)
    whole, torn = x_RQD.flatten(0, 1).clone(), x_RQD.clone()
    torn[1, :, 5] = broken
    torn = torn.flatten(0, 1)
    layer(whole, forward)
    layer(torn, again)
    Q = len(whole) // R
    assert torn[Q : 2 * Q].isnan().all()
    for rows in (slice(Q), slice(2 * Q, None)):
        assert torch.equal(whole[rows], torn[rows])
        assert whole[rows].isfinite().all()


@needs
def test_exponentials() -> None:
    """Guards the vectors' own exponential: exact to four units of the last digit from -87 to 0, nothing below, NaN of
    NaN. Weights of an attention whose values are unit vectors are read off."""
    h = 256
    sizes = LayerSizes(h, 1, 1, h, 16, 1e-5, 1.0)

    def zeros(outputs: int, inputs: int) -> Tensor:
        return torch.zeros(outputs, inputs)

    query = kernels.pack(zeros(3 * h, h), torch.eye(3 * h)[0])  # the first unit vector, whatever x is
    identity = torch.eye(h)
    identity[-1, -2:] = torch.tensor([1.1, 0.7])  # these see nothing, and make the matrix one of float32
    passed_on = kernels.pack(identity)
    assert passed_on.kind == "float32"  # AMX multiplies the others, and takes no number below 1e-33 apart
    gate_up, down = kernels.pack_gated(zeros(16, h), zeros(16, h)), kernels.pack(zeros(h, 16))
    layer = Layer(query, passed_on, gate_up, down, torch.ones(h), torch.ones(h))
    scores = torch.cat([torch.zeros(1), -torch.rand(h - 3, generator=torch.Generator().manual_seed(0)) * 86.9])
    scores = torch.cat([scores, torch.tensor([-87.5, -1000.0])])
    store = torch.zeros(2, 1, 1, h + 8, h)
    store[0, 0, 0, :h, 0], store[1, 0, 0, :h] = scores, torch.eye(h)
    nothing = torch.zeros(1, 1, 1, dtype=torch.bool)  # the node does not see itself
    forward = Pass(
        torch.tensor([h]), torch.zeros(1, 1, dtype=torch.long), nothing, nothing,
        torch.ones(1, h), torch.zeros(1, h), store, (0,),
    )  # fmt: skip
    x = torch.zeros(1, h)
    Layers(sizes, [layer])(x, forward)
    found, exact = (x[0] / x[0, 0]).double(), scores.double().exp()
    assert ((found - exact).abs() / exact)[:-2].max() < 4 * 2.0**-23
    assert not found[-2:].any()
    store[0, 0, 0, 5, 0], x = torch.nan, torch.zeros(1, h)
    Layers(sizes, [layer])(x, forward)
    assert x.isnan().all()
