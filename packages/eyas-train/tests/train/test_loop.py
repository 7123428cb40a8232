"""The loop on a method and a target of the tests' own: exact resumption, interrupts, bad numbers,
what is left in the folder."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import eyas
from eyas import checkpoints
from eyas.errors import EyasError, FitError, InputError, OptionError
from eyas.targets.fingerprints import fingerprint
from eyas_train import loop, setup
from eyas_train import state as state_files
from eyas_train.config import TrainConfig
from eyas_train.data import Batches
from eyas_train.loop import TrainResult, train
from eyas_train.reporter import Progress, Reporter
from eyas_train.state import saved_states
from processes import wait_until
from train import toy
from train.states import read_state
from train.together import CONTEXT
from train.toy import Toy, ToyTarget, run


@pytest.fixture(autouse=True)
def one_thread_and_toy_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are in another order with another number of threads; the toy's heads have no published format."""
    torch.set_num_threads(1)
    monkeypatch.setattr(checkpoints, "save", toy.save_toy)


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """All tensors and values of a state, except the time it took."""
    if isinstance(value, dict):
        return {
            key: leaf
            for k, inner in value.items()
            if k != "seconds"
            for key, leaf in leaves(inner, f"{name}/{k}").items()
        }
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return leaves(dict(enumerate(value)), name)
    return {name: value.tolist() if isinstance(value, Tensor) else value}


def log(folder: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in entries]


def assert_same_run(a: Path, b: Path) -> None:
    """Bit by bit: weights, optimiser, best head, place in the data, log, published head."""
    left, right = leaves(read_state(a)), leaves(read_state(b))
    left.pop("/config/save_every"), right.pop("/config/save_every")
    assert left == right
    assert log(a) == log(b)
    heads = toy.load_toy(a), toy.load_toy(b)
    assert heads[0].keys() == heads[1].keys()
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


class Stop:
    """Raises KeyboardInterrupt after a step, as a second Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, now: Progress) -> None:
        if now.step == self.step and not now.note:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "save", toy.save_toy)
        torch.set_num_threads(1)
        run(folder)
    return folder


@pytest.mark.slow
def test_the_best_is_kept_when_later_heads_are_worse(tmp_path: Path) -> None:
    """A learning rate that wrecks the net after a while: the head of the best evaluation stays, in the folder and in
    the net."""
    drafter, heads, steps = Toy(), dict[float, dict[str, Tensor]](), list[int]()

    def watch(now: Progress) -> None:
        if "held-out" in now.note:
            heads[now.heldout["loss"]] = {name: value.clone() for name, value in drafter.net.state_dict().items()}
        elif not now.note:
            steps.append(now.step)

    outcome = run(tmp_path, drafter, more=watch, lr=0.5, steps=12, eval_every=1)
    assert (outcome.best_step < 12, outcome.step, steps) == (True, 12, list(range(1, 13)))
    assert outcome.heldout["loss"] == min(heads)
    assert not drafter.net.training
    for best in (toy.load_toy(tmp_path), drafter.net.state_dict()):
        assert all(torch.equal(value, heads[min(heads)][name]) for name, value in best.items())


def test_patience_ends_a_run(tmp_path: Path) -> None:
    outcome = run(tmp_path, lr=0.5, steps=60, eval_every=1, patience=3)
    assert outcome.step < 60
    assert outcome.step == outcome.best_step + 3
    assert run(tmp_path, lr=0.5, steps=60, eval_every=1, patience=3).step == outcome.step  # and stays ended


def test_nothing_held_out(tmp_path: Path) -> None:
    """Then the last weights are the head. In a thread that is not the main one, where Python refuses signal handlers,
    training goes on without; the process keeps its own random numbers."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    found: list[TrainResult] = []
    thread = threading.Thread(target=lambda: found.append(run(tmp_path, heldout=0, steps=4)))
    thread.start()
    thread.join()
    assert (found[0].best_step, dict(found[0].heldout)) == (4, {})
    assert all(torch.equal(value, read_state(tmp_path)["net"][name]) for name, value in toy.load_toy(tmp_path).items())
    assert torch.equal(torch.rand(3), expected)


