"""The files of eyas whose functions run for one answer of the embedded model; test_house.py runs this."""

import sys
from pathlib import Path
from types import FrameType

import eyas
from house import code_lines

FOLDER = str(Path(eyas.__file__).resolve().parent)


def main() -> None:
    """Print the number of files, and of their code lines."""
    llm = eyas.load(tree="fixed", kernels="off")
    passed: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            passed.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        llm.generate("Hi, how are you?", max_new_tokens=12)
    finally:
        sys.setprofile(None)
    print(len(passed), sum(code_lines(Path(file))[0] for file in passed))


if __name__ == "__main__":
    main()
