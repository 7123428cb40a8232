"""The training loop. It knows no method: a `DraftMethod` has a net, a loss and weights.

    examples --> Batches --> target.encode (frozen) --> drafter.loss --> backward, sum over processes, clip, optimizer
                                                    |-- every save_every: the state
                                                    |-- every eval_every: held-out loss, further figures, best head

A step depends on the options, the data and the number of the step alone. The place in the data is (epoch,
index), and every random number is seeded from (seed, step, number of the batch in the step). So a run that was
killed and resumed ends with the same bits, on a device that computes the same bits twice (a CPU does). An
evaluation that the saved state does not contain is repeated, and its line of the log replaced. Several
processes (`dist.py`) share the batches of a step; a run may go on with another number of processes, up to the
rounding of sums.

Files in the output folder:
    state-STEP-EVALUATED             everything that resuming needs, with any number of processes
    log.jsonl                        losses, step by step
    config.json, model.safetensors   the best head so far, in its published format
    training.json, README.md         how it was made
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eyas.drafters import DraftMethod
from eyas.errors import EyasError
from eyas_lab.folders import locked_folder
from eyas_train._process import InterruptHandler, flushed_denormals, frozen, kept_memory
from eyas_train.config import TrainConfig
from eyas_train.data import Example, FeatureReader
from eyas_train.dist import LossFunction, join, world_size
from eyas_train.optim import HeadOptimizer
from eyas_train.output import TrainOutput, kept_state
from eyas_train.reporter import OnProgress, Reporter
from eyas_train.setup import TrainSetup, set_up
from eyas_train.start import begins_fitted
from eyas_train.state import BestHead, TrainState, saved_states
from eyas_train.step import MoreFigures, evaluate_heldout, train_step


@dataclass(frozen=True)
class TrainResult:
    """The end of a run. The drafter's net then holds the weights of `best_step`, which are in the folder."""

    step: int
    steps: int
    best_step: int
    heldout: Mapping[str, float]  # figures at best_step; empty when nothing was held out
    tokens: int  # read so far, without padding
    seconds: float  # seconds of training so far, all sessions together
    interrupted: bool  # by Ctrl-C: the run is not at its end and can be resumed


def train(
    drafter: DraftMethod,
    examples: Sequence[Example],
    heldout: Sequence[Example],
    config: TrainConfig,
    folder: str | Path,
    *,
    resume: bool = True,
    evaluate: MoreFigures | None = None,
    progress: OnProgress | None = None,
    about: Mapping[str, Any] | None = None,
    stop: Callable[[], bool] = lambda: False,
    read: FeatureReader | None = None,
) -> TrainResult:
    """Train a drafter's net and leave the best head in `folder`.

    Ctrl-C or SIGTERM ends the run after the current step, with its state and the best head saved; a
    second one ends it at once. Under torchrun every process calls this with the same arguments, its
    target on its own device.

    Args:
        drafter: provides the first weights; its target provides the features and is not changed.
        heldout: examples for the held-out loss, which chooses the best head; when empty, the last
            weights are the head.
        resume: continue from the state in the folder, if there is one; False starts again and
            deletes it.
        evaluate: further held-out figures, like n-alpha from chain decoding; called at every
            evaluation, in the first process.
        progress: called after every step.
        about: further entries of training.json, like the hash of the data files.
        stop: called before every step; where it says True in one process, the run ends as by Ctrl-C.
        read: reads the features of training steps; None: the target's own forward does.

    Raises:
        OptionError: the method cannot be trained, or the folder holds a run with other options.
        InputError: the data have no examples, the state is damaged, the disk cannot be written, or another process
            trains in the folder.
        FitError: the accelerator's memory is too small for a batch.
        EyasError: the loss became NaN or infinite, or another process has ended; the last good
            state stays.
    """
    folder = Path(folder).expanduser()
    config.check_processes(world_size())
    group = join(drafter.target.device, config.parallel)
    with locked_folder(folder) if group.is_first else nullcontext():
        try:
            group.broadcast(None)  # the other processes wait for the folder
            setup = set_up(drafter, examples, heldout, config, group, read)
            output = TrainOutput(setup, folder, about or {})
            with frozen(drafter.target), flushed_denormals(), kept_memory():
                trainer = Trainer(setup, output, resume, progress)
                return trainer.run(evaluate, stop)
        except RuntimeError as error:
            if not group.is_connection_error(error):
                raise
            goes_on = "goes on from there" if saved_states(folder) else "begins again"
            raise EyasError(
                f"another process of this run has ended; {kept_state(folder)}. The same command {goes_on}"
            ) from error


