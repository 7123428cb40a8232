"""`eyas accelerate`: from a model to a faster one, by the other commands of this folder.

    look at model and machine --> plan --> regenerate --> features --> train --> bench --> report

OUTPUT holds the head with its card and the report; OUTPUT/work holds its sources, and run.json, from which the
same command goes on. Each step is the command of that name, with options that the plan chose; a finished step
is not done again.
"""

from __future__ import annotations

import gc
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.types import PositiveFloat

from eyas.cli.tools import (
    AS_JSON,
    DraftOptions,
    ExactTarget,
    SamplingOptions,
    UsageError,
    interruptible,
    load,
    need_tokenizer,
    note,
    option_group,
    print_table,
    quiet,
    sampling_of,
)
from eyas.errors import InputError, OptionError, near
from eyas_lab.commands import bench
from eyas_lab.folders import check_output_folder, locked_folder
from eyas_train.commands import features, regenerate, train
from eyas_train.commands._data import check_exact, check_files, load_target

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas_train.accelerate.journal import Journal
    from eyas_train.accelerate.material import Material
    from eyas_train.accelerate.plan import Prospect

GROUP = "Heads"
EXAMPLES = """
eyas accelerate MODEL --minutes 60 --output HEAD  # with eyas' own questions
eyas accelerate MODEL --data prompts.jsonl --output HEAD  # with questions like those that it will get: better
eyas accelerate MODEL --dry-run  # only the plan: each step, and how long it takes
eyas generate --target MODEL --draft HEAD "Why ..."  # then generate with the new head
"""
NOTES = (
    'Lines of --data: {"prompt": "..."}, {"messages": [...]} or {"conversations": [...]}; replies are made anew.',
    "After an interruption, run the same command: it continues.",
)


@option_group
class AccelerateOptions:
    """The questions, the time, and the folder of the head."""

    data: Annotated[tuple[str, ...], "Data", "FILE"] = ()
    """Questions or chats (JSONL) like those that the model will get, .gz too. Default: 794
    questions in English that come with eyas."""
    minutes: Annotated[PositiveFloat, "Training", "N"] = 60.0
    """Minutes for the whole command."""
    method: Annotated[str | None, "Method", "NAME"] = None
    """mtp or eagle3. Default: mtp if it suits the model, otherwise eagle3."""
    output: Annotated[str | None, "Output", "FOLDER"] = None
    """Folder for the head, its card and a report."""
    dry_run: Annotated[bool, "Output"] = False
    """Only measure, and print the plan. Nothing is kept."""
    as_json: AS_JSON = False


def command(
    target: Annotated[
        str | None, "Model", Parameter(help="The model: a name (smollm2), a folder, a hub id or a file in GGUF format.")
    ] = None,
    /,
    *,
    job: AccelerateOptions,
    model: ExactTarget,
) -> None:
    """Make a model faster: train a draft head for it in a given time."""
    model = _check(target, job, model)
    from eyas_train.accelerate.journal import Journal
    from eyas_train.accelerate.material import read_material

    if job.dry_run:
        prospect = _look(Models(model), read_material(job.data), job)
        _show(prospect)
        if job.as_json:
            print(json.dumps(asdict(prospect)))
        return
    folder = Path(str(job.output)).expanduser()
    check_output_folder(folder)
    if not (folder / "work").exists() and folder.exists() and any(not f.name.startswith(".") for f in folder.iterdir()):
        raise InputError(f"{folder} holds something that this command has not made: use another --output")
    material = read_material(job.data)
    with locked_folder(folder / "work"):
        run = Run(job, model, folder, Journal(folder / "work", _settings(job, model)))
        report = run.report(material)
    print(report["text"])
    named = "" if model.target is None else f" --target {shlex.quote(model.target)}"
    note(f'the head is in {folder}: eyas generate{named} --draft {shlex.quote(str(folder))} "Your question"')
    if job.as_json:
        print(json.dumps({name: value for name, value in report.items() if name != "text"}))


def _check(target: str | None, job: AccelerateOptions, model: ExactTarget) -> ExactTarget:
    """Return the options of the target, its name included. Refuses bad input before anything is loaded."""
    from eyas_train.accelerate.measure import METHODS

    if target is not None and model.target is not None:
        raise UsageError("the model is named twice: leave --target out")
    if job.output is None and not job.dry_run:
        raise UsageError("option --output is missing (or --dry-run)")
    if job.method is not None and job.method not in METHODS:
        raise OptionError(f"--method {job.method}: {near(job.method, METHODS)}")
    check_files(job.data)
    check_exact(replace(model, kernels="auto"))  # the features are read from the exact model, whatever kernels answer
    return replace(model, target=target or model.target)


