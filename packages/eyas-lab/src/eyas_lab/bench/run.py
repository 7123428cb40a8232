"""A bench: every contestant answers every prompt, prompt by prompt, so that drift of the machine
hits all alike.

    for temperature:  for prompt:  for turn:  for contestant (another one begins each time):  answer

    FOLDER/settings.json   what is compared on what; a folder with other settings is refused
           answers.jsonl   an Answer a line; the lines of a prompt are written together when all of it is done
           .lock           held while a run writes here

Started again, a bench goes on with the first prompt that is not complete. A later turn is asked
after plain decoding's own earlier answers, the same for all; one that does not fit the context is not asked.
Ids are compared with plain decoding's at once.

A contestant whose answer raises an exception has failed: the reason is written into its Answers, it
is asked nothing more, and the others go on. Without plain decoding there is nothing to compare
with: its exception ends the bench.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.api import LLM
from eyas.core.engine import Request
from eyas.errors import FitError, InputError, one_line
from eyas.files import parse_json, write_text
from eyas.hardware import cpu_name, versions
from eyas.hardware.machine import snapshot, used
from eyas.targets.fingerprints import fingerprint
from eyas.text import reply_message
from eyas_lab.bench.card import gpus
from eyas_lab.bench.contestants import Contestant, Question
from eyas_lab.bench.record import FORMAT, Answer, Differs
from eyas_lab.bench.tasks import Prompt
from eyas_lab.metrics import first_difference, margin

__all__ = ["Bench", "OnPrompt", "read_answers"]

ANSWERS, SETTINGS = "answers.jsonl", "settings.json"
VANILLA = "vanilla"
ANOTHER = "choose another --output, or --restart"
OnPrompt = Callable[[int, int, str], None]  # (prompts done, number of prompts, what is going on)


def read_answers(path: Path) -> list[Answer]:
    """Return the answers so far. Half a line at the end, of a run that was killed, is dropped."""
    answers = list[Answer]()
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            answers.append(Answer.from_json(parse_json(line)))
        except InputError as error:
            if number < len(lines):
                raise InputError(f"{path}:{number} is damaged: {ANOTHER}") from error
        except (TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{path}:{number} was written by another version of eyas: {ANOTHER}") from error
    return answers


@dataclass
class Bench:
    """Contestants, prompts and settings of a comparison.

    Attributes:
        llm: the target, with its tokenizer; its drafter is not used.
        contestants: the first is plain decoding.
        prompts: of different ids.
        sampling: of every question, but for the temperature.
        simulated: the acceptance rates, where acceptance is simulated.
        failed: contestant -> reason, of those that failed so far.
    """

    llm: LLM
    contestants: Sequence[Contestant]
    prompts: Sequence[Prompt]
    temperatures: Sequence[float] = (0.0,)
    max_new_tokens: int = 128
    sampling: dict[str, Any] = field(default_factory=dict)
    simulated: str | None = None
    failed: dict[str, str] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """Everything that must be equal for a run to go on."""
        target = self.llm.target
        texts = [repr(list(self.prompts)), *(repr(prompt.template) for prompt in self.prompts if prompt.template)]
        return {
            "format": FORMAT,
            "target": target.name,
            "fingerprint": fingerprint(target),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "runs_by": target.runner.name,
            **asdict(target.runner.weight_format),
            "draft_weights": target.draft_weights,
            "machine": [cpu_name(), *(gpu["name"] for gpu in gpus())],
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "methods": {contestant.name: contestant.describe() for contestant in self.contestants},
            "prompts": [prompt.id for prompt in self.prompts],
            "texts": hashlib.sha256("".join(texts).encode()).hexdigest()[:16],
            "temperatures": list(self.temperatures),
            "max_new_tokens": self.max_new_tokens,
            "sampling": self.sampling,
            "simulated": self.simulated,
        }

    def unfit(self) -> dict[str, str]:
        """Prompts whose first turn cannot be asked -> the reason."""
        reasons = {}
        for prompt in self.prompts:
            try:
                next(self.questions(prompt, 0.0))
            except (FitError, InputError) as error:
                reasons[prompt.id] = str(error)
        return reasons

    def run(self, folder: Path, on_prompt: OnPrompt = lambda done, total, what: None) -> list[Answer]:
        """Return all answers, also from earlier runs in this folder. Raise InputError if the folder
        holds another bench."""
        answers = self._resume(folder)
        self.failed = {a.method: a.error for a in answers if a.error is not None}
        jobs = [(temperature, prompt) for temperature in self.temperatures for prompt in self.prompts]
        done = {(a.temperature, a.prompt) for a in answers}
        warm = None
        for number, (temperature, prompt) in enumerate(jobs):
            if (temperature, prompt.id) in done:
                continue
            if temperature != warm:  # sampling runs other code than argmax
                on_prompt(number, len(jobs), "warming up")
                self._ask(prompt, temperature, number, warm_up=True)
                warm = temperature
            on_prompt(number, len(jobs), prompt.id)
            new = self._ask(prompt, temperature, number)
            with (folder / ANSWERS).open("a") as f:
                f.write(_lines(new))
            answers += new
        on_prompt(len(jobs), len(jobs), "")
        return answers

    def forget(self, folder: Path) -> None:
        """Delete the results of an earlier run in the folder."""
        for name in (ANSWERS, SETTINGS):
            (folder / name).unlink(missing_ok=True)

    def _resume(self, folder: Path) -> list[Answer]:
        """Return the answers of complete prompts in the folder; the rest is dropped from the file."""
        settings = json.loads(json.dumps(self.settings()))
        if (folder / SETTINGS).exists() or (folder / ANSWERS).exists():
            self._check(folder, settings)
        else:
            write_text(folder / SETTINGS, json.dumps(settings, indent=1))
        answers = read_answers(folder / ANSWERS)
        count = Counter((a.temperature, a.prompt) for a in answers)
        complete = [a for a in answers if count[a.temperature, a.prompt] == a.turns * len(self.contestants)]
        write_text(folder / ANSWERS, _lines(complete))
        return complete

    def _check(self, folder: Path, settings: dict[str, Any]) -> None:
        """Raise InputError unless the folder holds this bench."""
        try:
            there = parse_json((folder / SETTINGS).read_bytes())
            there_format = there["format"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{folder / SETTINGS} is missing or damaged: {ANOTHER}") from error
        if there_format != FORMAT:
            versions_differ = f"format {there_format}, this one writes {FORMAT}"
            raise InputError(f"{folder} was written by another version of eyas ({versions_differ}): {ANOTHER}")
        differ = sorted(key for key in there.keys() | settings.keys() if there.get(key) != settings.get(key))
        if differ:
            raise InputError(f"{folder} holds another bench ({', '.join(differ)} differ): {ANOTHER}")

    def questions(self, prompt: Prompt, temperature: float) -> Generator[Question, tuple[int, ...], None]:
        """Yield the prompt's turns. send() the token ids of plain decoding's answer."""
        messages: list[dict[str, str]] = [{"role": "system", "content": prompt.system}] if prompt.system else []
        max_new_tokens = min(self.max_new_tokens, prompt.max_new_tokens or self.max_new_tokens)
        for turn in range(len(prompt.turns) or 1):
            text: Any = prompt.prompt_ids or prompt.messages
            if text is None:
                messages.append({"role": "user", "content": prompt.turns[turn]})
                text = prompt.turns[turn] if prompt.raw else messages
            request = self._request(prompt, text, max_new_tokens, temperature)
            answer = yield Question(prompt.id, prompt.task, turn, request)
            if not prompt.raw and self.llm.tokenizer is not None:
                reply = reply_message(self.llm.tokenizer, answer, self.llm.eos)
                messages.append({**reply, "content": reply["content"].strip()})

    def _request(self, prompt: Prompt, text: Any, max_new_tokens: int, temperature: float) -> Request:
        text = text if isinstance(text, str) else list(text)
        keywords = {"raw": prompt.raw, "max_new_tokens": max_new_tokens, "temperature": temperature, **self.sampling}
        request, _ = self.llm.request(text, **keywords, **prompt.template)
        room = self.llm.target.context - len(request.prompt)
        if room < 1:
            raise FitError(f"it has {len(request.prompt)} tokens, the target's context is {self.llm.target.context}")
        if max(request.prompt) >= (vocab := self.llm.target.vocab_size):
            raise InputError(f"token id {max(request.prompt)} is outside the target's vocabulary of {vocab}")
        eos = frozenset() if self.simulated else request.eos  # a simulated text would end by accident
        return Request(request.prompt, min(max_new_tokens, room), request.sampling, eos)

    def _ask(self, prompt: Prompt, temperature: float, number: int, warm_up: bool = False) -> list[Answer]:
        """Ask all contestants all turns; to warm up, the first turn only."""
        before, answers, turns = snapshot(), list[Answer](), 0
        questions = self.questions(prompt, temperature)
        question = next(questions)
        while True:
            answers += (to_question := self._turn(question, number + question.turn))
            turns += 1
            if warm_up:
                break
            plain = next(a for a in to_question if a.method == VANILLA)
            try:
                question = questions.send(plain.token_ids)
            except (StopIteration, FitError):  # FitError: earlier answers have filled the context
                break
        around = used(before)
        return [a.replace(turns=turns, around=around) for a in answers]

    def _turn(self, question: Question, first: int) -> list[Answer]:
        """Ask all contestants one question; another one begins each time."""
        order = [self.contestants[(first + i) % len(self.contestants)] for i in range(len(self.contestants))]
        answers = {contestant.name: self._answer(contestant, question) for contestant in order}
        return [self._compare(answers[c.name], answers[VANILLA], question) for c in self.contestants]

    def _answer(self, contestant: Contestant, question: Question) -> Answer:
        """Return the contestant's answer, or the reason why there is none."""
        name = contestant.name
        if name not in self.failed:
            try:
                return contestant.answer(question)
            except Exception as error:
                if name == VANILLA:
                    raise
                self.failed[name] = reason_of(error)
        return Answer(
            **question.about(name),
            token_ids=(),
            finish="failed",
            prefill_seconds=0.0,
            cycles=(),
            comparable=False,
            error=self.failed[name],
        )

    def _compare(self, answer: Answer, plain: Answer, question: Question) -> Answer:
        """Return the answer, with the place where it leaves plain decoding's."""
        at = first_difference(answer.token_ids, plain.token_ids) if answer.comparable else None
        if at is None:
            return answer
        ended = at == min(len(answer.token_ids), len(plain.token_ids))
        near = None if ended else margin(self.llm.target, question.request, plain.token_ids[:at])
        return answer.replace(differs=Differs(at, near))


def reason_of(error: Exception) -> str:
    """Return an exception as one line."""
    return f"{type(error).__name__}: {one_line(error)}"[:300].rstrip(": ")


def _lines(answers: Sequence[Answer]) -> str:
    return "".join(json.dumps(a.to_json(), separators=(",", ":")) + "\n" for a in answers)
