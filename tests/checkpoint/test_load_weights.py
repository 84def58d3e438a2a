"""Weights of another run or project: every kind of source, every name explained, and nothing changed by a refusal."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from checkpoint.filled import Model, laid_out
from checkpoint.states import Net, watching, write_of_another_version
from dtrain import storage
from dtrain.checkpoint.load_weights import LoadWeightsResult, load_weights_
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.dist.init import get_dist_info
from dtrain.errors import CheckpointError, CheckpointMismatchError, ConfigError, CorruptCheckpointError, DtrainError
from dtrain.shard.unshard import eval_mode
from dtrain.state import init_state
from mutations import flip_bits

INDEX = "model.safetensors.index.json"
NAMES = ["first.weight", "first.bias", "last.weight", "last.bias", "seen"]


class Tied(nn.Module):
    """Embedding and head share their weight, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    made = Net()
    made.seen.fill_(seed)
    return made


def stored() -> dict[str, torch.Tensor]:
    """Return the tensors that another project has saved."""
    return {name: tensor.clone() for name, tensor in net(7).state_dict().items()}


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], *, files: int = 1) -> Path:
    """A folder as ``save_pretrained`` writes it; the tensors are dealt out over the files."""
    folder.mkdir(parents=True, exist_ok=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    file_of = {name: f"model-{1 + number % files:05d}-of-{files:05d}.safetensors" for number, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": file_of}))
    return folder


def values(model: nn.Module) -> dict[str, list]:
    return {
        name: full_tensor(t.detach()).tolist() for name, t in {**dict(model.named_parameters()), **model.state_dict()}.items()
    }


def expected() -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in stored().items()}


def save_step(root: Path) -> Path:
    """A checkpoint of ours, and its step."""
    model = net(7)
    return save_sharded(root, init_state(model, torch.optim.AdamW(model.parameters()))).path


SOURCES: dict[str, Callable[[Path], Path]] = {
    "folder": lambda path: write_folder(path, stored()),
    "several files": lambda path: write_folder(path, stored(), files=3),
    "file": lambda path: write_folder(path, stored()) / "model.safetensors",
    "step": save_step,
    "root": lambda path: save_step(path).parent,
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_load_weights_reads_every_source_kind(tmp_path, make):
    model = net()
    where = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    source = make(tmp_path / "source")
    done = load_weights_(model, source)
    assert values(model) == expected()
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == where
    assert all(p.requires_grad and p.is_leaf and p.grad is None for p in model.parameters())
    assert sorted(done.loaded) == sorted(NAMES)
    assert (done.kept, done.left_out) == ((), ())
    step = source / "step-00000000"
    assert done.path == (step if step.exists() else source)


def test_single_file_is_preferred_to_index(tmp_path):
    write_folder(tmp_path, {name: torch.zeros_like(t) for name, t in stored().items()}, files=2)
    write_folder(tmp_path, stored())
    model = net()
    load_weights_(model, str(tmp_path))
    assert values(model) == expected()


def test_symlinked_file_is_read(tmp_path):
    """The cache of Hugging Face holds links to files without an ending."""
    (write_folder(tmp_path / "blobs", stored()) / "model.safetensors").rename(tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    for source in (tmp_path / "snapshot", tmp_path / "snapshot" / "model.safetensors"):
        model = net()
        load_weights_(model, source)
        assert values(model) == expected()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn], ids=str)
def test_floats_are_cast_to_model_dtype(tmp_path, dtype):
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in stored().items()}
    model = net()
    load_weights_(model, write_folder(tmp_path, tensors))
    assert {t.dtype for t in model.parameters()} == {torch.float32}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name].to(tensor.dtype)), name


