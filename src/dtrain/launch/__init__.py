"""Starting the ranks of a job and ending them together. Imports no torch.

::

    dtrain launch  (front)        parses, forwards signals, returns the exit code
    └── supervisor                relays output, decides what failed, ends what is left
        ├── rank 0                python .../launch/rank.py: the user's script
        │   └── ...               whatever the script starts
        └── rank 1

Front and supervisor are both child subreapers: a process of the job whose parent dies becomes a child of one of them,
so nothing can hide, and each ends everything when the other one is killed.
"""
