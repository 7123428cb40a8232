"""`eyas audit`: is a deployment lossless?"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts.types import NonNegativeInt, PositiveFloat, PositiveInt

from eyas.cli.tools import (
    AS_JSON,
    DraftOptions,
    MethodOptions,
    TargetOptions,
    UsageError,
    interruptible,
    load,
    need_tokenizer,
    note,
    option_group,
    print_table,
    progress_bar,
    quiet,
)
from eyas.errors import InputError, OptionError
from eyas.files import parse_json

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas.core.params import Sampling
    from eyas_lab.audit import Deployment, Plan

GROUP = "Information"
STATUS = {"passed": 0, "failed": 1, "not enough data": 3}
PROMPTS = (
    "Tell me a story about a hat that nobody wants.",
    "What would you cook for ten guests on a rainy evening?",
    "Write a letter to a friend who moved away last year.",
    "Explain how a bicycle stays upright.",
    "Describe a town by the sea in winter.",
    "Give me some ideas for a birthday present.",
    "Why do people like old photographs?",
    "What happened in the market this morning?",
)
EXAMPLES = """
eyas audit --target MODEL --draft HEAD  # eyas in this process
eyas audit --target MODEL --url http://127.0.0.1:8000/v1 --server-dtype bfloat16  # vLLM, SGLang, llama.cpp, eyas, ...
eyas audit --target MODEL --assistant SMALL_MODEL  # assisted generation of transformers
eyas audit --target MODEL --self-test  # are known biases found on this model?
"""
NOTES = (
    "Exit status: 0 passed, 1 failed, 3 not enough data, 2 bad input. After an interruption, run the same command: it continues.",
    "--target is the referee: the very model that the deployment serves.",
)


@option_group
class AuditOptions:
    """Which deployment to audit, and how thoroughly."""

    url: Annotated[str | None, "Server", "URL"] = None
    """A server of OpenAI's interface: http://127.0.0.1:8000/v1."""
    model: Annotated[str, "Server", "NAME"] = ""
    """The model's name there. Default: the first one that the server lists."""
    server_dtype: Annotated[Literal["float32", "bfloat16", "float16", "int8"], "Server"] = "float32"
    """Dtype of the deployment. It decides how large a difference rounding may explain."""
    extra_body: Annotated[str | None, "Server", "JSON"] = None
    """Further fields of each request, as a JSON object."""
    assistant: Annotated[str | None, "Model", "PATH|HUB"] = None
    """Audit `generate` of transformers with this assistant model."""
    prompts: Annotated[str | None, "Prompt", "FILE.jsonl"] = None
    """Your own prompts, as `eyas generate --input` reads them. Default: eight prompts that come with eyas."""
    sampling: Annotated[tuple[str, ...], "Sampling", "T[:K[:P]]"] = ("1", "0.7:0:0.9", "1:20")
    """Temperature, top-k and top-p of an audited setting. May be given several times. Default: 1, 0.7:0:0.9 and
    1:20."""
    tokens: Annotated[NonNegativeInt, "Sampling", "N"] = 20_000
    """Sampled tokens for each sampling; 0 audits greedy decoding only."""
    max_new_tokens: Annotated[PositiveInt, "Sampling", "N"] = 64
    """Longest answer in tokens."""
    error: Annotated[PositiveFloat, "Sampling", "P"] = 0.001
    """Highest probability that a lossless deployment fails the audit."""
    concurrency: Annotated[PositiveInt, "Limits", "N"] = 4
    """Requests to send at the same time."""
    seed: Annotated[NonNegativeInt, "Sampling", "N"] = 0
    """Seed of the audit; another seed draws other answers."""
    output: Annotated[str, "Output", "FOLDER"] = "out/audit"
    """The folder of the report and of the parts that are done."""
    self_test: Annotated[bool, "Output"] = False
    """Audit eyas with known biases put in: each must be found, and eyas itself must pass."""
    as_json: AS_JSON = False


