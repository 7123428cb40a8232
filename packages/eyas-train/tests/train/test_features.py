"""Features on disk: the same training as online, whole shards whatever happens, and refusals by name."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from torch import Tensor

import zoo
from eyas import drafters
from eyas.core.target import Target
from eyas.drafters.eagle3 import NewHead
from eyas.errors import EyasError, InputError, ModelError, OptionError
from eyas.targets.fingerprints import fingerprint
from eyas_train._manifest import FeatureSettings, plan_store
from eyas_train._tensors import restored, stored
from eyas_train.data import Batches, Data, Example, Examples, Report
from eyas_train.features import batch_of, layers_for_training, write_features
from eyas_train.loop import TrainConfig, train
from eyas_train.remote_store import MAX_HEADER_BYTES, RemoteStore, open_store
from eyas_train.store import REPAIR, FeatureStore
from train import toy

LAYERS = (2, 4, 5, 8)  # what eagle3 reads of eight layers; eagle1 reads the last


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    return Target(zoo.tiny("llama", num_hidden_layers=8), "tiny-llama")


def language(count: int, seed: int) -> Examples:
    generator, found = torch.Generator().manual_seed(seed), Examples()
    for i in range(count):
        length = 9 + (i * 7) % 30
        ids = torch.randint(3, 60, (length,), generator=generator).tolist()
        found.append(Example(ids, [t >= 4 for t in range(length)]))
    return found


DATA = Data(
    language(30, 0), language(6, 1), Report(lines=37, bad=1, problems=["chat.jsonl:7: not JSON"], examples=36), "d" * 64
)


def settings(
    target: Target, dtype: str = "float32", layers: Sequence[int] = LAYERS, shard_bytes: int = 120_000
) -> FeatureSettings:
    return FeatureSettings(
        {"name": "tiny-llama", "fingerprint": fingerprint(target), "dtype": "float32"}, {"vocabulary": "v", "chat template": "t"},
        tuple(layers), target.hidden_size, dtype, {"files": [{"name": "chat.jsonl", "sha256": "d" * 64}], "sha256": "d" * 64}, 64, 0.05,
        shard_bytes,
    )  # fmt: skip


def begun(folder: Path, target: Target, **options: Any) -> FeatureStore:
    folder.mkdir(parents=True, exist_ok=True)
    plan_store(settings(target, **options), DATA, {"eyas": "0"}).write(folder)
    return FeatureStore(folder)


def made(folder: Path, target: Target, batch_tokens: int = 128, **options: Any) -> FeatureStore:
    store = begun(folder, target, **options)
    write_features(store, target, store.missing(), batch_tokens)
    assert store.finish()
    return FeatureStore(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    """A whole store in float32; not to be changed."""
    return made(tmp_path_factory.mktemp("features"), target).folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same, to be broken."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def losses(target: Target, method: str, data: Data, folder: Path) -> list[float]:
    steps = {"steps": 3, "batch_tokens": 256, "max_length": 64, "warmup_steps": 1, "eval_every": 2, "save_every": 0}
    config = TrainConfig(**steps, log_every=1, precision="float32", lr=1e-3)
    train(drafters.find(method).random(target, seed=1), data.train, data.heldout, config, folder)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [entry["heldout"]["loss"] if "heldout" in entry else entry["loss"] for entry in log]


@pytest.mark.quick("eagle1")
@pytest.mark.parametrize("method", ["eagle1", "eagle3"])
def test_one_loss_curve_from_either_source(method: str, tmp_path: Path, target: Target, folder: Path) -> None:
    """Guards the order of examples and layers, the held-out split and the packing. Float32: equal
    up to the order of sums in another batch; bfloat16: within its rounding (2^-8 of a feature), and
    not equal, or it was not what had been read."""
    online = losses(target, method, DATA, tmp_path / "online")
    assert losses(target, method, FeatureStore(folder).data(), tmp_path / "disk") == pytest.approx(online, rel=2e-6)
    halved = losses(target, method, made(tmp_path / "half", target, dtype="bfloat16").data(), tmp_path / "halved")
    assert halved == pytest.approx(online, rel=0.01)
    assert halved != online
    assert len(online) == 5


def test_a_step_reads_what_the_target_saw(target: Target, folder: Path) -> None:
    """The examples, and the whole record of a batch, for layers in another order than they are stored in."""
    data = FeatureStore(folder).data()
    assert (list(data.train), list(data.heldout)) == (list(DATA.train), list(DATA.heldout))
    assert data.train[2:4] == [DATA.train[2], DATA.train[3]]
    assert (data.report, data.sha256) == (DATA.report, DATA.sha256)
    drafter = drafters.find("eagle3").random(target)
    drafter.feature_layers = (5, 2, 4)
    online, disk = (batch_of(Batches(side, 512), [3, 0, 7], drafter) for side in (DATA.train, data.train))
    assert torch.equal(online.tokens_N, disk.tokens_N)
    assert torch.equal(online.counted_N, disk.counted_N)
    assert online.documents == disk.documents
    torch.testing.assert_close(online.features_NF, disk.features_NF, atol=2e-5, rtol=1e-5)
    assert disk.features_NF.shape[1] == 4 * target.hidden_size


def test_eight_bits_are_half_of_the_bytes(tmp_path: Path, target: Target, folder: Path) -> None:
    """float8_e4m3fn with a scale of two bytes for each token and layer: the size, the error, and what the manifest says."""
    store, exact = made(tmp_path / "store", target, dtype="float8_e4m3fn"), FeatureStore(folder)
    held = json.loads((store.folder / "manifest.json").read_text())
    assert held["dtype"] == "float8_e4m3fn"
    assert "scale.k" in held["layers_mean"]
    assert store.settings.token_bytes == 4 * (48 + 2)
    assert sum(shard.bytes - 8 * 4 * shard.examples for shard in store.manifest.shards) == store.manifest.tokens * 200
    assert store.verify() == []
    for number in range(len(store.lengths)):
        stored, true = store.features(number, LAYERS).float(), exact.features(number, LAYERS)
        largest = true.view(-1, 4, 48).abs().amax(-1).repeat_interleave(48, -1)
        assert bool(((stored - true).abs() <= torch.maximum(true.abs() / 16, largest * 2**-17)).all())


def test_scales() -> None:
    """Guards against numbers that leave the range of eight bits: all of a token are near zero, one of them is large,
    powers of two and their neighbours, zeros. What is read is exactly what was stored, times the scale."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, 64, generator=generator) * torch.logspace(-18, 30, 400)[:, None]
    values[::7, 3] *= 3000
    values[1::7, :] = 2.0 ** torch.arange(-32, 32)
    values[2::7, 5] = torch.nextafter(torch.tensor(256.0), torch.tensor(0.0))
    values[3::7] = 0
    scale, small = stored(values, torch.float8_e4m3fn)
    back = restored([scale, small])
    assert back.dtype == torch.bfloat16
    assert torch.equal(back.double(), small.double() * scale.double())
    bound = torch.maximum(values.abs() / 16, values.abs().amax(-1, keepdim=True) * 2**-17)
    assert bool(((back.double() - values.double()).abs() <= bound).all())
    values[5, 5], values[6, 6] = torch.nan, torch.inf
    assert stored(values, torch.float8_e4m3fn)[0].isfinite().logical_not().nonzero()[:, 0].tolist() == [5, 6]


