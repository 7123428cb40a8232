"""Files that stay whole, and outputs that one process writes at a time."""

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from eyas import files
from eyas.errors import InputError
from eyas.files import write_atomically
from eyas.locks import locked_output
from eyas_lab.folders import check_output_folder, remove_leftovers

HOLDER = """
import sys, time
from eyas.locks import locked_output
with locked_output(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """A process that holds the lock of an output until its stdin ends."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_second_process_is_refused_by_the_number_of_the_first(tmp_path: Path, kind: str) -> None:
    """Bug: two runs on one output wrote every line twice; a refused attempt destroyed what names the holder."""
    path = tmp_path / "out"
    if kind == "folder":
        path.mkdir()
    with hold(path) as process:
        for _ in range(2):
            refused = pytest.raises(InputError, match=rf"is being written by process {process.pid} on ")
            with refused, locked_output(path):
                pass
        process.communicate("")
    with locked_output(path):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    """A lock file that outlives its process must not block the output for ever."""
    with hold(tmp_path / "out") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / ".out.lock").read_text()
    with locked_output(tmp_path / "out"):
        pass


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """An exception in the middle of a write leaves the old file and no temporary one."""
    path = tmp_path / "file"
    with write_atomically(path) as stream:
        stream.write(b"old")
    with suppress(RuntimeError), write_atomically(path) as stream:
        stream.write(b"half of the n")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_temporary_files_of_live_processes_stay(tmp_path: Path) -> None:
    """A second run deleted what the first one was just writing."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as gone:
        pass
    live, dead, nameless = (tmp_path / f".state.pt.{pid}.tmp" for pid in (os.getppid(), gone.pid, "x"))
    for path in (live, dead, nameless):
        path.touch()
    remove_leftovers(tmp_path, "other*")
    assert len(os.listdir(tmp_path)) == 3
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == [live.name]


def test_a_folder_that_cannot_be_made_is_refused_early_and_nothing_stays(tmp_path: Path) -> None:
    """Guards `features --output`, which read all its data before it looked at its output."""
    check_output_folder(tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="cannot write"):
            check_output_folder(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_kept_checksum_is_computed_again_only_when_the_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: large files are read at every load, or a changed one is taken for what it was."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "large"
    path.write_bytes(b"one")
    first = files.kept_sha256(path)
    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256_of_file", lambda path: "read again")
        assert files.kept_sha256(path) == first == hashlib.sha256(b"one").hexdigest()
    path.write_bytes(b"two")
    os.utime(path, (1, 1))  # the system's clock of files ticks every few milliseconds
    assert files.kept_sha256(path) == hashlib.sha256(b"two").hexdigest()
    for kept in (tmp_path / "cache" / "eyas" / "checksums").iterdir():
        kept.write_text("damaged")
    assert files.kept_sha256(path) == hashlib.sha256(b"two").hexdigest()