def command(*, job: AuditOptions, draft: DraftOptions, model: TargetOptions, options: MethodOptions) -> int:
    """Check whether a deployment gives the target's own output: greedy, sampled, log-probabilities."""
    from eyas_lab.audit.run import Plan
    from eyas_lab.folders import locked_folder

    samplings, extra = _check(job, draft, model), _extra_body(job.extra_body)
    plain = load(model, DraftOptions(method="vanilla"), {})
    plan = Plan(_prompts(job, plain), samplings, job.tokens, job.max_new_tokens, job.error, job.seed)
    audit = _Audit(job, model, draft, options, plain, plan, extra)
    kept = f"what is done is kept in {job.output}; the same command goes on"
    with locked_folder(Path(job.output)), interruptible(lambda: kept):
        return audit.self_test() if job.self_test else audit.run()


def _check(job: AuditOptions, draft: DraftOptions, model: TargetOptions) -> tuple[Sampling, ...]:
    """Refuse bad input before anything is loaded; return the samplings."""
    deployments = {"--url": job.url, "--assistant": job.assistant, "--draft": draft.draft}
    if len(named := [name for name, value in deployments.items() if value is not None]) > 1:
        raise UsageError(f"{' and '.join(named)} are different deployments: audit one at a time")
    if job.error >= 0.5:
        raise OptionError("--error must be below 0.5")
    if {model.weights, model.activations, model.kv} != {"exact"}:
        raise OptionError("the referee is the target as it is: leave --weights, --activations and --kv out")
    return tuple(dict.fromkeys(map(_sampling, job.sampling)))


def _sampling(text: str) -> Sampling:
    from eyas.core.params import Sampling

    numbers = text.split(":")
    try:
        top_k, top_p = int((numbers[1:2] or ["0"])[0]), float((numbers[2:3] or ["1"])[0])
        sampling = Sampling(float(numbers[0]), top_k=top_k, top_p=top_p)
    except ValueError as error:
        raise OptionError(f"--sampling {text!r}: write T, T:K or T:K:P, such as 0.7:50:0.9 ({error})") from None
    if sampling.greedy or len(numbers) > 3:
        raise OptionError(f"--sampling {text!r}: write T, T:K or T:K:P with a temperature above 0")
    return sampling


def _extra_body(text: str | None) -> dict[str, Any]:
    body = {} if text is None else parse_json(text)
    if not isinstance(body, dict):
        raise OptionError('--extra-body takes a JSON object, such as {"min_p": 0}')
    return body


def _prompts(job: AuditOptions, llm: LLM) -> tuple[tuple[int, ...], ...]:
    if job.prompts is None:
        need_tokenizer(llm)
        return tuple(llm.ids(prompt) for prompt in PROMPTS)
    from eyas.cli.tools import InvalidLine, read_tasks

    found = []
    for task in read_tasks(job.prompts):
        if isinstance(task, InvalidLine):
            raise InputError(f"{job.prompts}, line {task.line}: {task.reason}")
        found.append(llm.ids(task.prompt, **task.template))
    if not found:
        raise InputError(f"{job.prompts} has no prompts")
    return tuple(found)