def test_layers_of_methods(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder serves all that the methods named read; no head is made for it, which takes
    gigabytes with a large target. For a method of the user's own, which need not tell without a net, one is made."""
    kinds = {name: drafters.find(name) for name in ("eagle1", "eagle2", "eagle3")}
    heads = {name: kind.random(target) for name, kind in kinds.items()}
    for name, kind in kinds.items():
        monkeypatch.setattr(kind, "random", None)
        assert set(heads[name].train_feature_layers) == set(layers_for_training(target, [(kind, None)]))
    eagle3 = kinds["eagle3"]
    assert layers_for_training(target, [(eagle3, eagle3.Options(head=NewHead(layers="1,3")))]) == (1, 3, 8)
    assert layers_for_training(target, [(eagle3, None)]) == LAYERS
    assert layers_for_training(target, [(kinds["eagle1"], None), (kinds["eagle2"], None)]) == (8,)
    with pytest.raises(OptionError, match="vanilla has nothing to train"):
        layers_for_training(target, [(drafters.find("vanilla"), None)])
    monkeypatch.setattr(toy.Toy, "random", lambda *_: toy.Toy())
    assert layers_for_training(target, [(toy.Toy, None)]) == (1,)


def test_the_manifest(folder: Path, target: Target) -> None:
    held = json.loads((folder / "manifest.json").read_text())
    assert (held["format"], held["version"], held["dtype"]) == ("eyas-features", 1, "float32")
    assert held["target"] == {"name": "tiny-llama", "fingerprint": fingerprint(target), "dtype": "float32"}
    assert (held["examples"]["train"], held["examples"]["heldout"]) == (30, 6)
    assert len(held["shards"]) > 4
    for shard in held["shards"]:
        assert shard["bytes"] <= 120_000 + 8 * 4 * shard["examples"]
        tensors = load_file(folder / shard["file"])
        sizes = {name: tuple(value.shape) for name, value in tensors.items() if name != "crc32"}
        assert sizes == {f"layer.{k}": (shard["tokens"], 48) for k in LAYERS}
        assert sum(value.numel() * value.element_size() for value in tensors.values()) == shard["bytes"]


def test_any_shards_are_a_sample(tmp_path: Path, target: Target) -> None:
    """Data sorted by topic must not make a partial store one-sided, nor leave it without held-out examples."""
    store = begun(tmp_path, target)
    write_features(store, target, [1, 4, 2, 3], 128)
    data = FeatureStore(tmp_path).data()
    numbers = [*data.train.numbers, *data.heldout.numbers]  # type: ignore[attr-defined]
    assert len(data.heldout) >= 1
    assert min(numbers) < 10
    assert max(data.train.numbers) > 20  # type: ignore[attr-defined]
    assert sorted(numbers) == sorted(i for shard in (1, 2, 3, 4) for i in store.in_shard(shard))
    for i in range(len(data.train)):
        assert data.train.features(i, (8,)).shape == (len(data.train[i].ids), 48)  # type: ignore[attr-defined]


def test_going_on_gives_the_same_bytes(tmp_path: Path, target: Target, folder: Path) -> None:
    """Some shards now, the others later, in another order."""
    store = begun(tmp_path, target)
    write_features(store, target, [3, 1], 128)
    assert not store.finish()
    with pytest.raises(EyasError):
        FeatureStore(tmp_path / "nowhere")
    later = FeatureStore(tmp_path)
    assert 3 not in later.missing()
    write_features(later, target, later.missing()[::-1], 128)
    assert later.finish()
    for file in folder.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_disk_that_fills_up(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that are written stay and can be trained from, and the same command goes on; the
    message says so, and how much to free."""
    store, calls, sync = begun(tmp_path, target), list[int](), os.fsync

    def fsync(number: int) -> None:
        calls.append(number)
        if len(calls) == 5:  # a file, its folder, a file, its folder, a file
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(number)

    with pytest.raises(InputError, match="holds no shard to train from yet"):
        store.data()
    said = r"no space left for .*: 2 of \d+ shards are whole and can be trained from; free 0\.0 GiB and run"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(InputError, match=said):
            write_features(store, target, store.missing(), 128)
    assert not list(tmp_path.glob(".*"))
    assert 0 < len(FeatureStore(tmp_path).data().train) < 30
    write_features(store, target, store.missing(), 128)
    assert store.finish()


def broken(path: Path, at: int) -> None:
    """One bit is another."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def read_all(data: Data) -> list[Tensor]:
    """The features of all examples."""
    return [side.features(i, LAYERS) for side in (data.train, data.heldout) for i in range(len(side))]  # type: ignore[attr-defined]


def test_a_damaged_shard_is_noticed_at_its_first_use(copy: Path) -> None:
    """One bit of a feature. Training that went on with it would be wrong without a sign."""
    broken(copy / "shard-00002.safetensors", -5)
    store = FeatureStore(copy)
    assert store.verify() == [f"{copy}/shard-00002.safetensors is damaged: its checksum is another; {REPAIR}"]
    said = r"shard-00002.safetensors is damaged \(layer 8 of an example\); delete it and run `eyas features`"
    with pytest.raises(InputError, match=said):
        read_all(store.data())


@pytest.mark.cover(name=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", "examples.safetensors", "shard-00001.safetensors"])
def test_a_flipped_bit_is_found(folder: Path, copy: Path, name: str) -> None:
    """In any file of a store, also in the parts that no checksum covered: the number of training
    examples, the names and lengths of the data, a shard's header. One bit of every n-th byte: all
    files are refused, or say the same. No false alarm."""
    data = FeatureStore(folder).data()
    expected = read_all(data), data.sha256, data.report
    content = (copy / name).read_bytes()
    header = range(0, min(len(content), 1200), 7)
    refused = 0
    for place in [*header, *range(1200, len(content), max(1, len(content) // 40))]:
        broken(copy / name, place)
        try:
            data = FeatureStore(copy).data()
            found = read_all(data), data.sha256, data.report
        except InputError:
            refused += 1
        else:
            same = [torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True)]
            assert (all(same), *found[1:]) == (True, *expected[1:]), f"a flipped bit at {place} was not found"
        (copy / name).write_bytes(content)
    assert refused > 50


@pytest.fixture
def remote(folder: Path) -> Iterator[MemoryFileSystem]:
    """The same store at memory://bucket/features."""
    files = fsspec.filesystem("memory")
    for path in folder.iterdir():
        files.pipe_file(f"/bucket/features/{path.name}", path.read_bytes())
    yield files
    files.store.clear()


@pytest.fixture
def asked(remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each request for parts of shards."""
    sizes, read = list[int](), MemoryFileSystem.cat_ranges

    def counted(self: Any, paths: Any, starts: Any, ends: Any, **options: Any) -> Any:
        sizes.append(sum(ends) - sum(starts))
        return read(self, paths, starts, ends, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_ranges", counted)
    return sizes


URL = "memory://bucket/features"


def remote_store(max_bytes: int = 10**9) -> RemoteStore:
    store = open_store(URL, max_bytes)
    assert isinstance(store, RemoteStore)
    return store


def held(store: RemoteStore) -> int:
    """Bytes of the features that are on this machine."""
    return sum(path.stat().st_size for path in store._place.iterdir())


@pytest.mark.parametrize(("dtype", "max_bytes"), [("float32", 30_000), ("float32", 10**9), ("float8_e4m3fn", 10**9)])
def test_one_loss_curve_from_a_url(
    tmp_path: Path, target: Target, remote: MemoryFileSystem, asked: list[int], dtype: str, max_bytes: int
) -> None:
    """Guards against rows of another example, or without their scales, and against a cache that grows: the same bits as
    from the folder, when a part of a batch fits into the cache and when all does."""
    here = made(tmp_path / "store", target, dtype=dtype)
    for path in here.folder.iterdir():
        remote.pipe_file(f"/bucket/features/{path.name}", path.read_bytes())
    expected = losses(target, "eagle3", here.data(), tmp_path / "here")
    store = remote_store(max_bytes)
    assert losses(target, "eagle3", store.data(), tmp_path / "elsewhere") == expected
    assert 0 < held(store) <= max_bytes
    assert asked


def test_what_is_kept_is_read_once(asked: list[int], folder: Path) -> None:
    """Guards against a second epoch that fetches again what is here, or whole shards for one example each. What was
    read longest ago goes first, and comes again. Examples that are named are fetched together, ahead."""
    expected = read_all(FeatureStore(folder).data())
    store = remote_store()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(read_all(store.data()), expected, strict=True))
    headers = sum(MAX_HEADER_BYTES + 8 * len(LAYERS) * shard.examples for shard in store.manifest.shards)
    assert sum(asked) == held(store) + headers == sum(part.numel() * 4 for part in expected) + headers
    small = remote_store(62 * 48 * 4)  # three of the four, which have 9, 16, 23 and 30 tokens
    for number in (0, 1, 0, 2, 3):
        small.features(number, (8,))
    assert {number for number, _ in small.kept} == {0, 2, 3}
    assert torch.equal(small.features(1, (8,)), expected[1][:, -48:])
    asked.clear()
    examples = remote_store().data().train
    examples.expect([3, 1, 4], LAYERS)  # type: ignore[attr-defined]
    for index in (1, 3, 4):
        examples.features(index, LAYERS)  # type: ignore[attr-defined]
    assert len(asked) == 2  # the shards' headers, and the rows


DAMAGES: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "a bit of a feature": (lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:], r"is damaged \(layer 8 of an example\)"),
    "no header": (lambda content: b"no" * 50, "is damaged: no header"),
    "cut": (lambda content: content[:-2000], r"bytes came where [\d,]+ had been asked for: the file is cut"),
    "gone": (lambda content: None, "cannot be found"),
    "of other features": (lambda content: content.replace(b'"store":', b'"Store":', 1), "belongs to other features"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_elsewhere_is_noticed(remote: MemoryFileSystem, name: str) -> None:
    """One line that names the shard's URL, whenever it is first read."""
    change, said = DAMAGES[name]
    path = "/bucket/features/shard-00002.safetensors"
    content = change(remote.cat_file(path))
    if content is None:
        remote.rm_file(path)
    else:
        remote.pipe_file(path, content)
    with pytest.raises(InputError, match=rf"^{URL}/shard-00002.safetensors.*({said})") as raised:
        read_all(remote_store().data())
    assert "\n" not in str(raised.value)


def test_stores_elsewhere_that_cannot_be_used(remote: MemoryFileSystem, tmp_path: Path, target: Target) -> None:
    """Before a training begins: no manifest, another manifest's examples, and a copy of an unfinished folder."""
    with pytest.raises(InputError, match=r"memory://bucket/nothing/manifest\.json does not exist"):
        open_store("memory://bucket/nothing", 1)
    unfinished = begun(tmp_path, target).folder
    remote.pipe_file("/bucket/features/manifest.json", (unfinished / "manifest.json").read_bytes())
    with pytest.raises(InputError, match=f"{URL} was copied before `eyas features` had ended"):
        open_store(URL, 1)
    remote.pipe_file("/bucket/features/examples.safetensors", b"")
    with pytest.raises(InputError, match=f"{URL}/examples.safetensors is missing or damaged"):
        open_store(URL, 1)


def test_a_truncated_shard(copy: Path, tmp_path: Path, target: Target, folder: Path) -> None:
    """As an interrupted copy leaves it: refused when training begins, made again by the command. So is one of other
    features, of the same name and size."""
    path = copy / "shard-00001.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 100)
    store = FeatureStore(copy)
    said = rf"shard-00001.safetensors has {size - 100:,} bytes instead of {size:,}; delete it"
    with pytest.raises(InputError, match=said):
        store.data()
    assert store.missing() == [1]
    write_features(store, target, [1], 128)
    assert path.read_bytes() == (folder / path.name).read_bytes()
    os.truncate(path, 5)
    with pytest.raises(InputError, match="damaged: no header"):
        store.data()
    other = made(tmp_path / "other", Target(zoo.tiny("llama", num_hidden_layers=8, seed=5)))
    shutil.copy(other.path(0), copy)
    with pytest.raises(InputError, match=r"shard-00000.safetensors belongs to other features than the manifest.json"):
        FeatureStore(copy).data()


def test_damaged_examples_and_manifests(copy: Path) -> None:
    """A manifest from elsewhere may not name files outside of its folder: they would be read, or written over."""
    broken(copy / "examples.safetensors", -1)
    with pytest.raises(InputError, match="another checksum than the manifest says"):
        FeatureStore(copy)
    manifest = copy / "manifest.json"
    text = manifest.read_text()
    outside = json.loads(text)
    outside["shards"][0]["file"] = "../elsewhere.safetensors"
    outside["sha256"] = "0" * 64  # whoever makes such a manifest would write the right one
    for content, said in (
        (text[:-9], "damaged"), (text.replace('"tokens": ', '"tokns": '), "damaged"), (text.replace("float32", "float16"), "was changed"),
        (text.replace('"version": 1', '"version": 2'), "version 2: a newer eyas"), ("[]", "damaged"),
        (json.dumps(outside), "names a shard outside of its folder"),
    ):  # fmt: skip
        manifest.write_text(content)
        with pytest.raises(InputError, match=said):
            FeatureStore(copy)
    manifest.unlink()
    with pytest.raises(InputError, match="holds no features"):
        FeatureStore(copy)


def test_other_targets_tokenizers_and_layers_are_refused(folder: Path, target: Target) -> None:
    store = FeatureStore(folder)
    store.check(target, None)
    with pytest.raises(InputError, match="features of another target: 'tiny-llama', not 'other'"):
        store.check(Target(zoo.tiny("llama", num_hidden_layers=8, seed=5), "other"), None)
    said = "holds layers 2,4,5,8, but this head also reads 3,6: make features with `eyas features --layers 2,3,4"
    with pytest.raises(InputError, match=said):
        store.check_layers((2, 3, 6))
    with pytest.raises(InputError, match="also reads 0"):
        store.features(0, (0,))


def test_features_that_cannot_be_stored(tmp_path: Path, target: Target) -> None:
    """float16 ends at 65,504, and a broken target gives NaN: written down, either would only show as a loss of NaN."""
    model = zoo.tiny("llama", num_hidden_layers=8)
    large = begun(tmp_path / "large", target, dtype="float16")
    with torch.no_grad():
        model.model.norm.weight.fill_(1e5)
    with pytest.raises(OptionError, match=r"target reach [\d.e+]+, too large for float16: store bfloat16"):
        write_features(large, Target(model), [0], 128)
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"features are NaN or infinite \(after layer 3\)"):
        write_features(large, Target(model), [0], 128)
    with pytest.raises(OptionError, match="batch_tokens is 16, the longest example has"):
        write_features(large, target, [0], 16)
