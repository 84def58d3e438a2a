"""What torch's agent starts as a rank: names the file for the rank's failure record, and becomes the rank.

Only here is the rank known: torch's agent numbers the ranks anew whenever nodes come or go.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder: its modules must not shadow anybody's

import json
import os
from pathlib import Path

from dtrain import launch_protocol
from dtrain.launch.launch_plan import Target, build_rank_command


def main() -> None:
    kind, name, args = json.loads(sys.argv[1])
    record = launch_protocol.failure_file(Path(os.environ[launch_protocol.RUN_DIR]), int(os.environ[launch_protocol.RANK]))
    record.unlink(missing_ok=True)  # an earlier rank of this number left it
    os.environ[launch_protocol.FAILURE_FILE] = os.fspath(record)
    command = build_rank_command(Target(kind=kind, name=name, args=tuple(args)))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
