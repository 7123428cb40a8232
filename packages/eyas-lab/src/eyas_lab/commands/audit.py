"""`eyas audit`: is a deployment lossless?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
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
    from eyas_lab.audit import Deployment, Plan, Referee
    from eyas_lab.audit.run import OnProgress

Fields = Mapping[str, Any]

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
    plain_url: Annotated[str | None, "Server", "URL"] = None
    """Second server, started without drafts, to compare greedy texts with. Default: plain decoding of eyas."""
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
    folder = Path(job.output)
    with locked_folder(folder), interruptible(lambda: f"what is done is kept in {folder}; the same command goes on"):
        if job.self_test:
            return _self_test(job, model, draft, options, plain, plan, folder)
        deployment = _deployment(job, model, draft, options, plain, extra)
        compared = _server(job.plain_url, job, plain, extra) if job.plain_url else _plain(plain, job)
        settings = {**asdict(model), **asdict(draft), **dict(options), **asdict(job)}
        report = _run_audit(deployment, compared, _referee(plain, job), plan, folder, settings)
    return _shown(report, folder, job.as_json)


def _check(job: AuditOptions, draft: DraftOptions, model: TargetOptions) -> tuple[Sampling, ...]:
    """Refuse bad input before anything is loaded; return the samplings."""
    from eyas.core.params import Sampling

    named = [
        name
        for name, value in (("--url", job.url), ("--assistant", job.assistant), ("--draft", draft.draft))
        if value is not None
    ]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} are different deployments: audit one at a time")
    if job.plain_url and not job.url:
        raise UsageError("--plain-url goes with --url")
    if job.error >= 0.5:
        raise OptionError("--error must be below 0.5")
    forms = {model.weights, model.activations, model.kv}
    if forms != {"exact"}:
        raise OptionError("the referee is the target as it is: leave --weights, --activations and --kv out")
    made = []
    for text in job.sampling:
        numbers = text.split(":")
        try:
            top_k, top_p = int((numbers[1:2] or ["0"])[0]), float((numbers[2:3] or ["1"])[0])
            sampling = Sampling(float(numbers[0]), top_k=top_k, top_p=top_p)
        except ValueError as error:
            raise OptionError(f"--sampling {text!r}: write T, T:K or T:K:P, such as 0.7:50:0.9 ({error})") from None
        if sampling.greedy or len(numbers) > 3:
            raise OptionError(f"--sampling {text!r}: write T, T:K or T:K:P with a temperature above 0")
        made.append(sampling)
    return tuple(dict.fromkeys(made))


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


def _plain(llm: LLM, job: AuditOptions) -> Deployment:
    from eyas_lab.audit import EyasDeployment

    return EyasDeployment(llm, "plain decoding of eyas", job.concurrency)


def _referee(llm: LLM, job: AuditOptions) -> Referee:
    from eyas_lab.audit import Referee

    return Referee(llm.target.model, llm.eos, job.server_dtype, job.seed)


def _deployment(
    job: AuditOptions,
    model: TargetOptions,
    draft: DraftOptions,
    options: Fields,
    plain: LLM,
    extra: Fields,
) -> Deployment:
    from eyas_lab.audit import EyasDeployment, TransformersDeployment

    if job.url:
        return _server(job.url, job, plain, extra)
    if job.assistant:
        from eyas.targets.pretrained import read_model

        with quiet(model.verbose):
            assistant = read_model(job.assistant, plain.target.dtype, model.trust_remote_code, "assistant")
        name = f"generate of transformers with the assistant {job.assistant}"
        return TransformersDeployment(plain.target.model, name, sorted(plain.eos), assistant_model=assistant)
    return EyasDeployment(_drafting(model, draft, options), rows=job.concurrency)


def _drafting(model: TargetOptions, draft: DraftOptions, options: Fields) -> LLM:
    """Return the target with a draft in every cycle, unless the user wants it otherwise."""
    return load(model, draft if draft.tree else replace(draft, tree="fixed"), options)


def _server(url: str, job: AuditOptions, llm: LLM, extra: Fields) -> Deployment:
    from eyas.text import encode_part
    from eyas_lab.audit import ServerDeployment

    need_tokenizer(llm)

    tokenizer = llm.tokenizer
    assert tokenizer is not None

    def encode(text: str) -> list[int]:
        return encode_part(tokenizer, text, "an answer") if text else []

    key = os.environ.get("OPENAI_API_KEY", "")
    server = ServerDeployment(url, encode, sorted(llm.eos), model=job.model, rows=job.concurrency, extra=extra, key=key)
    if server.probe(llm.ids(PROMPTS[0])) == "text":
        note(
            f"{url} gives no token ids: its texts are encoded again, which weakens the audit, as a text may be made of "
            "other tokens than its encoding"
        )
    return server


def _run_audit(
    deployment: Deployment,
    plain: Deployment,
    referee: Referee,
    plan: Plan,
    folder: Path,
    settings: Fields,
) -> dict[str, Any]:
    """Run an audit, show the power before the sampled part, and write the report."""
    from eyas_lab.audit.report import write_report
    from eyas_lab.audit.run import audit

    kept = {k: v for k, v in settings.items() if k not in ("output", "as_json", "verbose")}
    folder.mkdir(parents=True, exist_ok=True)
    with _progress() as on_progress:
        report = audit(
            deployment,
            plain,
            referee,
            plan,
            folder=folder,
            settings=kept,
            on_progress=on_progress,
            on_power=_show_power,
        )
    write_report(folder, report)
    return report


def _show_power(table: list[dict[str, Any]]) -> None:
    from eyas_lab.audit.report import power_rows

    heads = ("found with probability", *(one["sampling"] for one in table))
    for row in (heads, *power_rows(table)):
        note(" | ".join(row))


@contextmanager
def _progress() -> Iterator[OnProgress]:
    with progress_bar("audit") as bar:
        yield lambda done, total, what: bar.show(done, what, total)


def _shown(report: Fields, folder: Path, as_json: bool) -> int:
    from eyas_lab.audit.report import greedy_lines, sampled_rows

    print(f"{report['deployment']}: {report['verdict']}")
    for line in (*report["reasons"], *greedy_lines(report["greedy"])):
        print(f"  {line}")
    if report["sampled"]:
        print_table(("sampling", "tokens", "impossible", "tests failed", "smallest p"), sampled_rows(report))
    note(f"{folder}/report.html, report.json")
    if as_json:
        print(json.dumps(report))
    return STATUS[report["verdict"]]


def _self_test(
    job: AuditOptions,
    model: TargetOptions,
    draft: DraftOptions,
    options: Fields,
    plain: LLM,
    plan: Plan,
    folder: Path,
) -> int:
    """Audit each arm; return 0 if eyas passes and every bias is found."""
    from eyas_lab.audit import EyasDeployment
    from eyas_lab.audit.arms import ARMS, rule

    chosen = draft if draft.method else replace(draft, method="self_speculative")
    llm, rows, wrong = _drafting(model, chosen, options), [], 0
    for arm, what in ARMS.items():
        deployment = EyasDeployment(llm, what, job.concurrency, rule(arm))
        settings = {**asdict(model), **asdict(chosen), **dict(options), **asdict(job), "arm": arm}
        report = _run_audit(deployment, _plain(plain, job), _referee(plain, job), plan, folder / arm, settings)
        expected = "passed" if arm == "plain" else "failed"
        wrong += report["verdict"] != expected
        rows.append((what, expected, report["verdict"], "; ".join(report["reasons"][:1])))
        note(f"{what}: {report['verdict']}")
    print_table(("arm", "expected", "found", "first reason"), rows)
    if job.as_json:
        print(json.dumps([dict(zip(("arm", "expected", "found", "reason"), row, strict=True)) for row in rows]))
    return 1 if wrong else 0
