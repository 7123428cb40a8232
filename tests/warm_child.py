"""The process that `processes.started(..., warm=True)` forks children from: what every child would import for seconds
is in memory. Nothing of eyas is: each child imports its own."""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

PACKAGES = ("torch", "transformers", "transformers.models.llama.modeling_llama", "transformers.pytorch_utils")


def serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request, and answer with the child's number. Return in the child alone, with its request."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                return json.loads(message), descriptors
            os.write(write, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)  # now the child belongs to the process that asked, which is a subreaper
        requests.send(os.read(read, 20))
        for descriptor in (read, write, *descriptors):
            os.close(descriptor)


def thaw() -> None:
    """Let the interpreter's last collection find Triton, whose bindings report what is left as leaks."""
    if any(name.startswith("triton._C") for name in sys.modules):
        gc.unfreeze()


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this process what a new interpreter would be."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 1024)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(0, encoding="utf-8"),
        os.fdopen(1, "w", 1 if os.isatty(1) else -1, "utf-8"),
        os.fdopen(2, "w", 1, "utf-8", "backslashreplace"),
    )
    atexit.register(thaw)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if request["interrupts"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Import, serve, and in a child run `-m module` or `-c code`; the interpreter ends as it always does."""
    sys.path.pop(0)  # tests/
    for name in PACKAGES:
        importlib.import_module(name)
    assert "eyas" not in sys.modules
    gc.freeze()  # a collection in a child would copy every page that it looks at
    request, descriptors = serve(socket.socket(fileno=int(sys.argv[1])))
    become(request, descriptors)
    kind, program, *arguments = request["arguments"]
    sys.argv = ["-c" if kind == "-c" else program, *arguments]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
