"""Which weights Muon moves and which AdamW; what is kept of both; what a run changes of its
process; token counts; trackers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eyas import checkpoints
from eyas.errors import InputError, OptionError
from eyas_train import reporter
from eyas_train._process import flushed_denormals, frozen
from eyas_train.config import TrainConfig
from eyas_train.data import Example
from eyas_train.new_heads import count_tokens
from eyas_train.optim import HeadOptimizer
from train import real, toy
from train.states import read_state


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_muon_is_for_the_matrices_inside() -> None:
    """The head, though a matrix, is a table over the vocabulary; norms and biases are vectors: all
    of them stay with AdamW."""
    head = real.head("eagle3")
    assert head.net is not None
    named = {id(value): name for name, value in head.net.named_parameters()}
    muon, adamw = HeadOptimizer(head.net, TrainConfig(optimizer="muon"), torch.device("cpu")).optimizers
    groups = [{named[id(value)] for group in part.param_groups for value in group["params"]} for part in (muon, adamw)]
    assert {"fc.weight", "layer.attention.q.weight", "layer.mlp.down.weight"} <= groups[0]
    norms = {f"layer.{name}_norm.weight" for name in ("mlp", "embed", "hidden")}
    assert groups[1] == norms | {"head.weight", "norm.weight"}
    assert groups[0] | groups[1] == set(named.values())


def test_muon_takes_steps_of_the_size_of_adamws() -> None:
    """So that --lr means the same: an update's root mean square is about 0.2 lr in a matrix of any
    shape (Liu et al. 2025)."""
    for shape in ((64, 64), (128, 32), (32, 128)):
        net = nn.Linear(shape[1], shape[0], bias=False)
        before = net.weight.detach().clone()
        optimizer = HeadOptimizer(net, TrainConfig(optimizer="muon"), torch.device("cpu"))
        net.weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        optimizer.step(1e-2)
        assert float((net.weight.detach() - before).square().mean().sqrt()) == pytest.approx(2e-3, rel=0.3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_is_as_small_as_its_matrix(optimizer: Any) -> None:
    """Otherwise a fitted head is worse after some steps than at its start."""
    net = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("usual", "small", "zero")})
    for name, size in (("usual", 0.06), ("small", 0.006), ("zero", 0.0)):
        nn.init.normal_(net[name].weight, std=size, generator=torch.Generator().manual_seed(1))
        net[name].weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
        net[name].bias.grad = torch.ones(64)
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    HeadOptimizer(net, TrainConfig(optimizer=optimizer), torch.device("cpu"), small_updates=True).step(1e-2)
    moved = {name: float((value.detach() - before[name]).norm()) for name, value in net.named_parameters()}
    assert moved["small.weight"] == pytest.approx(0.2 * moved["usual.weight"], rel=0.05)
    assert moved["zero.weight"] == pytest.approx(0.03 * moved["usual.weight"], rel=0.05)
    assert moved["zero.bias"] == pytest.approx(moved["usual.bias"])


@pytest.mark.slow
def test_muon_is_resumed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of the weights and of both optimizers' states."""
    monkeypatch.setattr(checkpoints, "save", toy.save_toy)

    def interrupt(now: Any) -> None:
        if now.step == 5 and not now.note:
            raise KeyboardInterrupt

    toy.run(tmp_path / "whole", optimizer="muon")
    toy.run(tmp_path / "parts", optimizer="muon", more=interrupt)
    toy.run(tmp_path / "parts", optimizer="muon")
    whole, parts = (read_state(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(value, parts["net"][name]) for name, value in whole["net"].items())
    assert {name.rpartition(".")[0] for name in whole["optimizers"]} == {"0.0", "0.1", "1.0", "1.1"}
    assert all(torch.equal(value, parts["optimizers"][name]) for name, value in whole["optimizers"].items())
    toy.run(tmp_path / "adamw")
    with pytest.raises(OptionError, match="optimizer 'adamw' there, 'muon' now"):
        toy.run(tmp_path / "adamw", optimizer="muon")


@pytest.mark.slow
def test_recomputing_keeps_less_and_changes_no_bit(tmp_path: Path) -> None:
    """With `checkpointing`, each step of the training-time test keeps only its inputs and keys for
    the backward pass. The option may change when a run is resumed, as the weights are the same."""
    for name, options in (("kept", {}), ("again", {"checkpointing": True})):
        real.head_run("eagle3", tmp_path / name, **options)
    real.head_run("eagle3", tmp_path / "kept", checkpointing=True)  # resumed: at its end
    kept, again = (checkpoints.load(tmp_path / name).tensors for name in ("kept", "again"))
    assert all(torch.equal(value, again[name]) for name, value in kept.items())
    sizes = {}
    for gradient_checkpointing in (False, True):
        head, held = real.head("eagle3", **{"ttt.steps": 7}), dict[int, int]()

        def pack(value: Tensor, held: dict[int, int] = held) -> Tensor:
            held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        head.gradient_checkpointing = gradient_checkpointing
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            total = head.loss(real.batch(head)).total
        sizes[gradient_checkpointing] = sum(held.values())
        total.backward()
    assert sizes[True] < 0.6 * sizes[False], sizes


def test_what_a_run_changes_of_its_process_is_put_back() -> None:
    small = torch.tensor(2.0**-126)
    with flushed_denormals():
        assert float(small / 2) == 0
        with flushed_denormals():
            pass
        assert float(small / 2) == 0
    assert float(small / 2) > 0
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    with frozen(SimpleNamespace(model=model)):
        assert not any(value.requires_grad for value in model.parameters())
    assert [value.requires_grad for value in model.parameters()] == [True, False]


def test_examples_beyond_the_targets_context_are_refused(tmp_path: Path) -> None:
    drafter = toy.Toy()
    drafter.target.context = 15
    with pytest.raises(InputError, match="an example has 16 tokens, the target's context 15"):
        toy.run(tmp_path, drafter)


def test_which_tokens_count() -> None:
    """As `Batches.load` counts them: the first two tokens of an example are foreseen by nothing."""
    first = Example([5, 5, 5, 6, 2], [True, True, True, False, True])
    examples = [first, Example([1, 2, 3, 3, 3], [True] * 5), Example([4], [True])]
    assert count_tokens(examples, 8).tolist() == [0, 0, 1, 3, 0, 1, 0, 0]
    assert count_tokens([], 3).tolist() == [0, 0, 0]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Packages of these names that remember what they are told."""
    told: list[Any] = []

    class Writer:
        def __init__(self, place: str, purge_step: int | None) -> None:
            told.append(("tensorboard", Path(place).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, value, step))

        def flush(self) -> None:
            pass

        def close(self) -> None:
            told.append("closed")

    def init(**given: Any) -> Any:
        told.append(("wandb", given["id"], given["config"]["lr"]))
        return SimpleNamespace(log=lambda line, step: told.append((line, step)), finish=lambda: told.append("finished"))

    for name in ("tensorboard", "wandb"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))  # type: ignore[arg-type]
    import wandb

    wandb.init = init
    monkeypatch.setattr(checkpoints, "save", toy.save_toy)
    yield told
    sys.modules.pop("wandb", None)


@pytest.mark.slow
def test_trackers_get_the_lines_of_the_log(tmp_path: Path, fake: list[Any]) -> None:
    """Resumed: TensorBoard forgets what will be written again, W&B goes on in the same run; begun
    anew it is another run."""

    def interrupt(now: Any) -> None:
        if now.step == 5 and not now.note:
            raise KeyboardInterrupt

    toy.run(tmp_path / "run", more=interrupt, log="tensorboard, wandb")
    first = fake.copy()
    assert ("tensorboard", "tensorboard", None) in first
    assert [entry[2] for entry in first if entry[0] == "train/loss"] == [2, 4]
    assert [entry[2] for entry in first if entry[0] == "heldout/0-alpha"] == [3]
    assert [entry[1] for entry in first if isinstance(entry[0], dict)] == [2, 3, 4]
    assert {"closed", "finished"} <= {entry for entry in first if isinstance(entry, str)}
    fake.clear()
    toy.run(tmp_path / "run", log="wandb,tensorboard")
    assert ("tensorboard", "tensorboard", 6) in fake
    ids = [next(entry[1] for entry in told if entry[0] == "wandb") for told in (first, fake)]
    assert ids[0] == ids[1]
    toy.run(tmp_path / "run", resume=False, log="wandb")
    assert fake[-1] == "finished"
    assert [entry[1] for entry in fake if entry[0] == "wandb"][-1] != ids[0]


def test_a_tracker_that_does_not_begin(tmp_path: Path, fake: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**given: Any) -> None:
        raise RuntimeError("no API key\nconfigured")

    monkeypatch.setattr("wandb.init", refuse)
    told = "W&B does not begin: no API key configured; WANDB_MODE=offline needs no account"
    with pytest.raises(InputError, match=told):
        toy.run(tmp_path / "run", log="wandb")


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B leaves a folder `wandb` where it runs; in that folder it looks installed."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionError, match="wandb is not installed: pip install wandb"):
        reporter.check_trackers(["wandb"])
