"""A method and a target that exist nowhere else: what the loop can train must not depend on the
methods that eyas has."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eyas import checkpoints
from eyas.checkpoints import Weights
from eyas.core.drafter import DraftSession
from eyas.core.target import Target
from eyas.drafters import Batch, DraftMethod, Loss
from eyas_train.data import Example, Examples
from eyas_train.loop import TrainConfig, TrainResult, train
from eyas_train.losses import smooth_l1, soft_cross_entropy_of

VOCAB, WIDTH = 23, 8


class ToyTarget:
    """Features that depend on all earlier tokens; a random head."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table, self.weight = (torch.randn(VOCAB, WIDTH, generator=generator) for _ in range(2))
        self.seed, self.name, self.context = seed, "toy", 64
        self.device, self.dtype = torch.device("cpu"), torch.float32
        # what a fingerprint is made of
        self.model = nn.ParameterDict({"table": nn.Parameter(self.table), "weight": nn.Parameter(self.weight)})
        self.adapters, self.extensions = None, ()

    def encode(self, tokens_RT: Tensor, feature_layers: Any) -> Tensor:
        assert feature_layers == (1,)
        with torch.no_grad():
            return self.table[tokens_RT].cumsum(1) / torch.arange(1, tokens_RT.shape[1] + 1)[:, None]

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T


class ToyNet(nn.Module):
    """With dropout, so that a run that lost track of its random numbers would show."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2 * WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, pair: Tensor) -> Tensor:
        result: Tensor = self.outer(nn.functional.dropout(self.inner(pair).tanh(), 0.1, self.training))
        return result


class Toy(DraftMethod):
    """Sees a feature and the next token, guesses the next feature."""

    trainable = True
    feature_layers = (1,)

    def __init__(self, seed: int = 0, target: ToyTarget | None = None) -> None:
        super().__init__(cast(Target, target or ToyTarget()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net: nn.Module = ToyNet()
        self.losses, self.bad_from = 0, 10**9
        self.sleep, self.last_loss = 0.0, 10**9  # for processes that are to be killed

    def open(self, rows: int) -> DraftSession:
        raise NotImplementedError

    def weights(self) -> Weights:
        return Weights(
            "toy", {}, {name: value.detach().clone() for name, value in self.net.state_dict().items()}, "memory"
        )

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Loss:
        time.sleep(self.sleep)
        if self.losses == self.last_loss:
            signal.pause()
        features, N = batch.features_NF, len(batch.tokens_N)
        noise = torch.rand(features.shape, generator=generator) * 0.1 if self.net.training else 0.0
        pair = torch.cat([features + noise, cast(Any, self.target).table[batch.tokens_N.roll(-1)]], -1)
        order = torch.arange(N)
        rows = (batch.counted_N[(order + 2).clamp(max=N - 1)] & (order + 2 < batch.documents.end_N())).nonzero()[:, 0]
        predicted, true = self.net(pair[rows]), features[rows + 1]
        near = smooth_l1(predicted, true)
        law, agree = soft_cross_entropy_of(self.target.head, predicted, true, VOCAB)
        self.losses += self.net.training
        broken = float("nan") if self.losses > self.bad_from else 1.0
        return Loss((near + 0.1 * law) * broken, torch.tensor(len(rows)), {"0-alpha": agree})


def save_toy(weights: Weights, folder: Path) -> None:
    """In the place of checkpoints.save, which knows published formats only."""
    save_file(weights.tensors, Path(folder) / "model.safetensors")


def load_toy(folder: Path) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def examples(count: int = 40, seed: int = 0) -> Examples:
    """A language in which each token says much about the next."""
    generator, found = torch.Generator().manual_seed(seed), Examples()
    for i in range(count):
        length = 5 + (i * 7) % 12
        ids = [int(torch.randint(VOCAB, (), generator=generator))]
        while len(ids) < length:
            ids.append((ids[-1] * 3 + 1 + int(torch.randint(2, (), generator=generator))) % VOCAB)
        found.append(Example(ids, [t >= 3 for t in range(length)]))
    return found


CONFIG: dict[str, Any] = {
    "steps": 12, "lr": 1e-2, "batch_tokens": 48, "max_length": 16, "accumulation": 2, "eval_every": 3, "save_every": 1, "log_every": 2,
    "precision": "float32", "warmup_steps": 2,
}  # fmt: skip


def run(
    folder: Path, drafter: Toy | None = None, *, heldout: int = 6, resume: bool = True, more: Any = None, **options: Any
) -> TrainResult:
    """One run with the usual options."""
    config = TrainConfig(**{**CONFIG, **{name: value for name, value in options.items() if name != "evaluate"}})
    return train(
        drafter or Toy(), examples(), examples(heldout, seed=1) if heldout else [], config, folder,
        resume=resume, evaluate=options.get("evaluate"), progress=more,
    )  # fmt: skip


def slow_run(folder: str, sleep: float, steps: int) -> None:
    """To be killed: it sleeps for some seconds at each loss, and does so many steps at most, then waits."""
    torch.set_num_threads(1)
    checkpoints.save = save_toy  # type: ignore[assignment]
    slow = Toy()
    slow.sleep, slow.last_loss = sleep, steps * CONFIG["accumulation"]
    run(Path(folder), slow)