def test_accumulation_is_one_large_batch(tmp_path: Path) -> None:
    """Batches are weighted by their counted tokens: the gradient of two at once is the gradient of their union.

    All examples in one batch of 40 x 16 or in several: the same first update up to rounding."""
    torch.manual_seed(0)
    whole, parts = Toy(), Toy()
    for drafter in (whole, parts):
        drafter.net.eval()
        drafter.net.train = lambda mode=True, net=drafter.net: net  # type: ignore[method-assign,assignment,misc]  # no dropout, no noise
    batches = len(Batches(toy.examples(), 160).plan(0))
    assert batches > 2
    first = {"steps": 1, "warmup_steps": 0, "log_every": 1}
    run(tmp_path / "whole", whole, batch_tokens=1000, accumulation=1, **first)
    run(tmp_path / "parts", parts, batch_tokens=160, accumulation=batches, **first)
    torch.testing.assert_close(log(tmp_path / "whole")[0]["loss"], log(tmp_path / "parts")[0]["loss"])
    torch.testing.assert_close(log(tmp_path / "whole")[0]["grad_norm"], log(tmp_path / "parts")[0]["grad_norm"])


def test_half_precision_weights_are_trained_in_float32(tmp_path: Path) -> None:
    """In bfloat16 a step of 1e-4 of a weight rounds to nothing. The head that is published has its
    own dtype again, half as large."""
    drafter = Toy()
    drafter.net.bfloat16()
    run(tmp_path, drafter, steps=3)
    assert {value.dtype for value in read_state(tmp_path)["net"].values()} == {torch.float32}
    head, net = toy.load_toy(tmp_path), drafter.net.state_dict()
    assert {value.dtype for value in (*net.values(), *head.values())} == {torch.bfloat16}
    assert all(torch.equal(head[name], value) for name, value in net.items())


