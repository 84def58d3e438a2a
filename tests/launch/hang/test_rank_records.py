"""Location of the main thread, read from faulthandler's text."""

from __future__ import annotations

import faulthandler
import threading

import pytest

from dtrain.launch.rank_records import find_user_frame, parse_main_thread

LIBRARIES = ("/usr/lib/python3.11", "<")
WAITING = """\
Thread 0x00007f11 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/prefetch.py", line 8 in fill

Current thread 0x00007f22 (most recent call first):
  File "/venv/lib/site-packages/torch/c10d.py", line 42 in all_gather
  File "/home/me/my loop.py", line 30 in train
  File "/home/me/my loop.py", line 44 in <module>
"""
CUT = WAITING.replace("Thread 0x00007f11", "Current thread 0x00007f11").replace("Current thread 0x00007f22", "...\nThread 0x01")


@pytest.mark.parametrize(
    ("stacks", "expected"),
    [
        pytest.param("", None, id="none"),
        pytest.param(WAITING, "/home/me/my loop.py:30 in train", id="main-thread-comes-last"),
        pytest.param(WAITING.replace("/home/me/my loop.py", "/usr/lib/python3.11/runpy.py"),
                     "/venv/lib/site-packages/torch/c10d.py:42 in all_gather", id="no-frame-of-the-user"),
        pytest.param(WAITING.replace("  File", "  X"), None, id="no-python-frame"),
        pytest.param(CUT, "/home/me/prefetch.py:8 in fill", id="too-many-threads"),
    ],
)  # fmt: skip
def test_find_user_frame_returns_innermost_user_frame(stacks, expected):
    assert find_user_frame(stacks, libraries=LIBRARIES) == expected


def test_main_thread_is_found_in_faulthandler_output(tmp_path):
    """The order of threads is faulthandler's own: a new Python may write another order."""
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (started.set(), end.wait()))
    thread.start()
    started.wait()
    with open(tmp_path / "stacks", "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    end.set()
    thread.join()
    text = (tmp_path / "stacks").read_text()
    assert text.count("hread 0x") >= 2
    assert parse_main_thread(text)[0][2] == "test_main_thread_is_found_in_faulthandler_output"
    assert str(find_user_frame(text)).startswith(__file__)
