"""Sessions: ``nox -l`` lists them. Each installs its packages into an environment of its own."""

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "virtualenv"

# A thread for each process, as there are as many processes as cores. Bytecode is kept: tests start thousands of processes.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
# Five workers on two cores, as many tests wait. The tests of a file run on one worker.
SIDE_BY_SIDE = ("-n", "5", "--dist", "loadfile", "--no-loadscope-reorder")
CORE = ("tests/step", "tests/shard", "tests/checkpoint", "tests/data", "tests/battery", "tests/launch/spawn", "tests/cli")


def install(session: nox.Session, *packages: str) -> None:
    """The project and ``packages``, at the tested versions."""
    session.install("-c", "constraints.txt", *packages)


def install_to_test(session: nox.Session) -> None:
    """Packages for the tests. MosaicML's reader, our reference, comes without its own needs: they would change our versions."""
    install(session, "-e", ".[test]")
    install(session, "--no-deps", "mosaicml-streaming")


# Rooms whose tests pass with their tensors on a simulated accelerator. Of the others some tests are about the CPU.
SIMULATED = (
    "tests/transforms/batches",
    "tests/transforms/gradients",
    "tests/transforms/weights",
    "tests/transforms/test_combinators.py",
)


@nox.session
def tests(session: nox.Session) -> None:
    """The quick set: all tests, of costly families a sample by turn, then rooms on a simulated accelerator, which needs g++.

    With arguments: pytest with these arguments.
    """
    install_to_test(session)
    if not session.posargs:
        # pytest rewrites the asserts of all files once, and keeps them; each worker would do it again.
        session.run("pytest", "--collect-only", "-qq", silent=True, env=ONE_THREAD)
    session.run("pytest", *(session.posargs or (*SIDE_BY_SIDE, "--sample")), env=ONE_THREAD)
    if not session.posargs:
        session.run("pytest", *SIDE_BY_SIDE, *SIMULATED, env={**ONE_THREAD, "DTRAIN_TEST_DEVICE": "simulated"})


@nox.session
def full(session: nox.Session) -> None:
    """Run all tests, also those that take too long for every change."""
    install_to_test(session)
    session.run("pytest", *SIDE_BY_SIDE, "--slow", *session.posargs, env={**ONE_THREAD, "TEST_MOMENTS": "100"})


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and its formatting."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, on the package."""
    install(session, "--no-compile", "-e", ".", "mypy")  # nothing imports torch: mypy reads its sources
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site strictly in build/site; then check its links, its entries, and its pages in a browser. Needs no torch."""
    needs = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]["docs"]
    # The docstrings are read, not imported, and the command line needs no torch. ruff sets the signatures.
    install(session, *needs, "typer", "msgspec", "ruff", "pytest")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    env = {"DTRAIN_SITE": "build/site", "PYTHONPATH": "src"}
    session.run("pytest", "--noconftest", "tests/pages/test_website.py", "tests/pages/test_site.py", *session.posargs, env=env)


@nox.session
def accessibility(session: nox.Session) -> None:
    """The rules of WCAG AA, on the main pages in both colour schemes. Needs Chromium, and npm, which fetches axe-core."""
    folder = Path(session.create_tmp()).resolve()
    needs = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]["docs"]
    install(session, *needs, "typer", "msgspec", "ruff", "pytest")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), "axe-core@4.10.3", external=True)
    env = {"DTRAIN_SITE": "build/site", "DTRAIN_AXE": str(folder / "node_modules/axe-core/axe.min.js"), "PYTHONPATH": "src"}
    session.run("pytest", "--noconftest", "tests/pages/test_accessibility.py", *session.posargs, env=env)


@nox.session(reuse_venv=False)
def package(session: nox.Session) -> None:
    """Build the sdist, and the wheel from it. Where nothing else is installed, try the wheel, and run tests of the sdist."""
    folder = Path(session.create_tmp()).resolve()  # a path that holds in another folder, too
    shutil.rmtree(folder / "dist", ignore_errors=True)
    # The environment is new, and holds the build alone. An environment for each build would fetch the same packages twice.
    install(session, *nox.project.load_toml("pyproject.toml")["build-system"]["requires"], "build")
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"))
    (wheel,), (sdist,) = (list((folder / "dist").glob(ending)) for ending in ("*.whl", "*.tar.gz"))
    # Python before 3.11.4 unpacks no archive with a filter.
    session.run("tar", "--extract", "--file", str(sdist), "--directory", str(folder / "dist"), external=True)
    install(session, str(wheel))
    with session.chdir(folder / "dist" / sdist.name.removesuffix(".tar.gz")):
        # The first command of the README, shortened, and the promises that hold without any extra.
        session.run("dtrain", "launch", "-n", "2", "examples/pretrain_gpt.py", "--steps", "8", "--out", "ckpt", env=ONE_THREAD)
        session.run("python", "tests/installed.py", "ckpt")
        install(session, "pytest", "hypothesis")
        session.run("python", "-m", "pytest", "tests/test_exports.py", "tests/test_readme.py", "tests/schedules/test_clock.py")


@nox.session
def ways_in(session: nox.Session) -> None:
    """Scripts of other libraries that the pages show, and their names. Composer is only read: it needs another torch."""
    install_to_test(session)
    install(session, "accelerate==1.15.0", "deepspeed==0.19.8", "lightning==2.6.6")
    session.install("--no-deps", "mosaicml==0.32.1")
    session.run("pytest", "tests/pages/test_theirs.py", *session.posargs, env=ONE_THREAD)


@nox.session
def peers(session: nox.Session) -> None:
    """Benchmarks beside the peers, into benchmarks/results/peers.json; ``--quick`` only tries whether every row runs."""
    install_to_test(session)
    install(session, "accelerate==1.15.0", "lightning==2.6.6")
    session.install("--no-deps", "mosaicml==0.32.1")
    session.run("python", "benchmarks/peers.py", *session.posargs, env=ONE_THREAD)
    session.run("python", "benchmarks/figures.py")


@nox.session
def ray(session: nox.Session) -> None:
    """Loops on a Ray cluster of two local nodes. Ray needs an environment of its own size, so the tests do without it."""
    install_to_test(session)
    install(session, "ray[default,train]==2.60.0")
    session.run("pytest", "tests/launch/test_ray.py", *session.posargs, env=ONE_THREAD)


@nox.session(python=["3.11", "3.12", "3.13"])
def pythons(session: nox.Session) -> None:
    """The core on each Python that is supported. Takes gigabytes where torch has no small build for it."""
    install_to_test(session)
    session.run("pytest", *(session.posargs or CORE), env=ONE_THREAD)


def test_core(session: nox.Session, torch: str) -> None:
    """Run the core on another torch than the one of constraints.txt, with the other packages as they are tested."""
    others = Path(session.create_tmp()) / "constraints.txt"
    pinned = Path("constraints.txt").read_text().splitlines()
    others.write_text("\n".join(line for line in pinned if not line.startswith("torch==")))
    session.install("--upgrade", "-c", str(others), torch, "-e", ".[test]")
    session.install("-c", str(others), "--no-deps", "mosaicml-streaming")
    session.run("pytest", *(session.posargs or CORE), env=ONE_THREAD)


@nox.session
def oldest(session: nox.Session) -> None:
    """The core on the oldest torch that is supported, with the other packages as they are tested. Takes gigabytes."""
    test_core(session, "torch==2.11.0")


@nox.session
def newest(session: nox.Session) -> None:
    """The core on the newest torch that there is, with the other packages as they are tested. Takes gigabytes."""
    test_core(session, "torch")