@pytest.mark.slow
def test_bf16_without_instructions_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated bf16 is several times slower than float32: what was asked for is not done, and said; auto says nothing.
    With instructions (here torch emulates them) autocast keeps float32 weights."""
    notes, drafter, cases = list[str](), Toy(), (("float32", False), ("bf16", False), ("auto", False), ("bf16", True))
    for precision, has_bf16 in cases:
        monkeypatch.setattr(setup, "has_bf16", lambda device, answer=has_bf16: answer)
        told = lambda now: notes.append(now.note)  # noqa: E731
        run(tmp_path / f"{precision} {has_bf16}", drafter, more=told, precision=precision, steps=3, resume=False)
        drafter = Toy()
    said = "torch multiplies no faster in bfloat16 than in float32 on this cpu: training in float32"
    assert [note for note in notes if "bfloat16" in note] == [said]
    plain, bf16, auto, cast = (log(tmp_path / f"{precision} {has}") for precision, has in cases)
    assert plain == bf16 == auto
    assert json.loads((tmp_path / "bf16 False" / "training.json").read_text())["precision"] == "float32"
    assert cast[0]["loss"] != plain[0]["loss"] == pytest.approx(cast[0]["loss"], rel=0.02)


class CrashError(Exception):
    pass


@pytest.mark.quick("1")
@pytest.mark.parametrize("step", [1, 3, 5, 11])
def test_a_resumed_run_is_the_undisturbed_run(tmp_path: Path, undisturbed: Path, step: int) -> None:
    """Same bits of weights, optimiser, best head and log, whether interrupted at an evaluation,
    beside one, or across epochs."""
    first = run(tmp_path, more=Stop(step))
    assert first.interrupted
    assert (first.step, read_state(tmp_path)["step"]) == (step, step)
    second = run(tmp_path, Toy(seed=5))  # other first weights: they come from the state
    assert (second.step, second.interrupted) == (12, False)
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6, 12])
@pytest.mark.parametrize("written", [False, True])
def test_an_evaluation_that_dies_loses_no_step(
    tmp_path: Path, undisturbed: Path, step: int, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended without warning in the evaluation, before or after its line of the log: the step is
    kept, the line is not there twice, and the best head, the weights and the log are those of an
    undisturbed run. The first, a middle and the last evaluation."""
    evaluate, write = loop.evaluate_heldout, Reporter.write

    def evaluate_and_crash(setup: Any, at: int, more_figures: Any) -> Any:
        if at == step:
            raise CrashError
        return evaluate(setup, at, more_figures)

    def write_and_crash(self: Reporter, line: Any) -> None:
        write(self, line)
        if self.state.step == step and "heldout" in line:
            raise CrashError

    with monkeypatch.context() as patch:
        if written:
            patch.setattr(Reporter, "write", write_and_crash)
        else:
            patch.setattr(loop, "evaluate_heldout", evaluate_and_crash)
        with pytest.raises(CrashError):
            run(tmp_path)
    assert (read_state(tmp_path)["step"], read_state(tmp_path)["evaluated_step"]) == (step, step - 3)
    last = log(tmp_path)[-1]
    assert (last["step"], "heldout" in last) == (step if written or step % 2 == 0 else step - 1, written)
    drafter = Toy()
    outcome = run(tmp_path, drafter)
    assert outcome.step == 12
    assert drafter.losses == 2 * (12 - step)
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.slow
def test_killed_five_times_at_random_moments(tmp_path: Path, undisturbed: Path) -> None:
    """kill -9, wherever it hits, five times in one run; what is there is whole and the end has the same bits. The
    moments are random, the result is not: no false alarm. No process does more steps than it is told to, and all
    together fewer than the run's twelve."""

    def changed(name: str) -> int:
        path = saved_states(tmp_path)[-1] if name == "state" and saved_states(tmp_path) else tmp_path / name
        try:
            return path.stat().st_mtime_ns
        except FileNotFoundError:  # not there yet; or it was the newest state a moment ago
            return 0

    def has_changed(name: str, before: int) -> Callable[[], bool]:
        return lambda: changed(name) != before

    for number in range(5):
        awaited = "state" if number % 2 == 0 else "log.jsonl"  # it has done a step; it has loaded what there is
        before = changed(awaited)
        process = CONTEXT.Process(target=toy.slow_run, args=(str(tmp_path), 0.06, 2 if number == 3 else 1))
        process.start()
        wait_until(has_changed(awaited, before), process)
        time.sleep(random.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it was over before the kill; make it slower"
    assert 3 <= read_state(tmp_path)["step"] < 12
    run(tmp_path)
    assert_same_run(tmp_path, undisturbed)
    assert not list(tmp_path.glob(".*.tmp"))


def test_other_settings_are_refused_by_name(tmp_path: Path, undisturbed: Path) -> None:
    """How often it saves is free. Starting anew forgets the old run."""
    few = {"steps": 2, "warmup_steps": 1}
    run(tmp_path, **few)
    said = r"lr 0\.01 there, 0\.02 now; .*betas \[0\.9, 0\.95\] there, \[0\.9, 0\.99\] now"
    with pytest.raises(OptionError, match=said) as told:
        run(tmp_path, **few, lr=0.02, betas=(0.9, 0.99))
    assert "\n" not in str(told.value)
    with pytest.raises(OptionError, match="other target model"):
        run(tmp_path, Toy(target=ToyTarget(seed=1)), **few)
    with pytest.raises(OptionError, match="other training or held-out examples"):
        train(Toy(), toy.examples(41), toy.examples(6, 1), TrainConfig(**{**toy.CONFIG, **few}), tmp_path)
    other = Toy()
    other.net = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="state-2-2 holds no state of this optimizer"):
        run(tmp_path, other, **few)
    run(tmp_path, **few, save_every=7, log_every=3)
    run(tmp_path, resume=False)
    assert_same_run(tmp_path, undisturbed)


def in_a_loss(patch: pytest.MonkeyPatch) -> None:
    """In the middle of step 5."""
    plain = Toy.loss

    def loss(self: Toy, *arguments: Any) -> Any:
        if self.losses == 9:
            raise KeyboardInterrupt
        return plain(self, *arguments)

    patch.setattr(Toy, "loss", loss)