def _settings(job: AccelerateOptions, model: ExactTarget) -> dict[str, Any]:
    """Return the settings that must be equal for a run to go on."""
    from eyas_train.data import data_hash

    data = data_hash(job.data) if job.data else "bundled"
    options = {name: value for name, value in asdict(model).items() if name != "verbose"}
    return {"data": data, "minutes": job.minutes, "method": job.method, **options}


def _look(models: Models, material: Material, job: AccelerateOptions) -> Prospect:
    from eyas_train.accelerate import measure

    methods = measure.METHODS if job.method is None else (job.method,)
    with quiet(models.model.verbose), interruptible(lambda: "nothing is planned yet; the same command begins again"):
        return measure.look(models, material, methods, 60 * job.minutes)


class Models:
    """The target as it answers, and as it is read for training. One of them is in memory at a time."""

    def __init__(self, model: ExactTarget) -> None:
        self.model = model
        self.loading_seconds = 0.0  # time that the last load took
        self._loaded: tuple[str, LLM] | None = None

    def for_answers(self) -> LLM:
        """Return the target by the fastest runner, with plain decoding."""
        return self._get("answers", lambda: load(self.model, DraftOptions(method="vanilla"), {}))

    def for_training(self) -> LLM:
        """Return the target by its own forward."""
        return self._get("training", lambda: load_target(replace(self.model, kernels="auto")))

    def _get(self, purpose: str, load_llm: Callable[[], LLM]) -> LLM:
        if self._loaded is None or self._loaded[0] != purpose:
            self._loaded = None
            gc.collect()  # its modules point at each other
            began = time.monotonic()
            llm = load_llm()
            need_tokenizer(llm)
            if not getattr(llm.tokenizer, "chat_template", None):
                raise InputError("this target has no chat template: use eyas train --data FILE with plain text")
            self.loading_seconds = time.monotonic() - began
            self._loaded = purpose, llm
        return self._loaded[1]


def _show(prospect: Prospect) -> None:
    """Print the plan: each step, and how long it takes."""
    from eyas import named

    plan, speeds = prospect.plan, prospect.speeds
    trained = f"{plan.trained_tokens:,} tokens in {plan.passes} passes, {speeds.train_rate:,.0f} tokens/s"
    rows = [
        ("regenerate", f"{plan.answers:,} questions, {speeds.answer_rate:,.0f} tokens/s", plan.answer_seconds),
        ("features", f"{speeds.feature_rate:,.0f} tokens/s", plan.feature_seconds),
        (f"train {prospect.method}", trained, plan.training_seconds),
        ("bench", f"{plan.bench_questions} other questions, with drafts and without", plan.bench_seconds),
        ("together", "", plan.seconds),
    ]
    title = f"{prospect.target}: a head of {prospect.method}"
    print_table(("step", "what", "minutes"), [(step, what, f"{s / 60:.1f}") for step, what, s in rows], title)
    sys.stdout.flush()
    note("the speed-up is measured after training, by the bench")
    known = named.find(prospect.target)
    if known is not None and known.best in known.heads:
        note(f"{prospect.target} has a head of its own already, which eyas uses without --draft ({known.best})")


