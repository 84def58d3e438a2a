"""Start one rank under torch's elastic agent: set the path of the rank's failure record, then execute the rank's program.

torch's agent assigns new ranks whenever nodes join or leave, so the rank is known only in this process.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # Modules in this file's folder must not shadow modules of the program.
    del sys.path[0]

import json
import os
from pathlib import Path

from dtrain import launch_protocol
from dtrain.launch.launch_plan import Target, build_rank_command


def main() -> None:
    kind, name, args = json.loads(sys.argv[1])
    record = launch_protocol.failure_file(Path(os.environ[launch_protocol.RUN_DIR]), int(os.environ[launch_protocol.RANK]))
    # An earlier attempt of this rank may have written the file.
    record.unlink(missing_ok=True)
    os.environ[launch_protocol.FAILURE_FILE] = os.fspath(record)
    command = build_rank_command(Target(kind=kind, name=name, args=tuple(args)))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