@pytest.mark.parametrize("stored_as", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
def test_tied_parameters_load_under_any_name(tmp_path, stored_as):
    full = torch.arange(15.0).reshape(5, 3)
    model = Tied()
    done = load_weights_(model, write_folder(tmp_path, {name: full.clone() for name in stored_as}))
    assert torch.equal(model.embed.weight, full)
    assert model.head.weight is model.embed.weight
    assert done.loaded == (stored_as[0],)


def test_missing_pattern_matches_any_name_of_tied_parameter(tmp_path):
    model = nn.ModuleDict({"tied": Tied(), "more": nn.Linear(1, 1)})
    folder = write_folder(tmp_path, {"more.weight": torch.ones(1, 1), "more.bias": torch.ones(1)})
    done = load_weights_(model, folder, ignore=["tied.head.*"])
    assert done.kept == ("tied.embed.weight",)
    assert values(model["more"]) == {"weight": [[1.0]], "bias": [1.0]}


def test_tied_parameters_with_unequal_stored_values_are_refused(tmp_path):
    write_folder(tmp_path, {"embed.weight": torch.zeros(5, 3), "head.weight": torch.ones(5, 3)})
    model = Tied()
    before = values(model)
    with pytest.raises(
        CheckpointMismatchError, match=r"'embed.weight' and 'head.weight' must be equal, because both are 'embed"
    ):
        load_weights_(model, tmp_path)
    assert values(model) == before
    load_weights_(model, tmp_path, rename={"embed.weight": None})
    assert torch.equal(model.embed.weight, torch.ones(5, 3))


class Shared(nn.Module):
    """One module in two places, and a buffer that two modules hold: a state dict has both names of each."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.BatchNorm1d(2)
        self.right = self.left
        self.register_buffer("scale", torch.ones(2))
        self.inner = nn.Module()
        self.inner.register_buffer("scale", self.scale)


@pytest.mark.parametrize("dropped", [(), ("left.", "scale"), ("right.", "inner.")])
def test_shared_buffer_loads_under_any_name(tmp_path, dropped):
    tensors = {name: tensor.clone() + 1 for name, tensor in Shared().state_dict().items()}
    assert {"left.running_mean", "right.running_mean", "scale", "inner.scale"} <= tensors.keys()
    model = Shared()
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)} if dropped else tensors
    load_weights_(model, write_folder(tmp_path, kept))
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


RENAMES: dict[str, Any] = {
    "function": lambda name: None if name.startswith("cls.") else name.removeprefix("bert."),
    "mapping": {**{f"bert.{name}": name for name in NAMES[:2]}, "bert.seen": "seen", "cls.bias": None},
}


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_rename_maps_and_drops_names_and_missing_allows_gaps(tmp_path, rename):
    tensors = {f"bert.{name}": stored()[name] for name in ("first.weight", "first.bias", "seen")}
    write_folder(tmp_path, {**tensors, "cls.bias": torch.zeros(3)})
    model = net()
    done = load_weights_(model, tmp_path, rename=rename, ignore=["last.*"])
    reference = {**values(net()), **{name: value for name, value in expected().items() if not name.startswith("last")}}
    assert values(model) == reference
    assert sorted(done.loaded) == ["first.bias", "first.weight", "seen"]
    assert (done.kept, done.left_out) == (("last.weight", "last.bias"), ("cls.bias",))


def test_names_matching_missing_are_loaded_when_stored(tmp_path):
    model = net()
    done = load_weights_(model, write_folder(tmp_path, stored()), ignore=("**",))
    assert values(model) == expected()
    assert isinstance(done, LoadWeightsResult)
    assert done.kept == ()


def test_wrapped_modules_load_under_plain_names(tmp_path):
    model = net()
    model.first = checkpoint_wrapper(model.first)
    model.last = torch.compile(model.last, backend="eager")
    load_weights_(model, write_folder(tmp_path, stored()))
    assert torch.equal(dict(model.named_parameters())["last._orig_mod.weight"], stored()["last.weight"])


def complaint(tensors: dict[str, torch.Tensor], tmp_path: Path, **options: Any) -> str:
    model = net()
    before = values(model)
    with pytest.raises(DtrainError) as caught:
        load_weights_(model, write_folder(tmp_path / "there", tensors), **options)
    assert values(model) == before
    return f"{type(caught.value).__name__}: {caught.value}"


def test_mismatched_weights_are_refused_with_table(tmp_path):
    tensors = stored()
    tensors |= {"last.weight": torch.zeros(3, 7), "seen": torch.zeros(()), "cls.bias": torch.zeros(2, dtype=torch.bfloat16)}
    del tensors["first.bias"]
    assert complaint(tensors, tmp_path) == (
        f"CheckpointMismatchError: load_weights_: {tmp_path / 'there'} does not fit. 4 entries differ (1 of another shape, "
        "1 of another dtype, 1 unexpected, 1 missing). Pass rename= to map stored names to names in the model or to None, or "
        "ignore= for names that need not be stored.\n"
        "  last.weight: file F32 [3, 7], here F32 [2, 7]\n"
        "  seen: file F32 [], here I64 []\n"
        "  cls.bias: file BF16 [2], here nothing (nearest: first.bias)\n"
        "  first.bias: file nothing, here F32 [7] (nearest: cls.bias)"
    )


def test_mismatch_table_is_short_and_shows_each_difference_kind(tmp_path):
    text = complaint({f"bert.{number}": torch.zeros(1) for number in range(50)} | {"last.bias": torch.zeros(9)}, tmp_path)
    assert "55 entries differ (1 of another shape, 50 unexpected, 4 missing)" in text
    assert text.count("\n") == 11
    assert text.endswith("\n  and 45 more")
    for row in ("last.bias: file F32 [9], here F32 [2]", "bert.0: file F32 [1], here nothing", "first.weight: file nothing"):
        assert row in text


def test_mismatch_table_shows_both_names_of_renamed_tensor(tmp_path):
    text = complaint(
        {**stored(), "last.bias": torch.zeros(3)}, tmp_path, rename={"last.bias": "last.weight", "last.weight": None}
    )
    assert "\n  last.weight (stored as last.bias): file F32 [3], here F32 [2, 7]" in text


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float32])
def test_integers_are_not_cast(tmp_path, dtype):
    assert "seen: file" in complaint({**stored(), "seen": torch.zeros((), dtype=dtype)}, tmp_path)


BAD_OPTIONS = {
    "pattern": ({"ignore": ["lst.*"]}, "ConfigError: .*ignore must match names of the model, got 'lst.*'"),
    "text": ({"ignore": "last.*"}, "ConfigError: .*ignore must be a list of patterns, got the string 'last.*'"),
    "no text": ({"ignore": [3]}, "ConfigError: .*patterns of names must be text, got 3"),
    "one function": (
        {"ignore": len},
        "ConfigError: .*ignore must be a list of patterns such as ['head.*'], got <built-in function len>",
    ),
    "pairs": ({"rename": [("a", "b")]}, "ConfigError: .*rename must be a function of the stored name, or a mapping, got [('a'"),
    "stray": ({"rename": {"cls.bias": None}}, "ConfigError: .*rename must have stored names, got 'cls.bias' (1 such names)"),
    "no name": (
        {"rename": lambda name: 3},
        "ConfigError: .*rename must return a name in the model or None for 'seen', got 3",
    ),
    "nothing left": (
        {"rename": lambda name: None, "ignore": ["**"]},
        "CheckpointMismatchError: .*at least one of the 5 tensors must match the model, but rename=",
    ),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_invalid_options_are_refused(tmp_path, options, message):
    kind, _, rest = message.partition(": .*")
    text = complaint(stored(), tmp_path, **options)
    assert text.startswith(f"{kind}: load_weights_: {tmp_path / 'there'}: ")
    assert rest in text


def test_meta_model_is_refused(tmp_path):
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ConfigError, match=r"5 of 5 tensors are on the meta device \(first: first.weight\). Call dt.mat"):
        load_weights_(model, write_folder(tmp_path, stored()))


def empty(path: Path) -> Path:
    path.mkdir()
    return path


def with_pickle(path: Path, name: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / name).write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/never'\ntR.")
    return path


def unfinished(path: Path) -> Path:
    (path / "step-00000003").mkdir(parents=True)
    return path / "step-00000003"


NOTHING_TO_LOAD = {
    "nothing": (lambda path: path, "x. Check the path, because nothing is downloaded"),
    "other name": (
        lambda path: write_folder(path, stored()).joinpath("model.safetensors").rename(path / "lora.safetensors").parent,
        "got lora.safetensors. Name the .safetensors file or the folder",
    ),
    "empty": (
        empty,
        "must hold model.safetensors, model.safetensors.index.json or a checkpoint of dtrain, got an empty folder",
    ),
    "pickle": (lambda path: with_pickle(path, "pytorch_model.bin"), "pytorch_model.bin may be a pickle, which can run code"),
    "pickle itself": (lambda path: with_pickle(path, "w.pt") / "w.pt", "w.pt. w.pt may be a pickle"),
    "other file": (lambda path: with_pickle(path, "w.pt") / "config.json", "path must be a .safetensors file"),
    "unfinished": (unfinished, "has no manifest.json, because its save was not completed"),
}


@pytest.mark.parametrize(("make", "message"), NOTHING_TO_LOAD.values(), ids=NOTHING_TO_LOAD)
def test_a_source_without_weights_is_refused(tmp_path, make, message):
    with pytest.raises(CheckpointError) as caught:
        load_weights_(net(), make(tmp_path / "x"))
    assert str(caught.value).startswith("load_weights_: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def one(**changes: Any) -> bytes:
    return safetensors_bytes({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}, bytes(8))


PAIR = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
MALFORMED = {
    "empty": (b"", "model.safetensors: must be a safetensors file, got 0 bytes"),
    "long header": ((10**9).to_bytes(8, "little") + b"{}", r"header must fit into the file of 10 bytes, got 1000000000 bytes"),
    "cut in the header": (one()[:40], "The file is truncated or not a safetensors file"),
    "cut in the data": (one()[:-1], r"header must describe \d+ bytes, got \d+. The file is truncated or was changed"),
    "more data": (one() + b"x", r"header must describe \d+ bytes, got \d+. The file is truncated or was changed"),
    "no JSON": (safetensors_bytes(b"{]"), "model.safetensors: not valid JSON"),
    "no text": (safetensors_bytes(b"\xff\xfe"), "model.safetensors: not valid JSON"),
    "list": (safetensors_bytes([]), "model.safetensors: header: must be an object, got list"),
    "twice": (safetensors_bytes(b'{"a":{},"a":{}}'), "duplicate key 'a'"),
    "unknown dtype": (one(dtype="F5"), "model.safetensors: w: dtype must be one of BOOL, U8"),
    "field": (one(more=1), r"model.safetensors: w: Object contains unknown field `more`"),
    "shape": (one(shape=[3]), r"w: data_offsets must span 12 bytes of F32 \[3\], got \[0, 8\]"),
    "negative shape": (one(shape=[-2]), r"w: shape\[0\]: Expected `int` >= 0"),
    "offsets": (one(data_offsets=[0, 8, 9]), r"w: data_offsets: Expected `array` of length 2, got 3"),
    "offset past the end": (one(data_offsets=[8, 16]), "w: must begin at byte"),
    "overlap": (safetensors_bytes({"a": PAIR, "b": {**PAIR, "data_offsets": [2, 6]}}, bytes(6)), "b: must begin at byte"),
    "hole": (safetensors_bytes({"a": PAIR, "b": {**PAIR, "data_offsets": [6, 10]}}, bytes(10)), "b: must begin at byte"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["C64", "F4", "F6_E2M3"])
def test_unsupported_dtype_is_not_reported_as_corruption(tmp_path, dtype):
    (tmp_path / "model.safetensors").write_bytes(one(dtype=dtype))
    with pytest.raises(CheckpointError, match=f"w: dtrain does not support dtype {dtype}") as caught:
        load_weights_(net(), tmp_path)
    assert not isinstance(caught.value, CorruptCheckpointError)


@pytest.mark.parametrize(("content", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_refused(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        load_weights_(net(), tmp_path)
    assert str(caught.value).startswith(f"load_weights_: {tmp_path}: model.safetensors: ")
    assert "\n" not in str(caught.value)


ONE = "model-00001-of-00002.safetensors"
BAD_INDEX = {
    "no JSON": ("{", "not valid JSON"),
    "list": ("[]", "must be an object with a weight_map, got list"),
    "no map": ('{"metadata": {}}', "must be an object with a weight_map, got dict"),
    "empty map": ('{"weight_map": {}}', "must be an object with a weight_map"),
    "outside": ('{"weight_map": {"w": "../model.safetensors"}}', "weight_map: w: must be the name of a .safetensors file in"),
    "absolute": ('{"weight_map": {"w": "/etc/x.safetensors"}}', "got str '/etc/x.safetensors'"),
    "no text": ('{"weight_map": {"w": 3}}', "got int 3"),
    "pickle": ('{"weight_map": {"w": "pytorch_model.bin"}}', "must be the name of a .safetensors file"),
    "missing file": ('{"weight_map": {"w": "x.safetensors"}}', "x.safetensors: file of model.safetensors.index.json is"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD_INDEX.values(), ids=BAD_INDEX)
def test_a_malformed_index_is_refused(tmp_path, text, message):
    write_folder(tmp_path / "model", stored(), files=2)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "model" / INDEX).write_text(text)
    with pytest.raises(CorruptCheckpointError) as caught:
        load_weights_(net(), tmp_path / "model")
    assert message in str(caught.value)


@pytest.mark.parametrize(("change", "what"), [("add", "has"), ("drop", "lacks")])
def test_index_inconsistent_with_files_is_refused(tmp_path, change, what):
    write_folder(tmp_path, stored(), files=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["more"] = ONE
    if change == "add":
        del index["weight_map"]["more"], index["weight_map"]["seen"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    name = "seen" if change == "add" else "more"
    message = rf"{ONE}: must have the tensors of {INDEX}, but {what} '{name}' \(1 such tensors\)"
    with pytest.raises(CorruptCheckpointError, match=message):
        load_weights_(net(), tmp_path)


def test_corrupt_step_is_refused_before_model_changes(saved, tmp_path):
    """The damage is in the file that is read last."""
    path = tmp_path / "step-00000004"
    shutil.copytree(saved[2, "full_shard"][0], path)
    flip_bits(path / "rank-00001.safetensors", -1)
    model = Model()
    before = values(model)
    with pytest.raises(CorruptCheckpointError, match=r"load_weights_: .*: rank-00001.safetensors: bytes from 0 on do"):
        load_weights_(model, tmp_path)
    assert values(model) == before


def test_unsupported_format_version_is_refused(saved, tmp_path):
    path = tmp_path / "step-00000004"
    shutil.copytree(saved[2, "full_shard"][0], path)
    write_of_another_version(path)
    message = rf"load_weights_: {path}: manifest.json: format version must be 4, got 9. Use the dtrain version that wrote"
    with pytest.raises(CheckpointError, match=message):
        load_weights_(Model(), path)


def test_file_truncated_during_read_is_reported(tmp_path, monkeypatch):
    path = write_folder(tmp_path, stored()) / "model.safetensors"
    original = storage.FileReader.read_into

    def shrinking(self: storage.FileReader, begin: int, out: memoryview) -> int:
        if begin > 8:
            os.truncate(path, path.stat().st_size - 1)
        return original(self, begin, out)

    monkeypatch.setattr(storage.FileReader, "read_into", shrinking)
    with pytest.raises(CorruptCheckpointError, match=r"model.safetensors: must have at least \d+ bytes, ends at byte \d+"):
        load_weights_(net(), tmp_path)


def load_on_ranks(sources: list[str], strategy: str) -> list:
    """The values after each load, and how many bytes of tensors this rank has read."""
    results = []
    for source in sources:
        model = laid_out(net(), strategy)
        with eval_mode(model):
            model(torch.ones(1, 5))
        model(torch.ones(1, 5))  # leaves units gathered
        bytes_read = []
        original = storage.FileReader.read_into

        def counting(self, begin, out, original=original, bytes_read=bytes_read):
            bytes_read.append(len(out))
            return original(self, begin, out)

        storage.FileReader.read_into = counting
        try:
            load_weights_(model, source)
        finally:
            storage.FileReader.read_into = original
        results.append([values(model), sum(bytes_read), sum(to_local(p).nbytes for p in model.parameters())])
    return results


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard", "replicate"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_rank_reads_its_own_shards(tmp_path, ranks, world, strategy):
    folder = write_folder(tmp_path / "hf", stored(), files=2)
    headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in folder.glob("*.safetensors"))
    index = (folder / INDEX).stat().st_size
    step = save_step(tmp_path / "ours")
    for foreign, ours in ranks(world).run(load_on_ranks, [str(folder), str(step)], strategy):
        loaded, bytes_read, own_bytes = foreign
        assert loaded == expected()
        assert bytes_read == headers + index + own_bytes + 8, "headers, this rank's parameters, and the buffer"
        assert ours[0] == expected()


def fail_on_one_rank(folder: str, what: str) -> list:
    model = laid_out(net(), "full_shard")
    before = values(model)
    first = get_dist_info().rank == 0
    options: dict[str, Any] = {"operation": None if first else 4, "kind": "preadv"} if what == "disk" else {}
    rename = {"rename": {"seen": None, "first.bias": None} if first else {"seen": None, "last.bias": None}, "ignore": ["**"]}
    failed = "nothing"
    with watching(**options) as watched:
        try:
            load_weights_(model, folder, **(rename if what == "rename" else {}))
        except DtrainError as error:
            failed = f"{type(error).__name__}: {error}"
    return [failed, watched.fired, values(model) == before]


def test_failure_on_one_rank_raises_on_all_without_changes(tmp_path, ranks):
    first, second = ranks(2).run(fail_on_one_rank, str(write_folder(tmp_path, stored(), files=2)), "disk")
    assert first[0].startswith("PeerError: load_weights_: rank 1 failed (1 of 2 ranks did): CheckpointError: load_weights_: ")
    assert second[0].startswith("CheckpointError: load_weights_: [Errno 28]")
    assert (first[1:], second[1:]) == ([False, True], [True, True])


def test_unequal_renames_across_ranks_are_refused(tmp_path, ranks):
    for failed, _, unchanged in ranks(2).run(fail_on_one_rank, str(write_folder(tmp_path, stored())), "rename"):
        assert failed.startswith("CheckpointError: load_weights_: rank 1 and rank 0 see different files in")
        assert unchanged


def test_tensors_in_memory_are_refused_with_a_way_to_load_them():
    net = Net()
    with pytest.raises(
        ConfigError, match=r"got tensors in memory \(OrderedDict\)\. Call model\.load_state_dict\(tensors\) before"
    ):
        load_weights_(net, net.state_dict())
