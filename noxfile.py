"""Sessions: ``nox -s tests``, ``full``, ``lint``, ``types``. Each installs what it needs into an environment of its own."""

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "virtualenv"


def install(session: nox.Session, *packages: str) -> None:
    """The project and ``packages``, at the tested versions."""
    session.install("-c", "constraints.txt", *packages)


def install_to_test(session: nox.Session) -> None:
    """What tests need. MosaicML's reader, ours is held against, without its needs: they would change the versions of ours."""
    install(session, "-e", ".[test]")
    install(session, "--no-deps", "mosaicml-streaming")


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that runs in minutes on two cores; with arguments, what pytest makes of them."""
    install_to_test(session)
    run = ["pytest"] if session.posargs else ["python", "tests/side_by_side.py"]
    session.run(*run, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def full(session: nox.Session) -> None:
    """Everything, also what takes too long for every change."""
    install_to_test(session)
    session.run("pytest", "--slow", *session.posargs, env={"OMP_NUM_THREADS": "1", "TEST_MOMENTS": "100"})


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and its formatting."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, on the package."""
    install(session, "-e", ".", "mypy")
    session.run("mypy")
