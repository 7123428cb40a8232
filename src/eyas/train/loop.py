"""The training loop. It knows no method: a `Drafter` has a net, a loss and weights, and that is all it asks for.

    examples --> Batches --> target.encode (frozen) --> drafter.loss --> backward, sum over processes, clip, optimiser
                                                    |-- every save_every: state.pt
                                                    |-- every eval_every: held-out loss, the caller's figures, keep the best

What happens at a step is a function of the options, the data and the step's number alone: the place in the data is (epoch, index) and
every random number is seeded from (seed, step, number of the batch in the step). So a run that was killed anywhere and resumed ends with
the same bits, on a device that computes the same bits twice (a CPU does). An evaluation that the state does not know of is made again,
and its line of the log is written anew. Several processes (`dist.py`) share the batches of a step; they
can go on where one process stopped, and the other way round, up to the rounding of sums.

In the folder:  state.pt       everything that resuming needs, always whole, whatever the number of processes
                log.jsonl      losses, step by step
                config.json, model.safetensors      the best head so far, in its published format
                training.json, README.md            how it was made
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas import checkpoints
from eyas.core.drafter import Drafter, Loss
from eyas.errors import EyasError, FitError, InputError, OptionError
from eyas.train._identity import beside_net, examples_hash
from eyas.train._process import Interrupt, flushed_denormals, frozen, has_bf16
from eyas.train.config import TrainConfig
from eyas.train.data import Batches, Example
from eyas.train.dist import SingleProcess, join, processes
from eyas.train.features import batch_of
from eyas.train.optim import Optimiser
from eyas.train.progress import OnProgress, Progress, figures_text
from eyas.train.record import options_of, write_record
from eyas.train.state import Log, load_state, prepare, save_state
from eyas.train.trackers import Tracker, open_trackers

__all__ = ["Outcome", "TrainConfig", "train"]

Evaluate = Callable[[Drafter], Mapping[str, float]]
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Outcome:
    """What `train` returns. The drafter's net then holds the weights that are in the folder: those of `best_step`."""

    step: int
    steps: int
    best_step: int
    heldout: Mapping[str, float]  # the figures at best_step; empty when nothing was held out
    tokens: int  # read so far, padding not counted
    seconds: float  # of training so far, all sessions together
    interrupted: bool  # by Ctrl-C: the run is not at its end and can be resumed


def train(
    drafter: Drafter,
    examples: Sequence[Example],
    heldout: Sequence[Example],
    config: TrainConfig,
    folder: str | Path,
    *,
    resume: bool = True,
    evaluate: Evaluate | None = None,
    progress: OnProgress | None = None,
    about: Mapping[str, Any] | None = None,
) -> Outcome:
    """Train a drafter's net and leave the best head in `folder`.

    Ctrl-C or SIGTERM ends the run after the step it is in, with its state and the best head saved; a second one ends it at once. Under
    torchrun every process calls this with the same arguments, its target on its own device.

    Args:
        drafter: where the weights start; its target provides the features and stays as it is.
        heldout: examples for the held-out loss, which chooses the best head; may be empty, then the last weights are it.
        resume: go on from a state in the folder, if there is one; False starts anew and forgets it.
        evaluate: more held-out figures, like n-alpha from real chain decoding; called at every evaluation, in the first process.
        progress: told after every step.
        about: what else training.json should say, like the hash of the data files.

    Raises:
        OptionError: the method cannot be trained, or the folder holds a run with other options.
        InputError: no examples; a folder or disk that cannot be written.
        FitError: the accelerator's memory is too small for a batch.
        EyasError: the loss became NaN or infinite, or another process has gone; the last good state stays.
    """
    folder = Path(folder).expanduser()
    config.check_processes(processes())
    world = join(drafter.target.device, config.parallel)
    if world.first:
        prepare(folder)
    world.told(None)  # the others wait for the folder
    run = _Run(drafter, examples, heldout, config, folder, world, evaluate, progress, about)
    try:
        with frozen(drafter.target), flushed_denormals():
            return _trained(run, world, resume)
    except RuntimeError as error:
        if not world.is_lost(error):
            raise
        raise EyasError(f"another process of this run has ended; {run.kept}; the same command goes on from there") from error


