"""A port on which forked ranks will meet, kept for them from before they start."""

from __future__ import annotations

import socket

from dtrain.launch.plan import LOOPBACK_ADDRESS


def hold_port() -> socket.socket:
    """A free port on loopback, kept for the ranks for as long as the returned socket is open.

    The socket is bound but does not listen. Rank 0 may bind the same port, because both sides set ``SO_REUSEADDR`` (torch
    does), while the kernel gives it to nobody who asks for any free port. So there is no moment in which it can be lost,
    as there is between choosing a port, closing it and hoping. No rank inherits the socket.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOOPBACK_ADDRESS, 0))
    return holder
