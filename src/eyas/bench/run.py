"""A bench: every contestant answers every prompt, prompt by prompt, so that drift of the machine hits all alike.

    for temperature:  for prompt:  for turn:  for contestant (another one begins each time):  answer

    FOLDER/settings.json   what is compared on what; a folder of something else is refused
           answers.jsonl   an Answer a line, the lines of a prompt written together when all of it is done
           lock            held while a run writes here

Run again, it goes on with the first prompt that is not whole. A later turn is asked after plain decoding's own earlier answers, the same
for all; one that no longer fits the context is not asked. Ids are compared with plain decoding's at once; where they differ, the margin
of the two best scores is worked out. This module knows no figure and no report.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from eyas.api import LLM
from eyas.bench.contestants import Contestant, Question
from eyas.bench.machine import gpus, snapshot, used
from eyas.bench.record import FORMAT, Answer, Differs
from eyas.bench.tasks import Prompt
from eyas.core.engine import Request
from eyas.core.sampling import GumbelNoise, apply_sampling
from eyas.errors import FitError, InputError
from eyas.hardware import cpu_name, versions
from eyas.train.state import prepare, write_text

__all__ = ["Bench", "OnPrompt", "locked", "margin", "read_answers"]

ANSWERS, SETTINGS, LOCK = "answers.jsonl", "settings.json", "lock"
VANILLA = "vanilla"
OnPrompt = Callable[[int, int, str], None]  # (prompts done, of how many, what is going on)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """InputError when another run writes into this folder, or when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(f"another bench is writing into {folder}: wait for it, or choose another --output") from error
    except OSError as error:
        raise InputError(f"cannot write into {folder}: {error.strerror or error}; choose another --output") from error
    try:
        prepare(folder)  # not before: it removes what the other one is just writing
        yield
    finally:
        lock.release()


def read_answers(path: Path) -> list[Answer]:
    """The answers so far; half a line at the end, of a run that was killed, is dropped."""
    answers, lines = list[Answer](), path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            answers.append(Answer.from_json(json.loads(line)))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise InputError(f"{path}:{number} is damaged: choose another --output, or --restart") from error
        except (TypeError, KeyError) as error:
            raise InputError(f"{path}:{number} was written by another version of eyas: choose another --output, or --restart") from error
    return answers