class Trainer:
    """A run in progress."""

    def __init__(self, setup: TrainSetup, output: TrainOutput, resume: bool, on_progress: OnProgress | None) -> None:
        """Restore the saved state, if there is one, and shard the net over the processes."""
        self.setup, self.output = setup, output
        saved = output.load(resume)
        self.state = TrainState() if saved is None else TrainState.from_dict(saved, output.state_file)
        self.loss_function: LossFunction = setup.group.shard(setup.drafter)
        self.optimizer = HeadOptimizer(setup.net, setup.config, setup.device, begins_fitted(setup.drafter))
        if saved is not None:
            output.restore(self.state, self.optimizer)
        self.reporter = Reporter(setup, self.state, output.folder, on_progress)
        if saved is not None:
            self.reporter.note(f"resumed at step {self.state.step} of {self.state.steps(setup)}")
        if setup.config.precision == "bf16" and not setup.use_bf16:
            self.reporter.note(
                f"torch multiplies no faster in bfloat16 than in float32 on this {setup.device.type}: training in float32"
            )

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, or patience has run out."""
        patience = self.setup.config.patience
        return (
            self.state.step >= self.state.steps(self.setup)
            or 0 < patience <= self.state.evaluations_without_improvement
        )

    def run(self, more_figures: MoreFigures | None, stop: Callable[[], bool]) -> TrainResult:
        """Train until the end or an interrupt."""
        group = self.setup.group
        interrupt = InterruptHandler(self._note_interrupt, ignore_second=group.size > 1)
        stopped = False
        with interrupt.installed():
            try:
                while True:
                    self.save_if_due()  # before the evaluation: if that fails, the step is kept
                    self.evaluate_if_due(more_figures)
                    stopped = group.any(interrupt.requested or stop())
                    if self.is_finished or stopped:
                        break
                    with self._saved_state_in_errors():
                        figures = train_step(self.setup, self.loss_function, self.optimizer, self.state)
                    self.reporter.report_step(figures)
            except KeyboardInterrupt:
                stopped = True
            if self.state.is_consistent:
                self.output.save(self.state, self.optimizer)
            return self._finish(stopped and not self.is_finished)

    def save_if_due(self) -> None:
        """Save the state after every `save_every` steps, and at the end."""
        save_every, step = self.setup.config.save_every, self.state.step
        if step and (self.is_finished or (save_every > 0 and step % save_every == 0)):
            self.output.save(self.state, self.optimizer)

    def evaluate_if_due(self, more_figures: MoreFigures | None) -> None:
        """Evaluate after every `eval_every` steps, and at the end; keep the weights if they are the
        best so far.
        """
        setup, state, eval_every = self.setup, self.state, self.setup.config.eval_every
        is_due = self.is_finished or (eval_every > 0 and state.step % eval_every == 0)
        if state.step == state.evaluated_step or not is_due:
            return
        with setup.group.full_weights(setup.net):
            with self._saved_state_in_errors():
                figures = evaluate_heldout(setup, state.step, more_figures)
            is_worse = state.best is not None and "loss" in figures and figures["loss"] >= state.best.figures["loss"]
            is_better = "loss" in figures and not is_worse
            best = BestHead(state.step, figures, _copied_weights(setup)) if is_better else state.best
        if figures:
            self.reporter.write({"step": state.step, "heldout": figures})
        # After the line of the log: a resumed run either knows of this evaluation, or repeats it
        # and replaces its line.
        state.add_evaluation(figures, best, is_worse)
        if is_better:
            self.output.publish(state, state.step)
        if figures:
            self.reporter.report_evaluation(figures, is_worse)

    def _finish(self, interrupted: bool) -> TrainResult:
        """Put the best weights into the net and into the folder."""
        setup, state = self.setup, self.state
        setup.group.unshard(setup.net)
        if state.best:
            if setup.group.is_first:
                setup.net.load_state_dict(state.best.net)
            setup.group.broadcast_weights(setup.net)
        best_step = state.best.step if state.best else state.step
        if state.best or state.is_consistent:
            self.output.publish(state, best_step)
        setup.net.to(setup.head_dtype).eval()
        self.reporter.close()
        setup.group.close()
        figures = dict(state.best.figures) if state.best else {}
        return TrainResult(state.step, state.steps(setup), best_step, figures, state.tokens, state.seconds, interrupted)

    def _note_interrupt(self) -> None:
        second = "; Ctrl-C again stops at once" if self.setup.group.size == 1 else ""
        self.reporter.note(f"stopping after this step{second}")

    @contextmanager
    def _saved_state_in_errors(self) -> Iterator[None]:
        """Add to errors of a step or an evaluation which state is on disk."""
        try:
            yield
        except EyasError as error:
            raise type(error)(f"{error}; {kept_state(self.output.folder)}") from error


def _copied_weights(setup: TrainSetup) -> dict[str, Tensor]:
    """Return the net's whole weights on the CPU, in the first process."""
    if not setup.group.is_first:
        return {}
    return {name: value.detach().cpu().clone() for name, value in setup.net.state_dict().items()}
