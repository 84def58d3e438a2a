"""A script or module that cannot run is refused without running any of it."""

from __future__ import annotations

import os
import sys
import zipfile

import pytest

from dtrain.errors import ConfigError
from dtrain.launch.entrypoint import check_module, check_script


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"def f(:\n", r"launch: a\.py:1 is not valid Python: "),
        (b"x = 1\n  y = 2\n", r"a\.py:2 is not valid Python: "),
        (b"# \xff\n", r"is not valid Python: invalid or missing encoding"),
        (b"#\n#\n#\n# \xff\n", r"'a.py' is not utf-8 text \(byte 8\)\. Save the script as UTF-8"),
        (b"x = 1\0\n", r"is not valid Python: .*null bytes"),
    ],
)
def test_check_script_refuses_non_python_file(here, content, message):
    (here / "a.py").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        check_script("a.py")


@pytest.mark.parametrize("content", [b"", b"print(1)", "# -*- coding: latin-1 -*-\n# ü\n".encode("latin-1"), b"'\\d'"])
def test_check_script_accepts_python_file(here, content):
    (here / "a.py").write_bytes(content)
    check_script("a.py")


def test_check_script_refuses_missing_or_non_regular_file(here):
    os.mkfifo(here / "fifo")
    (here / "dangling").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"no such script: 'nope\.py'"):
        check_script("nope.py")
    with pytest.raises(ConfigError, match="is a folder"):
        check_script(str(here))
    for name in ("fifo", "dangling"):
        with pytest.raises(ConfigError, match="is not a regular file"):
            check_script(name)


@pytest.mark.parametrize("name", ["/dev/fd/{fd}", "/proc/self/fd/{fd}", "/proc/thread-self/fd/{fd}", "link", "folder/{fd}"])
def test_check_script_refuses_open_file_of_launcher(here, name):
    """Each rank has standard input and descriptors of its own, so such a script would be another file, or empty."""
    (here / "a.py").write_text("print(1)")
    (here / "folder").symlink_to("/proc/self/fd")
    with open(here / "a.py") as file:
        (here / "link").symlink_to(f"/dev/fd/{file.fileno()}")
        with pytest.raises(ConfigError, match=r"is an open file of the launcher.*Save the script to a file"):
            check_script(name.format(fd=file.fileno()))


def test_check_script_checks_main_module_of_archive(here):
    def archive(name, modules):
        with zipfile.ZipFile(name, "w") as file:
            for module, source in modules.items():
                file.writestr(module, source)

    archive("none.pyz", {"other.py": "print(1)"})
    archive("broken.pyz", {"__main__.py": "def f(:\n"})
    archive("good.pyz", {"__main__.py": "raise RuntimeError('executed')"})
    with pytest.raises(ConfigError, match=r"'none\.pyz' is a zip archive without __main__\.py"):
        check_script("none.pyz")
    with pytest.raises(ConfigError, match=r"broken\.pyz/__main__\.py:1 is not valid Python"):
        check_script("broken.pyz")
    check_script("good.pyz")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_check_script_refuses_unreadable_file(here):
    (here / "a.py").write_text("")
    (here / "a.py").chmod(0)
    with pytest.raises(ConfigError, match=r"cannot read 'a\.py'"):
        check_script("a.py")


@pytest.fixture
def package(here):
    (here / "pack/sub").mkdir(parents=True)
    (here / "pack/__init__.py").write_text("raise RuntimeError('imported')")
    (here / "pack/tool.py").write_text("raise RuntimeError('imported')")
    (here / "pack/bad.py").write_text("def f(:")
    (here / "space/tools").mkdir(parents=True)
    (here / "space/tools/__main__.py").write_text("")
    return here


@pytest.mark.parametrize("name", ["pack.tool", "space.tools", "json.tool", "http.server"])
def test_check_module_does_not_import_module(package, name):
    before = list(sys.path)
    check_module(name)
    assert sys.path == before
    assert "pack" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "no module named 'nope'"),
        ("pack.nope", "no module named 'pack.nope'"),
        ("pack.tool.deeper", "no module named 'pack.tool.deeper'"),
        ("pack", r"'pack' is a package without __main__\.py"),
        ("pack.sub", "is a package without"),
        ("pack.bad", "is not valid Python"),
        ("pack/tool.py", "is not a module name"),
        ("", "is not a module name"),
        (".pack", "is not a module name"),
    ],
)
def test_check_module_refuses_module_that_cannot_run(package, name, message):
    with pytest.raises(ConfigError, match=message):
        check_module(name)
