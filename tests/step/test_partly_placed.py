"""A loop that makes some of its batches of new tensors: slices of long sequences, or selections by a mask."""

import torch
from torch import nn

import dtrain as dt
from dtrain.dist.init import get_dist_info

LOSS = dt.mean_loss(lambda model, batch: model(batch["x"]).square().mean(), weight=lambda batch: len(batch["x"]))
EVERY = 3  # one batch in so many is cut


def loader(mesh=None):
    return dt.build_loader([{"x": torch.full((1,), n + 1.0)} for n in range(24)], mesh=mesh, global_batch_size=4, seed=0)


def begun(mesh=None, *transforms, **options):
    model = nn.Linear(1, 1) if mesh is None else dt.shard_model(nn.Linear(1, 1), mesh)
    step = dt.compose_step(LOSS, transforms)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=1e-3), **options)


def is_cut(number: int) -> bool:
    return number % EVERY == EVERY - 1


def cut(batch):
    return {"x": batch["x"][:1].clone()}


def run_where_one_rank_cuts(folder: str) -> list:
    """Save after each step, and ask for the end of the epoch after a batch that no rank has cut."""
    mesh = dt.build_mesh()
    source = loader(mesh)
    step, state = begun(mesh, stateful={"loader": source})
    told = []
    for number, batch in enumerate(source.until("2ep")):
        state, _ = step(state, cut(batch) if is_cut(number) and get_dist_info().rank == 1 else batch)
        dt.save_sharded(folder, state)
        try:
            told.append(state.crossed("1ep"))
        except dt.errors.ConfigError as error:
            told.append("new tensors" in str(error))
    return [state.step, state.clock.samples, told, source.state_dict()["batches"]]


def test_batch_sliced_on_one_rank_keeps_the_loader_position(ranks, tmp_path):
    first, second = ranks(2).run(run_where_one_rank_cuts, str(tmp_path))
    assert first == second
    steps, samples, told, batches = first
    assert (steps, samples, batches) == (12, 8 * 4 + 4 * 3, 12)
    # The sixth and the twelfth batch end an epoch, and are cut. The seventh shows that an epoch has ended before it.
    assert told == [False, False, True, False, False, True, True, False, True, False, False, True]


def named_where_one_rank_cuts() -> list:
    mesh = dt.build_mesh()
    source = loader(mesh)
    step, state = begun(mesh, loader=source)
    crossed = 0
    for number, batch in enumerate(source.until("2ep")):
        state, _ = step(state, cut(batch) if is_cut(number) and get_dist_info().rank == 1 else batch)
        crossed += state.crossed("1ep")
    return [crossed, state.clock.epoch]


def test_named_loader_counts_epochs_with_sliced_batches(ranks):
    assert ranks(2).run(named_where_one_rank_cuts) == [[2, 2]] * 2


def apart(count: int) -> str:
    """Ranks whose samples are their own, one of which cuts its batches."""
    mesh = dt.build_mesh()
    own = [{"x": torch.full((1,), n + 1.0)} for n in range(count)]

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(own)

    source = dt.build_loader(Stream(), mesh=mesh, global_batch_size=4, seed=0, shuffle=False, pre_sharded=True)
    step, state = begun(mesh)
    try:
        for batch in source.until("1ep"):
            state, _ = step(state, cut(batch) if get_dist_info().rank == 1 else batch)
    except dt.errors.StepError as error:
        return str(error)
    return "no error"


def test_sliced_batch_with_pre_sharded_data_requires_the_loader_argument(ranks):
    for said in ranks(2).run(apart, 8):
        assert said.startswith("step: the batch of rank 1 was made of new tensors"), said


def test_saved_loader_state_does_not_repeat_a_sliced_batch():
    source, (step, state) = loader(), begun()
    for number, batch in enumerate(source.until("2ep"), 1):
        state, _ = step(state, cut(batch) if is_cut(number) else batch)
        assert source.state_dict()["batches"] == number