def _trained(run: _Run, world: SingleProcess, resume: bool) -> Outcome:
    run.begin(resume)
    alone = world.size == 1
    interrupt = Interrupt(lambda: run.tell(f"stopping after this step{'; once more stops at once' * alone}"), patient=not alone)
    stopped = False
    with interrupt:
        try:
            while True:
                run.save_if_due()  # before the evaluation: whatever ends that, the step is kept
                run.evaluate_if_due()
                stopped = world.any(interrupt.asked)
                if run.ended or stopped:
                    break
                run.advance()
        except KeyboardInterrupt:
            stopped = True
        if run.whole:
            run.save()
        return run.finish(stopped and not run.ended)


class _Run:
    """A run in progress. Its state is what `state()` says; everything else is given or derived."""

    def __init__(
        self, drafter: Drafter, examples: Sequence[Example], heldout: Sequence[Example], config: TrainConfig, folder: Path, world: SingleProcess,
        evaluate: Evaluate | None, progress: OnProgress | None, about: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        method = type(drafter).__module__.rpartition(".")[2]
        if not drafter.trainable or drafter.net is None or not drafter.train_feature_layers:
            raise OptionError(f"the method {method} has nothing to train")
        if not len(examples):
            raise InputError("there are no training examples; give more data")
        self.drafter, self.config, self.folder, self.world = drafter, config, folder, world
        self.more_figures, self.on_progress, self.about = evaluate, progress if world.first else None, dict(about or {})
        self.net, self.dtype = drafter.net, next(drafter.net.parameters()).dtype
        if self.dtype in HALF:
            self.net.float()  # steps of a small learning rate vanish in half precision
        if config.checkpointing and drafter.gradient_checkpointing is None:
            raise OptionError(f"checkpointing: the method {method} keeps too little to work it out again; leave it out")
        drafter.gradient_checkpointing = config.checkpointing if drafter.gradient_checkpointing is not None else None
        self.batches = Batches(examples, config.batch_tokens, config.seed)
        self.heldout_batches = Batches(heldout, config.batch_tokens)
        drafter.trained_length = longest = max(self.batches.lengths)
        if longest > drafter.target.context:
            raise InputError(f"an example has {longest} tokens, the target's context {drafter.target.context}: cut the examples there")
        self.sizes = {"train": len(examples), "heldout": len(heldout)}
        self.hash = examples_hash(examples, heldout)
        self.beside = beside_net(drafter)
        self.steps = config.total_steps(self.batches)
        self.bf16 = config.precision != "float32" and has_bf16(drafter.target.device)
        self.step, self.tokens, self.seconds_before = 0, 0, 0.0
        self.position = (0, 0)  # epoch, index of the next batch in it
        self.evaluated, self.stale = 0, 0  # step of the last evaluation; evaluations since the best one
        self.saved = (-1, 0)  # step and last evaluation of the state on disk
        self.best: dict[str, Any] | None = None  # step, figures, and in the first process net
        self.heldout: dict[str, float] = {}
        self.sums: dict[str, float] = {}  # of the steps since the last line of the log
        self.whole = True  # False while the weights are being changed
        self.started, self.tokens_before = time.perf_counter(), 0
        self._planned: tuple[int, list[list[int]]] = (-1, [])

    # --- beginning and end

    def begin(self, resume: bool) -> None:
        """Load the state that is there, or forget it; share the weights among the processes."""
        path, first = self.folder / "state.pt", self.world.first
        state = load_state(path) if self.world.told(resume and path.exists()) else None
        if state is not None:
            self._restore(state, path)
        elif first:
            path.unlink(missing_ok=True)
        self.loss = self.world.spread(self.drafter)
        self.optimiser = Optimiser(self.net, self.config, self.drafter.target.device)
        if state is not None:
            self.optimiser.load(state["optimisers"], self.world.part)
            self.tell(f"resumed at step {self.step} of {self.steps}")
        self.log = Log(self.folder / "log.jsonl", self.step, {"heldout": self.evaluated}) if first else None
        self.trackers: list[Tracker] = []
        if first:
            self.trackers = open_trackers(self.config.trackers, self.folder, asdict(self.config), self.step)
        if self.config.precision == "bf16" and not self.bf16:
            self.tell(f"this {self.drafter.target.device.type} has no bfloat16 instructions: training in float32")

    def state(self) -> dict[str, Any]:
        """All processes ask for it together; it is whole in the first one."""
        with self.world.gathered(self.net):
            net = self.net.state_dict()
        return {
            "step": self.step, "position": list(self.position), "tokens": self.tokens, "seconds": self.seconds,
            "net": net, "optimisers": self.optimiser.state(self.world.whole), "best": self.best, "heldout": self.heldout,
            "evaluated": self.evaluated, "stale": self.stale, "sums": self.sums, "config": asdict(self.config), **self._identity(),
        }  # fmt: skip

    def _identity(self) -> dict[str, str]:
        """What must be the same for a state to make sense."""
        method, target = type(self.drafter).__module__.rpartition(".")[2], self.drafter.target.fingerprint()
        return {"method": method, "target": target, "examples": self.hash, "options": repr(self.drafter.options), "beside": self.beside}

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        names = {
            "method": "method",
            "target": "target model",
            "examples": "training or held-out examples",
            "options": "options of the method",
            "beside": "draft vocabulary or embeddings of the head",
        }
        other = [f"other {names[key]}" for key, value in self._identity().items() if state.get(key) != value]
        other += self.config.differences(state.get("config", {}))
        if other:
            raise OptionError(
                f"{path} is of a run with other settings: {'; '.join(other)}; repeat the old ones, or start anew without resuming"
            )
        try:
            self.net.load_state_dict(state["net"])
        except RuntimeError as error:
            raise OptionError(f"{path} is of a net with other layers or sizes; choose another folder, or start anew") from error
        self.step, self.tokens, self.seconds_before = state["step"], state["tokens"], state["seconds"]
        self.position = (state["position"][0], state["position"][1])
        self.best, self.heldout, self.sums = state["best"], state["heldout"], state["sums"]
        self.evaluated, self.stale = state["evaluated"], state["stale"]
        self.saved = (self.step, self.evaluated)
        self.tokens_before = self.tokens

    def finish(self, interrupted: bool) -> Outcome:
        """Put the best weights into the net and into the folder."""
        self.world.unspread(self.net)
        best_step = self.best["step"] if self.best else self.step
        if self.best:
            if self.world.first:
                self.net.load_state_dict(self.best["net"])
            self.world.same_weights(self.net)
        if self.best or self.whole:
            self.publish(best_step)
        self.net.to(self.dtype).eval()
        for tracker in self.trackers:
            tracker(None)
        self.world.leave()
        figures = dict(self.best["figures"]) if self.best else {}
        return Outcome(self.step, self.steps, best_step, figures, self.tokens, self.seconds, interrupted)

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    @property
    def ended(self) -> bool:
        return self.step >= self.steps or (self.config.patience > 0 and self.stale >= self.config.patience)

    # --- one step

    def advance(self) -> None:
        """One update of the weights."""
        config, step = self.config, self.step
        taken, position = self._take()
        mine = self.world.share(taken)
        self.net.train()
        self.optimiser.zero_grad()
        sums: dict[str, Tensor] = {}
        for index, batch in mine:
            with self._memory_told(self._batch_said(self.batches, batch)):
                loss = self._loss(self.batches, batch, (config.seed, step, index), training=True)
                self.world.backward(loss.total, last=index == mine[-1][0])
            _add(sums, loss)
        summed = self.world.sum(_floats(sums))
        figures = _means(summed)
        self._check_finite(figures["loss"])
        self.world.sum_gradients(self.optimiser.parameters)
        norm = self.optimiser.scale_and_clip(summed["count"])
        self._check_finite(norm)
        lr = config.lr_at(step, self.steps)
        self.whole = False
        self.optimiser.step(lr)
        self.step, self.position = step + 1, position
        self.tokens += sum(self.batches.tokens(batch) for batch in taken)
        self.whole = True
        self._log({**figures, "grad_norm": norm}, lr)

    def _take(self) -> tuple[list[list[int]], tuple[int, int]]:
        """The batches of the next step, and the place after them."""
        (epoch, index), taken = self.position, list[list[int]]()
        while len(taken) < self.config.accumulation:
            if self._planned[0] != epoch:
                self._planned = (epoch, self.batches.plan(epoch))
            plan = self._planned[1]
            if index == len(plan):
                epoch, index = epoch + 1, 0
                continue
            taken.append(plan[index])
            index += 1
        return taken, (epoch, index)

    def _loss(self, batches: Batches, batch: Sequence[int], key: tuple[object, ...], training: bool) -> Loss:
        """The drafter's loss of a batch. All randomness in it follows from `key`; the process's own random numbers are left alone."""
        drafter, device = self.drafter, self.drafter.target.device
        seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            with self._autocast(training):  # the target too: what rounding does to features is small beside the noise that the loss adds
                loss = self.loss if training else drafter.loss
                return loss(batch_of(batches, batch, drafter), torch.Generator().manual_seed(seed))

    def _autocast(self, training: bool) -> AbstractContextManager[Any]:
        """bf16 as the options say; evaluations are as exact as the target itself."""
        own = self.drafter.target.dtype if self.drafter.target.dtype in HALF else None
        kind = own if not training else torch.bfloat16 if self.bf16 else None
        return torch.autocast(self.drafter.target.device.type, dtype=kind) if kind else nullcontext()

    @contextmanager
    def _memory_told(self, what: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise FitError(f"out of memory {what}; {self.kept}") from error

    def _batch_said(self, batches: Batches, batch: Sequence[int]) -> str:
        return f"with a batch of {batches.tokens(batch)} tokens; lower batch_tokens (now {self.config.batch_tokens})"

    def _check_finite(self, value: Tensor | float) -> None:
        if not math.isfinite(value):
            said = f"the loss or its gradient became NaN or infinite at step {self.step + 1}"
            raise EyasError(f"{said}; {self.kept}; start anew with a lower lr")

    @property
    def kept(self) -> str:
        step, _ = self.saved
        return f"the state of step {step} stays in {self.folder}" if step >= 0 else "no state had been saved yet"

    # --- evaluation, state, log

    def evaluate_if_due(self) -> None:
        due = self.ended or (self.config.eval_every > 0 and self.step % self.config.eval_every == 0)
        if self.step == self.evaluated or not due:
            return
        with self.world.gathered(self.net):
            figures = self._heldout_figures()
        worse = self.best is not None and "loss" in figures and figures["loss"] >= self.best["figures"]["loss"]
        better = "loss" in figures and not worse
        best = self._as_best(figures) if better else self.best
        if figures:
            self._write({"step": self.step, "heldout": figures})
        # Together, and after the line of the log: a resumed run either knows of this evaluation, or leaves its line out and makes it again.
        self.evaluated, self.heldout, self.best, self.stale = self.step, figures, best, self.stale + 1 if worse else 0
        if better:
            self.publish(self.step)
        if figures:
            self.tell(f"step {self.step}: held-out {figures_text(figures)}{' (not better)' if worse else ''}")

    def _as_best(self, figures: Mapping[str, float]) -> dict[str, Any]:
        """The net as it is, with its figures; the weights in the first process only."""
        best: dict[str, Any] = {"step": self.step, "figures": figures}
        with self.world.gathered(self.net):
            if self.world.first:
                best["net"] = {name: value.detach().cpu().clone() for name, value in self.net.state_dict().items()}
        return best

    @torch.no_grad()
    def _heldout_figures(self) -> dict[str, float]:
        """The held-out loss and its parts, per counted token, without dropout, on the same batches every time; and the caller's figures."""
        self.net.eval()
        chosen, sums, tokens = list[tuple[int, list[int]]](), dict[str, Tensor](), 0
        for batch in self.heldout_batches.plan(0) if self.sizes["heldout"] else []:
            chosen.append((tokens, batch))
            tokens += self.heldout_batches.tokens(batch)
            if tokens >= self.config.heldout_tokens:
                break
        for _, (place, batch) in self.world.share(chosen):
            with self._memory_told(self._batch_said(self.heldout_batches, batch)):
                _add(sums, self._loss(self.heldout_batches, batch, ("heldout", place), training=False))
        figures = _means(self.world.sum(_floats(sums)))
        self._check_finite(figures.get("loss", 0.0))
        if self.more_figures is not None:
            with self._memory_told("while held-out prompts were decoded"):
                more = self.more_figures(self.drafter) if self.world.first else {}
            figures.update({name: float(value) for name, value in self.world.told(more).items()})
        return figures

    def save_if_due(self) -> None:
        due = self.ended or (self.config.save_every > 0 and self.step % self.config.save_every == 0)
        if due and self.step:
            self.save()

    def save(self) -> None:
        """The state; and, when nothing chooses a best head, the head as it is."""
        if (self.step, self.evaluated) == self.saved:
            return
        state = self.state()
        for value in state["net"].values():
            self._check_finite(value.detach().sum())
        if self.world.first:
            save_state(self.folder / "state.pt", state)
        self.saved = (self.step, self.evaluated)
        if self.best is None:
            self.publish(self.step)

    def publish(self, step: int) -> None:
        """The head in its published format, in the dtype that it is used in, with the record of how it was made."""
        with self.world.gathered(self.net):
            weights = self.drafter.weights() if self.world.first else None
        if weights is None or self.log is None:
            return
        checkpoints.save(replace(weights, tensors=_in_dtype(weights.tensors, self.dtype)), self.folder)
        target, name = self.drafter.target, getattr(self.drafter.target, "name", "")
        write_record(self.folder, {
            "method": weights.method, "target": {"name": name, "fingerprint": target.fingerprint()}, **self.about,
            "head": {key: weights.config[key] for key in ("vocab_size", "draft_vocab_size") if key in weights.config},
            "trained_length": self.drafter.trained_length, "options": options_of(self.drafter.options),
            "examples": {**self.sizes, "sha256": self.hash}, "config": asdict(self.config), "seed": self.config.seed,
            "device": target.device.type, "processes": self.world.size, "precision": "bf16" if self.bf16 else "float32",
            "steps": self.steps, "step": self.step, "best_step": step, "tokens": self.tokens,
            "seconds": round(self.seconds, 3), "heldout": self.best["figures"] if self.best else None,
            "losses": [{"step": line["step"], **line["heldout"]} for line in self.log.read("heldout")],
            "last_training_loss": next((line["loss"] for line in self.log.read("loss")[::-1]), None),
        })  # fmt: skip

    def _write(self, line: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.add(line)
        for tracker in self.trackers:
            tracker(line)

    def _log(self, figures: dict[str, float], lr: float) -> None:
        for name, value in {**figures, "count": 1.0}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        means = {name: total / self.sums["count"] for name, total in self.sums.items() if name != "count"}
        if self.step % self.config.log_every == 0 or self.step == self.steps:
            self._write({"step": self.step, **means, "lr": lr, "tokens": self.tokens, "seconds": round(self.seconds, 3)})
            self.sums = {}
        self.tell("", {name: value for name, value in means.items() if name != "grad_norm"})

    def tell(self, note: str, figures: Mapping[str, float] | None = None) -> None:
        if self.on_progress is not None:
            speed = (self.tokens - self.tokens_before) / (time.perf_counter() - self.started)
            lr = self.config.lr_at(max(0, self.step - 1), self.steps)
            self.on_progress(Progress(self.step, self.steps, lr, speed, figures or {}, self.heldout, note))


def _add(sums: dict[str, Tensor], loss: Loss) -> None:
    for name, value in {"loss": loss.total.detach(), "count": loss.count, **loss.sums}.items():
        sums[name] = sums[name] + value if name in sums else value


def _floats(sums: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}


def _in_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Maps of a vocabulary stay whole numbers."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """Per token that counted."""
    count = max(1.0, sums.get("count", 1.0))
    return {name: value / count for name, value in sums.items() if name != "count"}
