"""Checkpoints made to do harm: programs in place of files, names that leave the folder, sizes and depths that exhaust.

Each is looked at by every function that reads checkpoints, in a process with an audit hook: nothing may be executed, nothing
outside the root opened, and it is refused within a second and 100 MB.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from checkpoint.faults.kills import scratch
from checkpoint.faults.nursery import apart
from checkpoint.faults.outcome import Outcome, plain
from checkpoint.faults.payloads import payloads
from checkpoint.faults.samples import sample, states_of, write
from checkpoint.stored import compact, json_of, sign

KIND = "1 rank"
BATCH = 50  # cases that share a process
WITHIN_S = 1.0  # of the processor: wall time depends on other users of the machine
WITHIN_BYTES = 100e6

Attack = Callable[[Path], None]
"""Does it to the folder of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attack.

    Args:
        fault: the kind, for a table.
        name: which of its kind.
        attack: changes a sound step.
        believed: whether it may be loaded: numbers that the attacker has chosen and signed are numbers.
        unread: only deep verification has to refuse it: a load does not read a file that it does not need.
        named: only a load has to refuse it: the writer chooses the names of tensors.
        weights: whether it is a folder of plain safetensors files, which ``load_weights_`` reads.
    """

    fault: str
    name: str
    attack: Attack
    believed: bool = False
    unread: bool = False
    named: bool = False
    weights: bool = False


# --- attacks -------------------------------------------------------------------------------------------------------


def _with_rank_index(change: Callable[[dict[str, Any]], object]) -> Attack:
    """An index of a rank that is changed and signed."""

    def attack(step: Path) -> None:
        body = json_of(step, "rank-00000.json")
        change(body)
        sign(step, ranks={0: compact(body)})

    return attack


def _with_index(change: Callable[[dict[str, Any]], object]) -> Attack:
    """An index of the run that is changed and signed."""

    def attack(step: Path) -> None:
        body = json_of(step, "index.json")
        change(body)
        sign(step, index=compact(body))

    return attack


def _with_text(name: str, old: str, new: Callable[[], str]) -> Attack:
    """An index whose text is changed, where no value would come out as that text, and signed."""

    def attack(step: Path) -> None:
        text = (step / name).read_text()
        assert old in text, f"{name} has no {old}"
        data = text.replace(old, new(), 1).encode("utf-8", "surrogatepass")
        sign(step, index=data) if name == "index.json" else sign(step, ranks={0: data})

    return attack


def _with_manifest(change: Callable[[dict[str, Any]], object]) -> Attack:
    return lambda step: sign(step, change=change)


def _with_data(content: bytes) -> Attack:
    """Replace a data file by another content of the same length, with digests that are right."""

    def attack(step: Path) -> None:
        import xxhash

        path = step / "rank-00000.safetensors"
        size = path.stat().st_size
        data = content[:size].ljust(size, b"\0")
        path.write_bytes(data)
        body = json_of(step, "rank-00000.json")
        body["blocks"] = [{"ends": [size], "digests": xxhash.xxh3_128_hexdigest(data)}]
        sign(step, ranks={0: compact(body)})

    return attack


def _with_file(name: str, content: bytes) -> Attack:
    return lambda step: (step / name).write_bytes(content) and None


def _sparse(name: str, begin: bytes, size: int, *, signed: bool = False) -> Attack:
    """A file that claims to be very large, and is, though not on the disk."""

    def attack(step: Path) -> None:
        with open(step / name, "wb") as file:
            file.write(begin)
            file.truncate(size)
        if signed and name == "index.json":
            sign(step, change=lambda body: body.update(index_bytes=size))
        elif signed:
            body = json_of(step, "index.json")
            body["files"][0][0] = size
            sign(step, index=compact(body))

    return attack


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = to

    return change


def _weights(header: bytes, *, length: int | None = None, size: int | None = None) -> Attack:
    """A folder with a plain safetensors file instead."""

    def attack(step: Path) -> None:
        for path in step.iterdir():
            path.unlink()
        with open(step / "model.safetensors", "wb") as file:
            file.write((len(header) if length is None else length).to_bytes(8, "little") + header)
            if size is not None:
                file.truncate(size)

    return attack


# --- the cases -----------------------------------------------------------------------------------------------------

_NAMES = ("manifest.json", "index.json", "rank-00000.json", "rank-00000.safetensors", "../run.lock", "../latest")


@cache
def cases() -> tuple[Case, ...]:
    """All of them; made once per process. To be asked of a nursery."""
    return (*_programs(), *_names(), *_numbers(), *_texts(), *_large(), *_tags(), *_foreign())


def _programs() -> Iterator[Case]:
    for what, content in payloads("touch /tmp/payload-was-run").items():
        for name in _NAMES:
            beside = name.startswith("..")
            fault = f"a program as {name.removeprefix('../')}"
            yield Case(fault=fault, name=what, attack=_with_file(name, content), believed=beside)
        yield Case(fault="a program as an index, signed", name=what, attack=lambda step, index=content: sign(step, index=index))
        attack = _as_rank_index(content)
        yield Case(fault="a program as an index, signed", name=f"{what} of a rank", attack=attack)
        yield Case(fault="a program as data, signed", name=what, attack=_with_data(content), believed=True)
        yield Case(fault="a program as model.safetensors", name=what, attack=_program_as_weights(content), weights=True)


def _as_rank_index(content: bytes) -> Attack:
    return lambda step: sign(step, ranks={0: content})


def _program_as_weights(content: bytes) -> Attack:
    def attack(step: Path) -> None:
        for path in step.iterdir():
            path.unlink()
        (step / "model.safetensors").write_bytes(content)

    return attack


TRAVERSALS = [
    "../rank-00000.json", "../../rank-00000.json", "../step-00000001/rank-00000.json", "./rank-00000.json",
    "rank-00000.json/../../step-00000001/rank-00000.json", "/etc/passwd", "//etc/passwd", "/../etc/passwd",
    "../../../../../../../../etc/passwd", "../" * 100 + "etc/passwd", "/proc/self/environ", "/proc/self/mem", "/dev/zero",
    "/dev/stdin", "/dev/fd/0", "~/.ssh/id_rsa", "~root/.bashrc", "$HOME/.netrc",
    "%2e%2e%2fetc%2fpasswd", "..%2f..%2fetc/passwd",
    "..%252f..%252fetc%252fpasswd", "..\\..\\etc\\passwd", "C:\\Windows\\win.ini", "\\\\host\\share\\file",
    "\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}/etc/passwd", "..\N{DIVISION SLASH}etc/passwd", "..\0/etc/passwd",
    "rank-00000.json\0.safetensors", "rank-00000.json\n", " rank-00000.json", "rank-00000.json ", "", ".", "..", "/",
    "file:///etc/passwd", "http://127.0.0.1:9/x", "s3://bucket/key", "step-00000001/../../../x", "-rank-00000.json",
    "rank-00000.json:stream", "con", "rank-00001.json", "manifest.json",
]  # fmt: skip


def _names() -> Iterator[Case]:
    for name in TRAVERSALS:
        for field, path in {"a digest's": ("index_sha256",), "a run's": ("run_id",)}.items():
            yield Case(
                fault=f"{field} name that leaves the folder", name=repr(name), attack=_with_manifest(_set(*path, to=name))
            )
        attack = _with_manifest(_set("states", to=[name]))
        yield Case(fault="a state's name that leaves the folder", name=repr(name), attack=attack)
    for file, change in _INDEXES.items():
        leaves = _leaves(str, file)
        for number, name in enumerate(TRAVERSALS * 2):
            path = leaves[number % len(leaves)]
            attack = change(_set(*path, to=name))
            # An inline text without letters is base64 of nothing, and then lacks bytes.
            yield Case(fault="a text of an index that leaves the folder", name=f"{_shown(path)} = {name!r}", attack=attack)


_INDEXES = {"index.json": _with_index, "rank-00000.json": _with_rank_index}


def _leaves(kind: type, file: str) -> list[tuple[Any, ...]]:
    """Return the paths to values of a type in an index of a sample, outside its plain data; of each list the first item."""
    body = json.loads(sample(KIND)[f"step-00000002/{file}"])
    paths = []
    left: list[tuple[tuple[Any, ...], Any]] = [((key,), body[key]) for key in body if key not in ("values", "shared")]
    while left:
        path, value = left.pop(0)
        if type(value) is dict:
            left += [((*path, key), item) for key, item in value.items()]
        elif type(value) is list:
            rows = all(type(item) in (str, int) for item in value)  # a row has a meaning for each place, a list one for all
            left += [((*path, index), item) for index, item in enumerate(value[: None if rows and len(value) < 4 else 1])]
        elif type(value) is kind:
            paths.append(path)
    return paths


def _shown(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))


_HUGE = {"2**60": 2**60, "2**63": 2**63, "2**64 - 1": 2**64 - 1, "10**400": 10**400, "-1": -1, "-2**63": -(2**63)}
_NOT_WHOLE = {"true": True, "1.0": 1.0, "null": None, "text": "1", "a list": [1], "an object": {}}


def _numbers() -> Iterator[Case]:
    manifest = {
        "version": ("version",), "step": ("step",), "serial": ("serial",), "index_bytes": ("index_bytes",),
        "bytes": ("bytes",), "world_size": ("world_size",), "layout.shape": ("layout", "shape"),
    }  # fmt: skip
    for shown, value in {**_HUGE, **_NOT_WHOLE}.items():
        for field, path in manifest.items():
            # A serial is any number, and a mesh any shape.
            believed = (field, shown) == ("layout.shape", "a list") or (
                field == "serial" and shown in ("2**60", "2**63", "2**64 - 1", "10**400")
            )
            attack = _with_manifest(_set(*path, to=value))
            yield Case(fault="a number in the manifest", name=f"{field} = {shown}", attack=attack, believed=believed)
        for file, with_index in _INDEXES.items():
            for path in _leaves(int, file):
                attack = with_index(_set(*path, to=value))
                yield Case(fault="a number in an index", name=f"{_shown(path)} = {shown}", attack=attack)
    for file, with_index in _INDEXES.items():
        leaves = (*_leaves(int, file), *_leaves(str, file))
        for path in sorted({path[:-1] for path in leaves if type(path[-1]) is int}, key=_shown):
            attack = with_index(_set(*path, to=[1] * 100_000))
            yield Case(fault="a list of 100,000", name=_shown(path), attack=attack)


def _texts() -> Iterator[Case]:
    whole = {
        "nothing": b"", "a byte order mark": b"\xef\xbb\xbf{}", "UTF-16": "{}".encode("utf-16"),
        "not UTF-8": b'{"a": "\xff\xfe"}',
        "two values": b"{}{}", "a comment": b"{} // hello", "single quotes": b"{'a': 1}", "null": b"null", "a number": b"1",
        "5,000 digits": b"1" * 5000, "zeros": bytes(1000), "an overlong slash": b'{"a": "..\xc0\xaf"}',
    }  # fmt: skip
    for what, content in whole.items():
        yield Case(fault="text that is no manifest", name=what, attack=_with_file("manifest.json", content))
        yield Case(fault="text that is no index", name=what, attack=lambda step, index=content: sign(step, index=index))
        yield Case(fault="text that is no index", name=f"{what} of a rank", attack=_as_rank_index(content))
    tokens = ["NaN", "Infinity", "-Infinity", "nan", "1e999", "-1e999", "0x10", "01", "1_000", "1.", ".5", "+1", "9" * 5000]
    for token in tokens:
        text = _with_text("index.json", '"seed":0', lambda token=token: f'"seed":{token}')
        yield Case(fault="a token that is no JSON number", name=token[:20], attack=text)
    for file, with_index in _INDEXES.items():
        for field in json.loads(sample(KIND)[f"step-00000002/{file}"]):
            text = _with_text(file, f'"{field}":', lambda field=field: f'"{field}":0,"{field}":')
            yield Case(fault="a key given twice", name=f"{field} in {file}", attack=text)
            attack = _twice_in_manifest(field)
            yield Case(fault="a key given twice", name=f"{field} in the manifest", attack=attack)
            attack = with_index(lambda body, field=field: body.pop(field))
            yield Case(fault="a field too few", name=f"{field} in {file}", attack=attack)
        yield Case(fault="a field too many", name=file, attack=with_index(_set("more", to=1)))
    for what, text in {"a lone surrogate": "\\ud800", "a NUL": "\\u0000", "a raw surrogate": "\ud800"}.items():
        attack = _with_text("index.json", '"first.weight"', lambda text=text: f'"{text}"')
        yield Case(fault="a name that is no text", name=what, attack=attack, named=True)
    yield Case(fault="a field too many", name="a manifest", attack=_with_manifest(_set("more", to=1)))


def _twice_in_manifest(field: str) -> Attack:
    def attack(step: Path) -> None:
        text = (step / "manifest.json").read_text()
        (step / "manifest.json").write_text(text.replace("{", f'{{"{field}": 0, "{field}": 0,', 1))

    return attack


def _large() -> Iterator[Case]:
    for depth in (100, 300, 600, 900, 990, 1500, 10_000, 100_000):
        for kind, (opening, closing) in {"lists": ("[", "]"), "objects": ('{"a":', "}")}.items():
            inner = "0" if kind == "objects" else ""
            nested = opening * depth + inner + closing * depth
            name = f"{depth:,} {kind}"
            yield Case(
                fault="nested deeply", name=f"{name} as the manifest", attack=_with_file("manifest.json", nested.encode())
            )
            places = {'"values":': "rank-00000.json", '"blocks":': "rank-00000.json", '"shared":': "index.json"}
            for where, file in {**places, '"kinds":': "index.json"}.items():
                attack = _with_text(file, where, lambda where=where, nested=nested: f'{where}{nested},"_":')
                yield Case(fault="nested deeply", name=f"{name} in {where}", attack=attack)
            attack = _with_text("index.json", '"seed":0', lambda nested=nested: f'"seed":{nested}')
            # Plain data that is nested like this is odd, not harmful, as long as it is not too deep to be read.
            yield Case(fault="nested deeply", name=f"{name} as a value", attack=attack)
    for size in (2**30, 2**40):
        begin = b'{"format": "'
        yield Case(fault=f"a string of {size:,} bytes", name="manifest", attack=_sparse("manifest.json", begin, size))
        for file in _INDEXES:
            for signed in (False, True):
                attack = _sparse(file, begin, size, signed=signed)
                yield Case(fault=f"a string of {size:,} bytes", name=f"{file}{', signed' * signed}", attack=attack)


def _tags() -> Iterator[Case]:
    for what, value in {
        "an unknown tag": {"$": "object", "class": "os.system"},
        "a tag that is no text": {"$": ["tensor"]},
        "a tensor without fields": "$tensor",
        "a tensor of an unknown dtype": "$tensor O [1]",
        "a tensor of 2**60 bytes": f"$tensor U8 [{2**60}]",
        "a tensor of 2**36 bytes": f"$tensor U8 [{2**36}]",
        "a tensor that is nowhere": "$tensor U8 [3]",
        "a tensor of -1 rows": "$tensor U8 [-1]",
    }.items():
        for section in ("params", "optimizer", "transforms", "extra"):
            attack = _with_index(lambda body, section=section, value=value: body["shared"][section].update({"x": value}))
            unread = section == "extra" and what.startswith("a tensor") and "fields" not in what and "unknown" not in what
            yield Case(fault="a value made up", name=f"{what} in {section}", attack=attack, unread=unread)
        attack = _with_rank_index(_set("values", "x", to=value))
        yield Case(fault="a value made up", name=f"{what} among a rank's", attack=attack)


def _foreign() -> Iterator[Case]:
    entry = '{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [%s]}}'
    headers: dict[str, Attack] = {
        **{f"a header of 2**{n} bytes": _weights(b"{}", length=min(2**n, 2**64 - 1)) for n in (31, 40, 60, 63, 64)},
        "a header longer than the file": _weights(b"{}", length=99_000_000),
        "a header of 1 GB": _weights(b'{"a', length=2**30, size=2**30 + 8),
        "a header of 100,000 lists": _weights(b"[" * 100_000 + b"]" * 100_000),
        "a header with NaN": _weights((entry % ("NaN", "0, 4")).encode()),
        "a key given twice": _weights(b'{"a": 0, "a": 0}'),
        "a tensor of 2**60 rows": _weights((entry % (2**60, "0, 4")).encode()),
        "data beyond the end": _weights((entry % (1, f"{2**60}, {2**60 + 4}")).encode()),
        "data before the begin": _weights((entry % (1, "-4, 0")).encode()),
        "data backwards": _weights((entry % (1, "4, 0")).encode()),
    }
    for name, attack in headers.items():
        yield Case(fault="a header of a safetensors file", name=name, attack=attack, weights=True)
    for name in TRAVERSALS:
        attack = _index_of_weights(name)
        yield Case(fault="a weight map that leaves the folder", name=repr(name), attack=attack, weights=True)


def _index_of_weights(name: str) -> Attack:
    def attack(step: Path) -> None:
        for path in step.iterdir():
            path.unlink()
        index = {"metadata": {}, "weight_map": {"first.weight": name}}
        (step / "model.safetensors.index.json").write_text(json.dumps(index))

    return attack


# --- running them --------------------------------------------------------------------------------------------------

_RUNS = {
    "exec", "compile", "import", "marshal.loads", "pickle.find_class", "code.__new__", "function.__new__", "subprocess.Popen",
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn", "socket.connect",
    "ctypes.dlopen", "webbrowser.open", "shutil.unpack_archive", "urllib.Request",
}  # fmt: skip
_TOUCHES = {
    "open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink",
    "os.truncate",
}  # fmt: skip


class Hook:
    """Record executed code and files touched outside of a root. Once set it cannot be removed, only told to look away."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.root is None:
            return
        if event in _RUNS:
            self.seen.append(f"{event} {args!r}"[:200])
        elif event in _TOUCHES and not isinstance(args[0], int):
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith(self.root):
                self.seen.append(f"{event} {path}")


