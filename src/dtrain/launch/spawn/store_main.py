"""The process that serves the ranks' store: ``python store.py FD ADDRESS PORT``, or a fork of the preloaded one. Needs torch.

It is given a socket that listens already, on loopback where all ranks are here. So the port cannot be lost to another program
between choosing and using it, and nothing listens beyond what was bound. Every attempt of a job has a store of its own:
ranks that are started again would read the addresses of those that died.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder


def serve_store(listener: int, address: str, port: int) -> NoReturn:
    """Serve torch's store on the descriptor ``listener``, bound to ``address`` and ``port``, until this process is killed."""
    import torch.distributed as dist

    store = dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener)
    while store is not None:
        signal.pause()
    raise AssertionError("unreachable: the store is kept while the process lives")


if __name__ == "__main__":
    serve_store(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
