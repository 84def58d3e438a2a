"""A loop, an evaluation or a save after the end of ``init_dist``'s block is refused, because each rank would go on alone."""

from __future__ import annotations

from collections.abc import Callable

import dtrain as dt
from step.test_later_changes import STEP, batch_of, begun, squares, told


def ended_block(root: str) -> list[str]:
    with dt.init_dist(backend="gloo", device="cpu"):
        states = [STEP(begun(strategy), batch_of(0))[0] for strategy in ("replicate", "full_shard")]
    batch = batch_of(1)
    uses: list[Callable[[dt.TrainState], object]] = [
        lambda state: STEP(state, batch),
        lambda state: dt.microbatch_step(state, batch, loss_fn=squares),
        lambda state: dt.apply_gradients(state, {}),
        lambda state: dt.evaluate(state.model, [batch], squares),
        lambda state: dt.save_sharded(root, state),
    ]
    return [told(lambda use=use, state=state: use(state)) for state in states for use in uses]


def test_use_after_the_end_of_the_block_is_refused(forked, tmp_path):
    root = str(tmp_path / "ckpt")
    for lines in forked.run(lambda _: ended_block(root), 2, results_of=[0, 1]).values():
        callers = 2 * ["step", "step", "apply_gradients", "evaluate", "save_sharded"]
        expected = "the init_dist block in which the model was sharded on 2 ranks has ended"
        for line, caller in zip(lines, callers, strict=True):
            assert line.startswith(f"StepError: {caller}: {expected}")
    assert not list(tmp_path.glob("ckpt/step*"))


def test_a_plain_model_of_a_launched_rank_takes_no_step_without_a_block(monkeypatch):
    state = begun("none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert told(lambda: STEP(state, batch_of(0))).startswith("ConfigError: step: this process is one of 2 ranks")
