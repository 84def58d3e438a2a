"""Serve the ranks' store: ``python store_main.py FD ADDRESS PORT``, or a fork of the fork server. Needs torch.

The process inherits a listening socket, on loopback if all ranks are on this machine. So no other program can take the port
between its choice and its use, and nothing else is bound. Every attempt of a job has its own store: restarted ranks must not
read the addresses of ranks that exited.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

if __name__ == "__main__" and not sys.flags.safe_path:
    # Modules in this file's folder must not shadow modules of the program.
    del sys.path[0]


def serve_store(listener: int, address: str, port: int) -> NoReturn:
    """Serve torch's store on the descriptor ``listener``, bound to ``address`` and ``port``, until the process is killed."""
    import torch.distributed as dist

    store = dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener)
    while store is not None:
        signal.pause()
    raise AssertionError("unreachable: the store is kept while the process lives")


if __name__ == "__main__":
    serve_store(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
