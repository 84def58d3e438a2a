"""docs/other_loops.md: the blocks learn, carry a state exactly, and draw samples that do not depend on ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import dtrain as dt
from dtrain.errors import StepError
from pages.fences import DOCS, fences

BLOCKS = [block for block in fences(DOCS / "other_loops.md") if block.language == "python"]


def run(index: int) -> dict[str, Any]:
    """Return the names of a block after it ran."""
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(BLOCKS[index].text, names)
    return names


def test_gan_trains_both_models_on_the_same_epochs() -> None:
    names = run(0)
    assert [state.step for state in (names["d"], names["g"])] == [16, 16]
    assert names["d"].crossed("1ep")
    assert names["g"].crossed("1ep")
    assert 0 < dt.reduce_metrics(names["d_metrics"])["drawn"] < 1


def test_ppo_learns_the_rewarded_action_and_reports_its_parts() -> None:
    names = run(1)
    assert sorted(dt.reduce_metrics(names["metrics"])) == ["entropy", "grad_norm", "kl", "loss", "policy", "value"]
    with dt.eval_mode(names["model"]):
        log_probs, _ = names["model"](torch.randn(100, 3))
    assert log_probs[:, 1].exp().mean() > 0.9


@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_carried_state_equals_one_pass_over_the_whole_text(microbatch_size: int | None) -> None:
    names = run(2)
    assert dt.reduce_metrics(names["metrics"])["loss"] < 1.0  # log 16 = 2.8 without learning
    model, rows, hidden = names["model"], names["loader"], torch.zeros(8, 32)
    step = dt.compose_step(names["loss_fn"], grad=partial(dt.microbatch_step, microbatch_size=microbatch_size))
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.0), loader=rows)
    parts = []
    for batch in rows.until("4ep"):
        state, _ = step(state, {"tokens": batch["tokens"], "hidden": hidden})
        parts.append(batch["tokens"])
    inputs = torch.cat([block[:, :-1] for block in parts], dim=1)
    assert parts[1][:, 0].tolist() == [(17 * 1 + row * 30 * 17) % 16 for row in range(8)]
    with dt.eval_mode(model):
        torch.testing.assert_close(hidden, model(inputs, torch.zeros(8, 32))[1])


def test_carried_state_refuses_a_second_run_of_the_batch() -> None:
    names = run(2)
    step = dt.compose_step(names["loss_fn"], [dt.transforms.sam(0.05)])
    state = step.init(names["model"], torch.optim.SGD(names["model"].parameters(), lr=0.1))
    with pytest.raises(StepError, match="wrote into its batch"):
        step(state, {"tokens": torch.ones(8, 17, dtype=torch.int64), "hidden": torch.zeros(8, 32)})


def test_random_draws_are_equal_in_a_second_run_and_differ_between_epochs() -> None:
    first, second = run(3), run(3)
    assert first["first"].shape == (1000, 2)
    assert first["first"].equal(second["first"])
    assert not first["first"].equal(first["second"])


def drawn(rank_of_all: bool) -> list[list[float]]:
    loader = dt.build_loader(
        range(8),
        mesh=dt.build_mesh() if rank_of_all else None,
        global_batch_size=4,
        seed=0,
        transform=lambda index, generator: torch.rand(1, generator=generator),
    )
    return [batch[:, 0].tolist() for batch in loader.until("1ep")]


def test_random_draws_do_not_depend_on_the_number_of_ranks(ranks) -> None:
    (alone,) = ranks(1).run(drawn, False)
    one, other = ranks(2).run(drawn, True)
    assert [sorted(a + b) for a, b in zip(one, other, strict=True)] == [sorted(batch) for batch in alone]