def count_draws() -> int:
    """Return the number of draws that hold all cases."""
    return -(-len(cases()) // BATCH)


def draw(seed: int, k: int) -> list[dict[str, Any]]:
    """Batch ``k`` of the cases; ``seed`` changes nothing. To be asked of a nursery."""
    chosen = cases()[k * BATCH : (k + 1) * BATCH]
    with scratch() as folder:
        both = sample(KIND)
        newest = {name: data for name, data in both.items() if name.startswith("step-00000002")}
        for number, case in enumerate(chosen):
            # An older step takes time to verify for every message, and is needed where a name may point at it.
            write(both if "leaves the folder" in case.fault else newest, Path(folder) / str(number))
        write(both, Path(folder) / "sound")
        return apart(_try_all, folder, k) if chosen else []


def _try_all(folder: str, k: int) -> list[dict[str, Any]]:
    hook, sound = Hook(), Path(folder) / "sound" / "step-00000002"
    for weights in (False, True):
        _look_at(sound, hook, weights=weights)  # makes late imports happen here
    (sound / "manifest.json").write_bytes(b"{}")
    for weights in (False, True):
        _look_at(sound, hook, weights=weights)  # and the allocations of refusals happen here
    return plain([
        _try(case, Path(folder) / str(number) / "step-00000002", hook)
        for number, case in enumerate(cases()[k * BATCH : (k + 1) * BATCH])
    ])  # fmt: skip


def _try(case: Case, step: Path, hook: Hook) -> Outcome:
    case.attack(step)
    believers, problems, seconds, nbytes = _look_at(step, hook, weights=case.weights)
    loads = {"load_sharded", "load_sharded of the root"}
    refused = case.believed or not believers - (loads if case.unread else {"verify"} if case.named else set())
    came = "read as plain numbers, nothing run" if case.believed else "refused"
    if not refused:
        problems.insert(0, f"was believed by {', '.join(sorted(believers))}")
    return Outcome(
        fault=case.fault,
        came="failed" if problems else came,
        wrong=f"{case.name}: {'; '.join(problems)}" if problems else "",
        numbers={"seconds until refused": seconds, "MB until refused": nbytes / 1e6},
    )


def _look_at(step: Path, hook: Hook, *, weights: bool) -> tuple[set[str], list[str], float, float]:
    """Read it with everything that reads checkpoints: the readers that accepted it, problems, the most seconds and bytes."""
    import dtrain as dt

    given = states_of(KIND, 7)

    def load(path: Path) -> None:
        nonlocal given
        dt.load_sharded(path, given, extra={"note": {}, "table": []})
        given = states_of(KIND, 7)

    readers: dict[str, Callable[[], object]] = {
        "verify": lambda: dt.checkpoint.verify(step),
        "load_sharded": lambda: load(step),
        "load_sharded of the root": lambda: load(step.parent),
        "list_steps": lambda: dt.checkpoint.list_steps(step.parent),
    }
    if weights:
        readers = {"load_weights_": lambda: dt.load_weights_(given.model, step)}
    believers, problems, longest, most = set(), [], 0.0, 0.0
    for name, read in readers.items():
        hook.seen.clear()
        before = _peak_from_here()
        hook.root, begun = os.path.realpath(step.parent), time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read()
            if name != "list_steps":  # list_steps leaves out a step that it does not trust
                believers.add(name)
        except (dt.errors.CheckpointError, dt.errors.ConfigError):
            pass
        except BaseException as error:  # noqa: BLE001 - any other way to end is a finding
            problems.append(f"{name} raised {type(error).__name__}: {str(error)[:200]}")
        longest = max(longest, time.process_time() - begun)
        hook.root = None
        most = max(most, _peak() - before)
        problems += [f"{name}: {event}" for event in hook.seen]
    if longest > WITHIN_S:
        problems.append(f"took {longest:.2f} s")
    if most > WITHIN_BYTES:
        problems.append(f"took {most / 1e6:.0f} MB")
    return believers, problems, longest, most


def _peak_from_here() -> float:
    """Forget the peak of resident memory so far. Returns the memory now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _peak()


def _peak() -> float:
    with open("/proc/self/status") as file:
        return next(float(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


__all__: Sequence[str] = ("TRAVERSALS", "Case", "Hook", "cases", "count_draws", "draw")


def how_many_payloads_run() -> int:
    """Unpickle the payloads that are pickle, in a fork, and count those that run their command. Call it in a nursery."""
    with scratch() as folder:
        return int(apart(_run_payloads, folder))


def _run_payloads(folder: str) -> int:
    import pickle
    from contextlib import suppress

    count = 0
    for number, (name, content) in enumerate(payloads(f"touch {folder}/mark").items()):
        if any(word in name for word in ("execv", "pty", "browser", "open", "timeit", "torch", "numpy", "Popen", "NEWOBJ")):
            continue  # these would end, outlive or outlast this process
        with suppress(Exception):
            pickle.loads(content)
        mark = Path(folder) / "mark"
        count += mark.exists()
        if mark.exists():
            mark.rename(Path(folder) / f"mark-{number}")
    return count


def what_the_hook_sees() -> list[str]:
    """Return the records of an opened file outside a root, and of a payload. To be asked of a nursery."""
    with scratch() as folder:
        return list(apart(_watch_payload, folder))


def _watch_payload(folder: str) -> list[str]:
    import pickle

    hook, inside, outside = Hook(), Path(folder) / "inside", Path(folder) / "outside"
    inside.mkdir()
    outside.touch()
    (inside / "file").touch()
    content = payloads("true")["REDUCE, protocol 2"]
    hook.root = os.path.realpath(inside)
    (inside / "file").read_bytes()
    outside.read_bytes()
    pickle.loads(content)
    exec("1")
    hook.root = None
    return [event for event in hook.seen if not event.startswith("compile")]
