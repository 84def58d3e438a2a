"""The launchers of several nodes: they meet before any rank starts, and tell each other how it ends. Imports no torch.

::

    node 0                                        node 1
    supervisor                                    supervisor
    └── agent ── hub, at (master addr, port) ──── └── agent

Each supervisor has an *agent*, a process that talks to the other nodes, so that a name server that does not answer or a peer
that does not read never holds up the supervisor. The agent of node 0 is also the *hub*: all agents report to it, and it
decides. What travels is JSON, one bounded line a message; nothing that is received is ever executed, and a peer that sends
anything else is dropped.
"""
