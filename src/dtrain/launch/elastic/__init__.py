"""A job whose nodes may come and go, on torch's own engine: ``torch.distributed.elastic``. Imports no torch.

::

    supervisor
    └── program.py      torch's agent: meets the other nodes' agents, starts the ranks, starts them again when nodes change
        ├── rank        worker.py, then rank.py in its place
        └── ...
"""
