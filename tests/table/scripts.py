"""The programs of the truth table. None needs torch; the first argument says which rank it is about, the second how
many there are.

``tell(name)`` leaves a file with this process's number; "event" is left right before the row's event, so that the time to
the launcher's end can be measured.
"""

from __future__ import annotations

import textwrap

PRELUDE = """
import os, signal, sys, time
rank, world, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["FOLDER"]
culprit = rank == int(sys.argv[1])

def tell(name):
    path = f"{folder}/{name}-{rank}"
    with open(path + ".partial", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".partial", path)

def wait(name, ranks):
    while not all(os.path.exists(f"{folder}/{name}-{r}") for r in ranks):
        time.sleep(0.01)

def meet():
    tell("up")
    wait("up", range(world))

"""


def _script(text: str) -> str:
    return PRELUDE + textwrap.dedent(text)


DONE = "import sys\nassert len(sys.argv) == 3\n"

STAYS = _script("meet()\ntime.sleep(600)\n")


def exits(code: int) -> str:
    """One rank exits with ``code``, the others stay."""
    return _script(f"meet()\nif culprit:\n    tell('event')\n    sys.exit({code})\ntime.sleep(600)\n")


RAISES = _script(
    """
    def train():
        raise ValueError("loss is nan")

    meet()
    if culprit:
        tell("event")
        train()
    time.sleep(600)
    """
)


def killed(number: str) -> str:
    """One rank is ended by a signal, the others stay."""
    return _script(f"meet()\nif culprit:\n    tell('event')\n    os.kill(os.getpid(), signal.{number})\ntime.sleep(600)\n")


SEGFAULT = _script("meet()\nif culprit:\n    import ctypes\n    tell('event')\n    ctypes.string_at(0)\ntime.sleep(600)\n")
ABORTS = _script("meet()\nif culprit:\n    tell('event')\n    os.abort()\ntime.sleep(600)\n")
LEAVES = _script("meet()\nif culprit:\n    tell('event')\n    os._exit(9)\ntime.sleep(600)\n")

SLOW_TO_EXIT = _script(
    """
    import atexit
    meet()
    if culprit:
        atexit.register(time.sleep, 600)
        atexit.register(tell, "gone")
        tell("event")
        raise ValueError("the cause")
    wait("gone", [int(sys.argv[1])])
    raise ConnectionError("a consequence")
    """
)

KILLED_FIRST = _script(
    """
    import socket
    path = folder + "/meeting"
    if culprit:
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        meet()
        peers = [server.accept()[0].recv(1) for _ in range(world - 1)]
        tell("event")
        os.kill(os.getpid(), signal.SIGKILL)
    meet()
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    client.send(b"x")
    client.recv(1)
    raise ConnectionError("lost my peer")
    """
)

EARLY_AND_FINE = _script("meet()\nif not culprit:\n    time.sleep(1)\n    tell('event')\n")
EARLY_AND_MISSED = _script(
    """
    meet()
    if not culprit:
        with open(f"{folder}/up-{sys.argv[1]}") as file:
            early = f"/proc/{file.read()}"
        while os.path.exists(early):  # until the launcher has seen its end
            time.sleep(0.01)
        tell("event")
        raise TimeoutError("rank did not come to the collective")
    """
)


def hangs(how: str) -> str:
    """Ranks report progress as ``init_dist`` does, until one stops and the others wait for it."""
    what = {"stop": "os.kill(os.getpid(), signal.SIGSTOP)", "hold": "re.match('(a|a)+b', 'a' * 99)"}[how]
    return _script(
        f"""
        import re
        if os.environ["LAUNCHER"] == "dtrain":
            from dtrain.launch import heartbeats
            heartbeats.report(heartbeats.ProgressKind.OPENED, os.getpid())
            heartbeats.heartbeat("step")
        meet()
        if culprit:
            tell("event")
            {what}
        time.sleep(600)
        """
    )


STUBBORN = _script(
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: tell("asked"))
    meet()
    while True:
        time.sleep(600)
    """
)

_CHILD = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork():
    os._exit(0)
with open("{folder}/child-{rank}", "w") as file:
    file.write(str(os.getpid()))
time.sleep(600)
"""


def hidden_children(*, fails: bool | None) -> str:
    """Each rank has a child that left its session and ignores signals. Then one fails, all end (False), or all stay (None)."""
    fail = "if culprit:\n    tell('event')\n    sys.exit(5)\n"
    end = {
        True: fail + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n",
        False: "tell('event')\n",
        None: "time.sleep(600)\n",
    }[fails]
    start = f"""
import subprocess
code = {_CHILD!r}.replace("{{folder}}", folder).replace("{{rank}}", str(rank))
subprocess.Popen([sys.executable, "-c", code], start_new_session=True).wait()
wait("child", [rank])
meet()
"""
    return PRELUDE + start + end


OTHER_PORT = _script("assert os.environ['MASTER_PORT'] != os.environ['TAKEN'], 'the port is taken'\n")

ENVIRONMENT = _script(
    """
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    assert 0 <= rank < world == int(sys.argv[2]), (rank, world)
    assert {name: os.environ[name] for name in own} == {name: str(value) for name, value in own.items()}
    assert os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"), os.environ["MASTER_ADDR"]
    assert 1023 < int(os.environ["MASTER_PORT"]) < 65536
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if os.environ["LAUNCHER"] == "dtrain":
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0"), os.environ["GLOO_SOCKET_IFNAME"]
        assert os.path.isdir(os.environ["DTRAIN_RUN_DIR"] + "/failures")
        assert "DTRAIN_HEARTBEAT_FD" not in os.environ  # the rank has taken it
    """
)

PRINTS = PRELUDE + "for k in range(500):\n    print('x' * 1000)\ntell('done')\n"
