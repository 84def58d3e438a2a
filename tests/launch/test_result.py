"""Summary lines about processes that a kill did not end."""

from types import SimpleNamespace

from dtrain.launch import result


def said(monkeypatch, left: list[int], *, is_finished: bool = False) -> tuple[str, ...]:
    monkeypatch.setattr(result, "descendants", lambda: left)
    return result._describe_unkillable(SimpleNamespace(is_finished=is_finished, services={7}))


def test_remaining_processes_are_named(monkeypatch):
    assert said(monkeypatch, [7, 8, 9])[0].endswith("wait in the kernel: 8, 9")


def test_processes_that_ended_meanwhile_are_not_named(monkeypatch):
    """The last one may end between the look that found it and this line."""
    assert said(monkeypatch, [7]) == ()
    assert said(monkeypatch, [7, 8], is_finished=True) == ()