@dataclass
class Bench:
    """What is compared on what.

    Attributes:
        llm: the target, with its tokenizer; its drafter is not used.
        contestants: the first is plain decoding.
        prompts: of different ids.
        sampling: of every question but for the temperature.
    """

    llm: LLM
    contestants: Sequence[Contestant]
    prompts: Sequence[Prompt]
    temperatures: Sequence[float] = (0.0,)
    max_new_tokens: int = 128
    sampling: dict[str, Any] = field(default_factory=dict)
    simulated: str | None = None  # the rates, where acceptance is simulated

    def settings(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        target = self.llm.target
        asked = hashlib.sha256(repr(list(self.prompts)).encode()).hexdigest()[:16]
        return {
            "format": FORMAT, "target": target.name, "fingerprint": target.fingerprint(), "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device), "runs_by": target.run.name, **asdict(target.run.form), "draft_weights": target.draft_weights,
            "machine": [cpu_name(), *(gpu["name"] for gpu in gpus())], "threads": torch.get_num_threads(),
            "versions": versions(), "methods": {c.name: c.describe() for c in self.contestants}, "prompts": [p.id for p in self.prompts],
            "texts": asked, "temperatures": list(self.temperatures), "max_new_tokens": self.max_new_tokens, "sampling": self.sampling,
            "simulated": self.simulated,
        }  # fmt: skip

    def unfit(self) -> dict[str, str]:
        """Prompts whose first turn cannot be asked, and why not."""
        found = {}
        for prompt in self.prompts:
            try:
                next(self.questions(prompt, 0.0))
            except (FitError, InputError) as error:
                found[prompt.id] = str(error)
        return found

    def run(self, folder: Path, on_prompt: OnPrompt = lambda done, all_, what: None) -> list[Answer]:
        """All answers, those of earlier runs in this folder included.

        Raises:
            InputError: the folder holds another bench.
        """
        path, kept = folder / ANSWERS, self._resume(folder)
        jobs = [(t, p) for t in self.temperatures for p in self.prompts]
        done = {(a.temperature, a.prompt) for a in kept}
        todo = [(number, *job) for number, job in enumerate(jobs) if (job[0], job[1].id) not in done]
        warm = None
        for number, temperature, prompt in todo:
            if temperature != warm:  # laws are drawn from by other code than argmax
                on_prompt(number, len(jobs), "warming up")
                self._ask(prompt, temperature, number, warm=True)
                warm = temperature
            on_prompt(number, len(jobs), prompt.id)
            fresh = self._ask(prompt, temperature, number)
            with path.open("a") as f:
                f.write(_lines(fresh))
            kept += fresh
        on_prompt(len(jobs), len(jobs), "")
        return kept

    def forget(self, folder: Path) -> None:
        """What an earlier run left there."""
        for name in (ANSWERS, SETTINGS):
            (folder / name).unlink(missing_ok=True)

    def _resume(self, folder: Path) -> list[Answer]:
        """What stands in the folder of whole prompts; the rest is dropped from the file."""
        path, settings = folder / SETTINGS, json.loads(json.dumps(self.settings()))
        if path.exists() or (folder / ANSWERS).exists():
            self._check(folder, settings)
        else:
            write_text(path, json.dumps(settings, indent=1))
        answers = read_answers(folder / ANSWERS)
        count = Counter((a.temperature, a.prompt) for a in answers)
        whole = [a for a in answers if count[a.temperature, a.prompt] == a.turns * len(self.contestants)]
        write_text(folder / ANSWERS, _lines(whole))
        return whole

    def _check(self, folder: Path, settings: dict[str, Any]) -> None:
        """InputError unless the folder holds this bench."""
        try:
            found = json.loads((folder / SETTINGS).read_text())
            form = found["format"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{folder / SETTINGS} is missing or damaged: choose another --output, or --restart") from error
        if form != FORMAT:
            raise InputError(
                f"{folder} was written by another version of eyas (format {form}, this one writes {FORMAT}): "
                "choose another --output, or --restart"
            )
        differ = sorted(k for k in found.keys() | settings.keys() if found.get(k) != settings.get(k))
        if differ:
            raise InputError(f"{folder} holds another bench ({', '.join(differ)} differ): choose another --output, or --restart")

    def questions(self, prompt: Prompt, temperature: float) -> Generator[Question, tuple[int, ...], None]:
        """The prompt's turns; send() what plain decoding answered as token ids."""
        messages: list[dict[str, str]] = [{"role": "system", "content": prompt.system}] if prompt.system else []
        new = min(self.max_new_tokens, prompt.max_new_tokens or self.max_new_tokens)
        for turn in range(_turns(prompt)):
            said: Any = prompt.prompt_ids or prompt.messages
            if said is None:
                messages.append({"role": "user", "content": prompt.turns[turn]})
                said = prompt.turns[turn] if prompt.raw else messages
            request = self._request(prompt, said, new, temperature)
            answer = yield Question(prompt.id, prompt.task, turn, request)
            if not prompt.raw and self.llm.tokenizer is not None:
                text = str(self.llm.tokenizer.decode(list(answer), skip_special_tokens=True))
                messages.append({"role": "assistant", "content": text.strip()})

    def _request(self, prompt: Prompt, said: Any, new: int, temperature: float) -> Request:
        request, _ = self.llm.request(
            list(said) if not isinstance(said, str) else said, raw=prompt.raw, max_new_tokens=new, temperature=temperature, **self.sampling
        )
        room = self.llm.target.context - len(request.prompt)
        if room < 1:
            raise FitError(f"it has {len(request.prompt)} tokens, the target's context is {self.llm.target.context}")
        if max(request.prompt) >= (vocab := self.llm.target.vocab_size):
            raise InputError(f"token id {max(request.prompt)} is outside the target's vocabulary of {vocab}")
        eos = frozenset() if self.simulated else request.eos  # of a simulated text the end would be an accident
        return Request(request.prompt, min(new, room), request.sampling, eos)

    def _ask(self, prompt: Prompt, temperature: float, number: int, warm: bool = False) -> list[Answer]:
        """All turns to all. `warm`: the first turn only."""
        before, answers, turns = snapshot(), list[Answer](), 0
        asked = self.questions(prompt, temperature)
        question = next(asked)
        while True:
            here = self._turn(question, number + question.turn)
            answers, turns = [*answers, *here], turns + 1
            if warm:
                break
            plain = next(a for a in here if a.method == VANILLA)
            try:
                question = asked.send(plain.token_ids)
            except (StopIteration, FitError):  # the latter: earlier answers have filled the context
                break
        around = used(before)
        return [a.but(turns=turns, around=around) for a in answers]

    def _turn(self, question: Question, first: int) -> list[Answer]:
        """One question to all; another contestant begins each time."""
        order = [self.contestants[(first + i) % len(self.contestants)] for i in range(len(self.contestants))]
        found = {c.name: c.answer(question) for c in order}
        plain = found[VANILLA]
        return [self._compared(found[c.name], plain, question) for c in self.contestants]

    def _compared(self, answer: Answer, plain: Answer, question: Question) -> Answer:
        if not answer.comparable or answer.token_ids == plain.token_ids:
            return answer
        pairs = zip(answer.token_ids, plain.token_ids, strict=False)
        shorter = min(len(answer.token_ids), len(plain.token_ids))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        near = None if at == shorter else margin(self.llm, question.request, plain.token_ids[:at])
        return answer.but(differs=Differs(at, near))


def _lines(answers: Sequence[Answer]) -> str:
    return "".join(json.dumps(a.to_json(), separators=(",", ":")) + "\n" for a in answers)


def _turns(prompt: Prompt) -> int:
    return len(prompt.turns) or 1


@torch.inference_mode()
def margin(llm: LLM, request: Request, said: Sequence[int]) -> float | None:
    """Between the two best scores of the token after `said`, noise included: how near plain decoding was to another token.

    None where the law allows but one.
    """
    sampling, session = request.sampling, llm.target.open(1)
    ids = [*request.prompt, *said]
    session.reserve(len(ids))
    history_1V = torch.zeros(1, llm.target.vocab_size, dtype=torch.bool, device=llm.target.device)
    history_1V[0, ids] = True
    scores_1V = apply_sampling(session.prefill(0, ids)[None], sampling, history_1V)
    if not sampling.greedy:
        position_11 = torch.tensor([[len(ids)]], device=scores_1V.device)
        noise_1V = GumbelNoise.of([sampling], scores_1V.device).gumbel(position_11, scores_1V.shape[-1])[:, 0]
        scores_1V = scores_1V.log_softmax(-1) + noise_1V
    best, second = scores_1V[0].topk(2).values.tolist()
    return float(best - second) if math.isfinite(second) else None