def in_an_update(patch: pytest.MonkeyPatch) -> None:
    """Half the weights changed: that must never be saved."""
    update, calls = torch.optim.AdamW.step, []

    def step(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 9:
            self.param_groups[0]["params"][0].data.zero_()
            raise KeyboardInterrupt
        return update(self, *args)

    patch.setattr(torch.optim.AdamW, "step", step)


def behind_a_state(patch: pytest.MonkeyPatch) -> None:
    """Bug: a state that had its name already was saved once more, and the second one could not get that name."""
    sync, calls = state_files.sync_folder, []

    def interrupted(folder: Path) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        sync(folder)

    patch.setattr(state_files, "sync_folder", interrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interrupt", "save_every", "kept"), [(in_a_loss, 0, 4), (in_an_update, 3, 6), (behind_a_state, 1, 4)]
)
def test_an_interrupt_keeps_the_last_whole_state(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, interrupt: Any, save_every: int, kept: int
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch)
        assert run(tmp_path, save_every=save_every).interrupted
    assert read_state(tmp_path)["step"] == kept
    assert len(list(tmp_path.glob("*state-*"))) == 1
    run(tmp_path, save_every=save_every)
    assert_same_run(tmp_path, undisturbed)


def test_the_caller_can_end_it(tmp_path: Path) -> None:
    """As a signal does: Ray's processes get theirs in another thread."""
    asked = iter(range(12))
    config = TrainConfig(**{**toy.CONFIG, "save_every": 0})
    outcome = train(Toy(), toy.examples(), [], config, tmp_path, stop=lambda: next(asked) == 3)
    assert (outcome.step, outcome.interrupted, read_state(tmp_path)["step"]) == (3, True, 3)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_ctrl_c_ends_after_the_step(tmp_path: Path, undisturbed: Path, number: signal.Signals) -> None:
    """A signal in the middle of a step: the step is finished, the state saved, and the handler of before is back."""
    before, drafter, notes = signal.getsignal(number), Toy(), list[str]()
    plain = drafter.loss

    def loss(batch: Any, generator: Any = None) -> Any:
        if drafter.losses == 9:
            os.kill(os.getpid(), number)
        return plain(batch, generator)

    drafter.loss = loss  # type: ignore[method-assign]
    outcome = run(tmp_path, drafter, more=lambda now: notes.append(now.note))
    assert (outcome.interrupted, outcome.step) == (True, 5)
    assert "stopping after this step; Ctrl-C again stops at once" in notes
    assert signal.getsignal(number) is before
    run(tmp_path)
    assert_same_run(tmp_path, undisturbed)


def test_nan_stops_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    """Weights that overflow are never saved either."""
    drafter = Toy()
    drafter.bad_from = 14  # two losses a step: step 8 is bad
    said = r"NaN or infinite at step 8: start again with a lower lr; the state of step 6 stays in "
    with pytest.raises(EyasError, match=said) as told:
        run(tmp_path, drafter, save_every=3)
    assert "\n" not in str(told.value)
    assert read_state(tmp_path)["step"] == 6
    assert all(value.isfinite().all() for value in read_state(tmp_path)["net"].values())
    assert all(value.isfinite().all() for value in toy.load_toy(tmp_path).values())

    def wreck(now: Progress) -> None:
        if now.step == 4 and not now.note:
            next(drafter.net.parameters()).data.fill_(float("inf"))

    drafter = Toy()
    with pytest.raises(EyasError, match="NaN or infinite"):
        run(tmp_path / "other", drafter, more=wreck)
    assert read_state(tmp_path / "other")["step"] == 3


def test_out_of_memory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's figures come from decoding, which needs memory of its own: it is said, and the step is there."""

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("of the device")

    said = r"^out of memory while held-out prompts were decoded; the state of step 3 stays in "
    with pytest.raises(FitError, match=said) as told:
        run(tmp_path, evaluate=fail)
    assert "\n" not in str(told.value)
    assert read_state(tmp_path)["step"] == 3
    monkeypatch.setattr(Toy, "loss", fail)
    with pytest.raises(FitError, match=r"batch of \d+ tokens; lower batch_tokens \(now 48\)"):
        run(tmp_path / "other")


def test_no_space_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of before stays, and nothing half written."""
    write, calls = HuggingFaceStorageWriter.write_data, list[int]()

    def full(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", full)
    with pytest.raises(InputError, match=r"cannot write .*state-3-0: no space left; free some and resume"):
        run(tmp_path)
    assert read_state(tmp_path)["step"] == 2


def test_the_record_beside_the_weights(tmp_path: Path) -> None:
    config = TrainConfig(**toy.CONFIG)
    train(Toy(), toy.examples(), toy.examples(6, 1), config, tmp_path, about={"data_sha256": "abc"})
    record = json.loads((tmp_path / "training.json").read_text())
    assert (record["data_sha256"], record["config"]["lr"], record["seed"]) == ("abc", 1e-2, 0)
    assert record["target"] == {"name": "toy", "fingerprint": fingerprint(toy.ToyTarget())}
    assert (record["versions"]["eyas"], record["versions"]["torch"]) == (eyas.__version__, torch.__version__)
    assert [entry["step"] for entry in record["losses"]] == [3, 6, 9, 12]
    assert record["tokens"] == read_state(tmp_path)["tokens"] > 0
    assert record["seconds"] > 0
    card = (tmp_path / "README.md").read_text()
    assert all(part in card for part in ("# toy draft head for toy", "| 0-alpha |", "--draft THIS_FOLDER"))


@pytest.mark.parametrize(("options", "said"), [
    ({"lr": 0.0}, "lr must be above 0"),
    ({"lr": float("nan")}, "lr must be 0 or more; got nan"),
    ({"min_lr_share": 1.5}, "min_lr_share is a share"),
    ({"heldout": 1.0}, "heldout must leave something"),
    ({"betas": (0.9, 1.0)}, "betas are two numbers"),
    ({"steps": 0}, "steps must be a whole number, 1 or more; got 0"),
    ({"epochs": 0}, "epochs must be above 0"),
    ({"schedule": "cosin"}, "schedule is unknown; did you mean cosine"),
    ({"log": "tensorboard,wand"}, "log knows tensorboard and wandb; got 'tensorboard,wand'"),
    ({"steps": 5, "epochs": 1.0}, "steps and epochs each say how long"),
    ({"minutes": 0.0}, "minutes must be above 0"),
    ({"batch_tokens": 100}, "batch_tokens is 100, less than one example of max_length 2048"),
    ({"accumulation": 0}, "accumulation must be a whole number, 1 or more"),
])  # fmt: skip
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        TrainConfig(**options)


def test_the_length_of_a_run() -> None:
    batches = Batches(toy.examples(), 48, seed=0)
    epoch = [len(batches.plan(e)) for e in range(3)]
    base = {"batch_tokens": 48, "max_length": 16}
    assert TrainConfig(**base).total_steps(batches) == epoch[0]
    assert TrainConfig(**base, epochs=2.5).total_steps(batches) == epoch[0] + epoch[1] + round(0.5 * epoch[2])
    assert TrainConfig(**base, epochs=2.0, accumulation=100).total_steps(batches) == 1
    assert TrainConfig(**base, steps=7).total_steps(batches) == 7
    first = batches.tokens(batches.plan(0)[0])
    assert TrainConfig(**base, tokens=first).total_steps(batches) == 1
    assert TrainConfig(**base, tokens=first + 1).total_steps(batches) == 2
    with pytest.raises(OptionError, match="warmup_steps is 7, the whole training has 7 steps"):
        TrainConfig(**base, steps=7, warmup_steps=7).total_steps(batches)


def test_minutes_end_a_run_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the schedule of a run whose number of steps nobody knows: each step takes a second of a clock of the test's
    own, so a third of a minute is about 20 steps, and the learning rate has fallen to its least share in the last ones."""
    seconds = 0.0

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            nonlocal seconds
            seconds += 1e-6  # no two readings are equal
            return seconds

    def tick(now: Progress) -> None:
        nonlocal seconds
        seconds += 1.0

    monkeypatch.setattr(state_files, "time", Clock)
    outcome = run(tmp_path, more=tick, steps=None, minutes=1 / 3, lr=1.0, warmup_steps=0, eval_every=0, log_every=1)
    assert (outcome.step, outcome.steps, outcome.interrupted) == (20, 20, False)
    rates = [line["lr"] for line in log(tmp_path) if "lr" in line]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.2 < 0.9 < rates[0]


@pytest.mark.parametrize(
    ("schedule", "middle", "last"), [("linear", 0.55, 0.1), ("cosine", 0.55, 0.1), ("constant", 1.0, 1.0)]
)
def test_the_learning_rate(schedule: Any, middle: float, last: float) -> None:
    config = TrainConfig(lr=1.0, schedule=schedule, warmup_steps=10, min_lr_share=0.1)
    assert [config.lr_at(step, 110) for step in (0, 4, 9)] == pytest.approx([1 / 11, 5 / 11, 10 / 11])
    assert config.lr_at(10, 110) == pytest.approx(1.0)
    assert config.lr_at(60, 110) == pytest.approx(middle)
    assert config.lr_at(110, 110) == pytest.approx(last)
    assert TrainConfig().lr_at(0, 10) == 5e-4  # too short for a warm-up
