"""The wheels of dist/ as a user gets them: what they hold, and what runs in an empty environment.

    make wheel-test                                     builds them first
    python runs/wheel_test.py --python python3.13       in an environment of another interpreter

draft-vectors runs without eyas; eyas alone says in one line what needs another package; then the others are added.
eyas-gpu is installed without Triton and eyas-ray without Ray, which are large.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUIET = ("--quiet", "--disable-pip-version-check", "--no-cache-dir")
LARGEST_MB = {
    "draft_vectors": 5,
    "eyas": 2,
    "eyas_tiny": 75,
    "eyas_gpu": 1,
    "eyas_lab": 1,
    "eyas_ray": 1,
    "eyas_train": 1,
}
HELD = {
    "draft_vectors": [
        "draft_vectors/py.typed", "draft_vectors/data/vectors.json", "draft_vectors/data/vectors.safetensors",
        "draft_vectors/data/target/config.json", "draft_vectors/data/eagle3/model.safetensors", "draft_vectors/engines/eyas.py",
    ],
    "eyas": [
        "eyas/py.typed", "eyas/kernels/cpu/kernels.cpp", "eyas/kernels/cpu/vectors.h", "eyas/serve/page/index.html",
        "eyas/serve/page/main.js",
    ],
    "eyas_tiny": [
        "eyas_tiny/__init__.py", "eyas_tiny/weights/model.int8.safetensors", "eyas_tiny/weights/checksums.json",
        "eyas_tiny/weights/tokenizer.json", "eyas_tiny/weights/eagle3/model.safetensors", "eyas_tiny/weights/eagle1/config.json",
    ],
    "eyas_gpu": ["eyas_gpu/py.typed", "eyas_gpu/graphs.py", "eyas_gpu/_layer_kernels.py"],
    "eyas_lab": ["eyas_lab/py.typed", "eyas_lab/bench/prompts.jsonl", "eyas_lab/commands/demo.py", "eyas_lab/methods/method_medusa.py"],
    "eyas_ray": ["eyas_ray/py.typed", "eyas_ray/serving.py"],
    "eyas_train": ["eyas_train/py.typed", "eyas_train/loop.py", "eyas_train/accelerate/questions.jsonl"],
}  # fmt: skip
# What eyas alone does not bring -> the extra that does.
MISSING = {
    ("train", "--help"): "train",
    ("bench",): "lab",
    ("generate", "--method", "medusa", "hi"): "lab",
    ("demo", "--target", "embedded"): "lab",
    ("generate", "hi"): "tiny",
}


def only(pattern: str) -> Path:
    """The one file of dist/ that a pattern fits."""
    (file,) = (ROOT / "dist").glob(pattern)
    return file


def check_contents(name: str) -> None:
    """The wheel and the sources hold every file that runs eyas, nothing foreign, and are small."""
    wheel, sources = only(f"{name}-*.whl"), only(f"{name}-*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        files = opened.namelist()
    with tarfile.open(sources) as packed:
        inside = [member.name.partition("/")[2] for member in packed.getmembers()]
    before = "" if name == "eyas_tiny" else "src/"
    missing = [file for file in HELD[name] if file not in files or before + file not in inside]
    assert not missing, f"{wheel.name} or {sources.name} lacks {missing}"
    foreign = [file for file in files if not file.startswith((f"{name}/", f"{name}-")) or "__pycache__" in file]
    foreign += [file for file in inside if file.startswith(("tests/", "runs/", "docs/"))]
    assert not foreign, f"{wheel.name} or {sources.name} holds {foreign}"
    assert any(file.endswith("licenses/LICENSE") for file in files), f"{wheel.name} has no licence"
    weights = [file for file in [*files, *inside] if file.endswith(".safetensors")]
    assert bool(weights) == (name in ("draft_vectors", "eyas_tiny")), f"weights in {name}: {weights}"
    for path in (wheel, sources):
        megabytes = path.stat().st_size / 1e6
        assert megabytes < LARGEST_MB[name], f"{path.name} has {megabytes:.1f} MB"
        print(f"{path.name}: {megabytes:.2f} MB, {len(files if path == wheel else inside)} files")


def check_running(python: str, folder: Path) -> None:
    """Install into an empty environment: eyas alone, which names what is missing; then the others, which run."""
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    scripts = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    clean |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "XDG_CACHE_HOME": str(folder / "cache")}

    def install(*what: str) -> None:
        command = [scripts / "python", "-m", "pip", "install", *QUIET]
        places = ["-c", ROOT / "constraints.txt", "--find-links", ROOT / "dist"]
        subprocess.run([*command, *places, *what], check=True, cwd=folder)

    def eyas(*arguments: str, status: int = 0) -> str:
        line = [scripts / "eyas", *arguments]
        done = subprocess.run(line, capture_output=True, text=True, cwd=folder, env=clean, timeout=600)
        print(f"$ eyas {' '.join(arguments)}\n{done.stdout}{done.stderr}", flush=True)
        assert done.returncode == status, f"exit status {done.returncode}, not {status}"
        return done.stdout if status == 0 else done.stderr

    install(str(only("draft_vectors-*.whl")))
    reference = [scripts / "python", "-m", "draft_vectors", "draft_vectors.runner:Reference", "--only", "eagle3-chain"]
    subprocess.run(reference, check=True, cwd=folder, env=clean)
    wheel = only("eyas-*.whl")
    install(str(wheel))
    for command, extra in MISSING.items():
        message = eyas(*command, status=2)
        assert message.count("\n") == 1, message
        assert f"pip install 'eyas[{extra}]'" in message
    assert "pip install ./tiny" in eyas("doctor")
    install(f"eyas[tiny] @ {wheel.as_uri()}")  # pip finds eyas-tiny in dist/
    assert json.loads(eyas("doctor", "--json"))["ok"]
    assert eyas("generate", "I would like to see a movie tonight.", "--max-new-tokens", "20").strip()
    install(f"eyas[lab] @ {wheel.as_uri()}")
    eyas("demo", "--target", "embedded")
    install(f"eyas[train] @ {wheel.as_uri()}")
    install("--no-deps", str(only("eyas_gpu-*.whl")), str(only("eyas_ray-*.whl")))
    assert "--ttt" in eyas("train", "--method", "eagle3", "--help")
    methods = {method["name"] for method in json.loads(eyas("methods", "--json"))["methods"]}
    assert {"medusa", "eagle3"} <= methods
    assert eyas("generate", "--method", "lookahead", "I would like to see a movie.", "--max-new-tokens", "8").strip()
    imports = [scripts / "python", "-c", "import eyas_gpu.runner, eyas_ray.serving"]
    subprocess.run(imports, check=True, cwd=folder, env=clean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the empty environment")
    options = parser.parse_args()
    for name in HELD:
        check_contents(name)
    with tempfile.TemporaryDirectory(prefix="eyas-wheels-") as folder:
        check_running(options.python, Path(folder))
    print("the wheels install and run")


if __name__ == "__main__":
    main()