class Run:
    """A run in its folder, which may have begun earlier."""

    def __init__(self, job: AccelerateOptions, model: ExactTarget, folder: Path, journal: Journal) -> None:
        self.job = job
        self.models = Models(model)
        self.folder, self.work = folder, folder / "work"
        self.answers = self.work / "answers.jsonl"
        self.journal = journal
        self.prospect: Prospect  # set by `plan`

    def report(self, material: Material) -> dict[str, Any]:
        """Do the open steps, and write the report; return it, with its Markdown as "text"."""
        from eyas_lab.bench.report import read_summary
        from eyas_train.accelerate.journal import made_report, write_report

        self.plan(material)
        steps = {"regenerate": self.regenerate, "features": self.features, "train": self.train, "bench": self.bench}
        for name, do in steps.items():
            if not self.journal.is_done(name):
                with self.journal.step(name):
                    do()
        command_line = shlex.join(["eyas", *sys.argv[1:]])
        found = made_report(self.prospect, self.journal, read_summary(self.work / "bench"), command_line)
        return {**found, "text": write_report(self.folder, found)}

    def plan(self, material: Material) -> None:
        """Measure and plan, or read the plan; show it."""
        from eyas_train.accelerate.material import write_material
        from eyas_train.accelerate.plan import Prospect

        if "prospect" in self.journal:
            self.prospect = Prospect.from_json(self.journal["prospect"])
            done = [name for name in self.journal["steps"] if self.journal.is_done(name)]
            note(f"going on in {self.folder}; done: {', '.join(done)}")
        else:
            began = time.monotonic()
            self.prospect = _look(self.models, material, self.job)
            asked = material._replace(bench=material.bench[: self.prospect.plan.bench_questions])
            write_material(asked, self.work / "questions.jsonl", self.work / "bench.jsonl")
            measured = {"seconds": round(time.monotonic() - began, 1), "done": True}
            self.journal.write(prospect=asdict(self.prospect), steps={"measure": measured})
        _show(self.prospect)

    def regenerate(self) -> None:
        """Let the target answer the questions until the planned time is over."""
        plan, speeds = self.prospect.plan, self.prospect.speeds
        last_answers = speeds.rows * speeds.answer_tokens / speeds.answer_rate  # those that run when no more begin
        seconds = plan.answer_seconds - self.journal.seconds("regenerate") - last_answers
        if seconds <= 0 and _lines(self.answers) >= speeds.rows:
            return
        job = regenerate.RegenerateOptions(
            data=(str(self.work / "questions.jsonl"),),
            output=str(self.answers),
            max_new_tokens=self.prospect.max_new_tokens,
            rows=speeds.rows,
            minutes=max(1.0, seconds) / 60,
        )
        regenerate.answer_data(job, sampling_of(SamplingOptions()), self.models.for_answers)

    def features(self) -> None:
        """Write the features of the answers."""
        from eyas_train.accelerate.plan import heldout_share

        job = features.FeatureOptions(
            data=(str(self.answers),),
            output=str(self.work / "features"),
            method=self.prospect.method,
            max_length=self.prospect.max_length,
            heldout=heldout_share(_lines(self.answers)),
            shard_mib=64.0,  # an interrupt loses one shard
            yes=True,  # hours after the command was given nobody is there to be asked
        )
        features.make_features(self.models.for_training(), job, {})

    def train(self) -> None:
        """Train the head in the time that is left. The bench measures how it drafts."""
        from eyas import drafters
        from eyas_train.config import TrainConfig

        if "training" not in self.journal:  # kept, as a run that goes on needs the same options
            left = 60 * self.job.minutes - self.journal.seconds() - self.prospect.plan.bench_seconds
            self.journal.write(training=self._training(left))
        head = train.HeadOptions(
            features=str(self.work / "features"), output=str(self.folder), method=self.prospect.method
        )
        config, options = TrainConfig(**self.journal["training"]["config"]), drafters.find(head.method).Options()
        train.train_head(self.models.for_training(), head, config, options, prompts=0)

    def _training(self, seconds: float) -> dict[str, Any]:
        """Return the fields of TrainConfig for a training of so many seconds, and about how many "tokens" it reads."""
        from eyas_train.accelerate import plan
        from eyas_train.data import Batches
        from eyas_train.store import FeatureStore

        store, rate = FeatureStore(self.work / "features"), self.prospect.speeds.train_rate
        examples, settings = store.data().train, store.settings
        available = sum(len(example.ids) for example in examples)
        tokens = int(min(plan.MOST_PASSES * available, max(seconds * rate, available)))
        batch_tokens = plan.batch_size(tokens, self.prospect.max_length)
        steps = max(plan.STEPS[0], round(tokens * len(Batches(examples, batch_tokens).plan(0)) / available))
        config = {
            "minutes": min(seconds, 1.1 * tokens / rate) / 60,  # by the clock: other programs may begin
            "batch_tokens": batch_tokens,
            "max_length": settings.max_length,
            "heldout": settings.heldout,
            # by held-out loss at the hidden size of 384 (docs/reference/training.md), less for wider
            "lr": 1e-3 * min(1.0, 384 / settings.hidden_size),
            "min_lr_share": 0.02,
            "eval_every": math.ceil(steps / 3),
            "save_every": max(1, round(steps * 60 * rate / tokens)),  # a minute
        }
        return {"config": config, "tokens": tokens}

    def bench(self) -> None:
        """Ask the questions that were kept apart, with drafts and without."""
        from eyas import drafters
        from eyas.adaptive import make_controller
        from eyas_lab.bench.contestants import Drafting
        from eyas_lab.bench.run import VANILLA, Bench
        from eyas_lab.bench.tasks import read_prompts

        llm, method = self.models.for_answers(), self.prospect.method
        with quiet(self.models.model.verbose):
            drafter = drafters.find(method).from_pretrained(self.folder, llm.target)
        plain = Drafting(VANILLA, drafters.find(VANILLA)(llm.target))
        drafted = Drafting(method, drafter, "the new one", policy=make_controller(drafter, compared=True))
        prompts, _ = read_prompts(self.work / "bench.jsonl")
        asked = Bench(llm, [plain, drafted], prompts, max_new_tokens=self.prospect.plan.bench_tokens)
        unfit = asked.unfit()
        asked.prompts = [prompt for prompt in prompts if prompt.id not in unfit]
        with locked_folder(self.work / "bench"):
            bench.run_bench(asked, self.work / "bench", {})


def _lines(path: Path) -> int:
    """Return how many lines a file has; 0 without it."""
    return path.read_bytes().count(b"\n") if path.exists() else 0
