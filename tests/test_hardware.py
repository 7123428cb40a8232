"""The machine's OpenMP threads: those that nobody needs any more have ended."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, time
import torch
import eyas

def tasks():
    counts = []
    for _ in range(20):  # a thread that ends is listed a moment longer
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.02)
    return min(counts)

def parallel():
    torch.ones(512, 512) @ torch.ones(512, 512)
    (torch.ones(1 << 20) + 1).sum()

torch.set_num_threads(2)
llm = eyas.load(kernels="off", method="vanilla")
counts = [tasks()]
for _ in range(2):  # the first answer starts threads of the tokenizer, which stay
    parallel()
    counts.append(tasks())
    llm.generate("Hello", max_new_tokens=2)
    counts.append(tasks())
print(*counts)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP is torch's on Linux")
def test_threads_end_with_the_work() -> None:
    """Bug: threads of one caller wait on while another decodes: a server was half as fast."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    loaded, begun, first_answer, begun_again, answered = map(int, done.stdout.split())
    assert begun == loaded + 1, "loading has left a thread that waits"
    assert begun_again == first_answer + 1
    assert answered == first_answer
