"""lm-eval's `hf` model, plain and with eyas attached: the same answers, in batches of 1 and 3.

    python lm_eval_attached.py SOURCE TASKS HEAD       folders: of the package eyas, of tasks, of a draft head

Prints one JSON object: for each size of a batch whether all answers are equal, how many there are,
and tokens per forward.
"""

import json
import sys
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

sys.path.insert(0, sys.argv[1])
import eyas
from eyas import tiny


def answers(model: Any, tokenizer: Any, tasks: TaskManager, rows: int) -> list[Any]:
    """The model's answers to the text task, in the order of its documents."""
    evaluated = lm_eval.simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=rows, device="cpu"),
        tasks=["eyas_text"],
        task_manager=tasks,
        log_samples=True,
    )
    return [
        sample["resps"] for sample in sorted(evaluated["samples"]["eyas_text"], key=lambda sample: sample["doc_id"])
    ]


def main(folder: str, head: str) -> None:
    model, tokenizer, tasks, report = tiny.model(), tiny.tokenizer(), TaskManager(include_path=folder), {}
    for rows in (1, 3):
        own = answers(model, tokenizer, tasks, rows)
        attachment = eyas.attach(model, head, tree="fixed")
        ours = answers(model, tokenizer, tasks, rows)
        attachment.detach()
        taus = [stats.tau for stats in attachment.stats]
        report[rows] = {"equal": own == ours, "answers": len(own), "tau": sum(taus) / len(taus)}
    print(json.dumps(report))


main(*sys.argv[2:])