@dataclass
class _Audit:
    """The audits of one command, with the target decoded plainly as their measure."""

    job: AuditOptions
    model: TargetOptions
    draft: DraftOptions
    options: Mapping[str, Any]  # of the method
    plain: LLM
    plan: Plan
    extra: Mapping[str, Any]  # fields of requests to a server

    def run(self) -> int:
        """Audit the deployment, and show the report; return the exit status."""
        from eyas_lab.audit.report import greedy_lines, sampled_rows

        report = self._report(self._deployment(), Path(self.job.output))
        print(f"{report['deployment']}: {report['verdict']}")
        for line in (*report["reasons"], *greedy_lines(report["greedy"])):
            print(f"  {line}")
        if report["sampled"]:
            print_table(("sampling", "tokens", "impossible", "tests failed", "smallest p"), sampled_rows(report))
        note(f"{self.job.output}/report.md, report.json")
        if self.job.as_json:
            print(json.dumps(report))
        return STATUS[report["verdict"]]

    def self_test(self) -> int:
        """Audit each arm; return 0 if eyas passes and every bias is found."""
        from eyas_lab.audit import EyasDeployment
        from eyas_lab.audit.arms import ARMS, rule

        self.draft = self.draft if self.draft.method else replace(self.draft, method="self_speculative")
        llm, rows = self._drafting(), []
        for arm, what in ARMS.items():
            deployment = EyasDeployment(llm, what, self.job.concurrency, rule(arm))
            report = self._report(deployment, Path(self.job.output) / arm, arm=arm)
            expected = "passed" if arm == "plain" else "failed"
            rows.append((what, expected, report["verdict"], "; ".join(report["reasons"][:1])))
            note(f"{what}: {report['verdict']}")
        print_table(("arm", "expected", "found", "first reason"), rows)
        if self.job.as_json:
            print(json.dumps([dict(zip(("arm", "expected", "found", "reason"), row, strict=True)) for row in rows]))
        return int(any(expected != found for _, expected, found, _ in rows))

    def _report(self, deployment: Deployment, folder: Path, **more: str) -> dict[str, Any]:
        """Run an audit, show the power before the sampled part, and write the report."""
        from eyas_lab.audit import EyasDeployment, Referee, audit
        from eyas_lab.audit.report import power_rows, write_report

        def show_power(table: list[dict[str, Any]]) -> None:
            for row in (("found with probability", *(one["sampling"] for one in table)), *power_rows(table)):
                note(" | ".join(row))

        job, llm = self.job, self.plain
        settings = {**asdict(self.model), **asdict(self.draft), **self.options, **asdict(job), **more}
        kept = {k: v for k, v in settings.items() if k not in ("output", "as_json", "verbose")}
        plain = EyasDeployment(llm, "plain decoding of eyas", job.concurrency)
        referee = Referee(llm.target.model, llm.eos, job.server_dtype, job.seed)
        folder.mkdir(parents=True, exist_ok=True)
        with progress_bar("audit") as bar:
            show: Any = {"on_progress": lambda done, total, what: bar.show(done, what, total), "on_power": show_power}
            report = audit(deployment, plain, referee, self.plan, folder=folder, settings=kept, **show)
        write_report(folder, report)
        return report

    def _deployment(self) -> Deployment:
        from eyas_lab.audit import EyasDeployment, TransformersDeployment

        job, target = self.job, self.plain.target
        if job.url:
            return self._server(job.url)
        if not job.assistant:
            return EyasDeployment(self._drafting(), rows=job.concurrency)
        from eyas.targets.pretrained import read_model

        with quiet(self.model.verbose):
            assistant = read_model(job.assistant, target.dtype, self.model.trust_remote_code, "assistant")
        name = f"generate of transformers with the assistant {job.assistant}"
        return TransformersDeployment(target.model, name, sorted(self.plain.eos), assistant_model=assistant)

    def _drafting(self) -> LLM:
        """Return the target with a draft in every cycle, unless the user wants it otherwise."""
        return load(self.model, self.draft if self.draft.tree else replace(self.draft, tree="fixed"), self.options)

    def _server(self, url: str) -> Deployment:
        from eyas.text import encode_part
        from eyas_lab.audit import ServerDeployment

        job, llm = self.job, self.plain
        need_tokenizer(llm)
        tokenizer = llm.tokenizer
        assert tokenizer is not None

        def encode(text: str) -> list[int]:
            return encode_part(tokenizer, text, "an answer") if text else []

        key = os.environ.get("OPENAI_API_KEY", "")
        limits: Any = {"model": job.model, "rows": job.concurrency, "extra": self.extra, "key": key}
        server = ServerDeployment(url, encode, sorted(llm.eos), **limits)
        if server.probe(llm.ids(PROMPTS[0])) == "text":
            note(
                f"{url} gives no token ids: its texts are encoded again, which weakens the audit, as a text may be made "
                "of other tokens than its encoding"
            )
        return server
