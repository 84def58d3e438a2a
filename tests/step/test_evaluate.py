import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from dtrain.data.batch import batch_spec
from dtrain.data.loader import build_loader
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.dist.ragged import all_gather_ragged
from dtrain.errors import ConfigError, StepError
from dtrain.losses import mean_loss
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.shard.unshard import eval_mode
from dtrain.state import init_state
from dtrain.step.evaluate import evaluate
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import optimizer_step
from dtrain.typing import LossSum

DATA = torch.arange(26.0, dtype=torch.float64).reshape(13, 2)
LOSS = mean_loss(lambda model, x: model(x).mean(), weight=len)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double()


def expected() -> float:
    return model().eval()(DATA).mean().item()


def with_loader(global_batch_size: int, tail: str) -> float:
    mesh = build_mesh()
    net = shard_model(model(), mesh, blocks=(nn.Linear,))
    loader = build_loader(DATA, mesh=mesh, global_batch_size=global_batch_size, seed=0, collate=torch.stack, last_batch=tail)
    first = reduce_metrics(evaluate(net, loader, LOSS))["loss"]
    assert reduce_metrics(evaluate(net, loader, LOSS))["loss"] == first, "one pass leaves the position"
    assert loader.position.batches == 0
    assert net.training
    return first


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_sample_counts_once_on_any_number_of_ranks(ranks, world_size):
    for size, tail in [(1, "short"), (4, "short"), (13, "short"), (50, "short"), (5, "drop"), (5, "pad"), (50, "pad")]:
        assert ranks(world_size).run(with_loader, size, tail) == pytest.approx([expected()] * world_size, rel=1e-12), tail


def predictions(global_batch_size: int, tail: str) -> list[float]:
    """Return the model's output for each sample, in the order of the dataset, on every rank."""
    mesh = build_mesh()
    net = shard_model(model(), mesh, blocks=(nn.Linear,))
    samples = [{"index": index, "x": x} for index, x in enumerate(DATA)]
    loader = build_loader(samples, mesh=mesh, global_batch_size=global_batch_size, seed=0, last_batch=tail)
    with eval_mode(net):
        pairs = [(batch["index"], net(batch["x"]).squeeze(1)) for batch in loader.one_epoch()]
    indices, values = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return all_gather_ragged(values, order=indices, mesh=mesh).tolist()


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_predictions_are_gathered_in_dataset_order(ranks, world_size):
    outputs = model().eval()(DATA).squeeze(1).tolist()
    for size, tail in [(4, "short"), (50, "short"), (5, "drop"), (5, "pad")]:
        gathered = ranks(world_size).run(predictions, size, tail)
        assert gathered == [pytest.approx(outputs, rel=1e-12)] * world_size, (size, tail)


def with_ragged_batches() -> float:
    net = shard_model(model(), build_mesh())
    mine = [DATA[:9].split(2), DATA[9:].split(4), [DATA[:0]]][get_dist_info().rank]
    return reduce_metrics(evaluate(net, mine, LOSS))["loss"]


def test_ranks_may_have_different_numbers_of_batches(ranks):
    assert ranks(3).run(with_ragged_batches) == pytest.approx([expected()] * 3, rel=1e-12)


def refused_on_one_rank(case: str) -> str:
    net = shard_model(model(), build_mesh())
    bad = {"nothing": [], "uncountable": ["text"], "broken": broken()}[case]
    try:
        evaluate(net, [DATA[:2]] if get_dist_info().rank == 0 else bad, LOSS)
    except (ConfigError, StepError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def broken():
    yield DATA[:2]
    raise OSError("disk")


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("nothing", ["StepError: evaluate: rank 1 (1 of 2 ranks) has no batch to repeat. Use build_loader."] * 2),
        (
            "uncountable",
            [
                "StepError: evaluate: rank 1 (1 of 2 ranks) cannot read or count",
                "ConfigError: batch: found no tensor to split in a str",
            ],
        ),
        ("broken", ["StepError: evaluate: rank 1 (1 of 2 ranks) cannot read or count", "OSError: disk"]),
    ],
)
def test_error_on_one_rank_raises_on_all_ranks(ranks, case, messages):
    for error, message in zip(ranks(2).run(refused_on_one_rank, case), messages, strict=True):
        assert message in error


def on_tensordicts(global_batch_size: int) -> list[float]:
    """Training and evaluating on TensorDicts whose batch axis is the first one, through the loader."""
    mesh = build_mesh()
    net = shard_model(model(), mesh)
    samples = TensorDict({"x": DATA}, batch_size=[13])
    loader = build_loader(samples, mesh=mesh, global_batch_size=global_batch_size, seed=0, collate=torch.stack)
    loss = mean_loss(lambda model, batch: model(batch["x"]).mean(), weight=len)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.0))
    total = 0
    for batch in loader.until("1ep"):
        state, metrics = optimizer_step(*microbatch_step(state, batch, loss_fn=loss, microbatch_size=2))
        total += metrics["loss"].weight.item()
    return [total, reduce_metrics(evaluate(net, loader, loss))["loss"]]


def test_tensordict_batches_are_evaluated_by_sample(ranks):
    results = ranks(3).run(on_tensordicts, 4)
    assert sum(total for total, _ in results) == 13
    assert [loss for _, loss in results] == pytest.approx([expected()] * 3, rel=1e-12)


def sequence_first(global_batch_size: int) -> float:
    mesh = build_mesh()
    net = shard_model(model(), mesh)
    spec = batch_spec({"x": "axis batch"})

    def collate(samples: list) -> dict:
        return {"x": torch.stack(samples, dim=1)}

    loader = build_loader(DATA, mesh=mesh, global_batch_size=global_batch_size, seed=0, collate=collate, batch_spec=spec)
    loss = mean_loss(lambda model, batch: model(batch["x"].T).mean(), weight=lambda batch: batch["x"].shape[1])
    return reduce_metrics(evaluate(net, loader, loss, batch_spec=spec))["loss"]


def test_batch_axis_can_be_a_later_dimension(ranks):
    assert ranks(3).run(sequence_first, 4) == pytest.approx([expected()] * 3, rel=1e-12)


def test_empty_loader_is_refused():
    with pytest.raises(StepError, match="the loader returned no batch on any rank"):
        evaluate(model(), [], LOSS)


def test_model_without_parameters_is_evaluated_on_the_rank_device():
    net = nn.Flatten()
    metrics = evaluate(net, [DATA, DATA[:2]], lambda net, x: LossSum(total=net(x).sum(), weight=len(x)))
    assert metrics["loss"].weight == 15


def test_training_mode_is_restored_after_an_error():
    net = model()

    def broken(net, batch):
        raise KeyError("x")

    with pytest.raises(KeyError):
        evaluate(net, [DATA], broken)
    assert net.training


def test_custom_batches_are_counted_by_the_count_function():
    class Pair:
        def __init__(self, rows: int) -> None:
            self.x = torch.ones(rows, 3)

    net = nn.Linear(3, 1)

    def loss(net, pair):
        return LossSum(total=net(pair.x).sum(), weight=len(pair.x))

    metrics = evaluate(net, [Pair(2), Pair(3), Pair(0)], loss, batch_spec=batch_spec(count=lambda pair: len(pair.x)))
    assert metrics["loss"].weight == 5
    with pytest.raises(ConfigError, match=r"dt.batch_spec\(count=..., split=...\)"):
        evaluate(net, [Pair(2)], loss)


def share(values: Tensor, sizes: list[int]) -> Tensor:
    rank = get_dist_info().rank
    return values[sum(sizes[:rank]) : sum(sizes[: rank + 1])]


def logarithms(net: nn.Module, batch: dict) -> LossSum:
    """A loss that is not finite for zeros, of a batch with names and with indices that begin at 1."""
    assert len(batch["names"]) == len(batch["x"])
    assert not len(batch["x"]) or batch["id"].min() > 0
    return LossSum(total=net(batch["x"].log()).square().sum(), weight=len(batch["x"]), aux={"id": (batch["id"].sum(), 1)})


def columns(net: nn.Module, batch: dict) -> LossSum:
    return LossSum(total=net(batch["x"].t()).square().sum(), weight=batch["x"].shape[1])


def on_rank_without_samples(strategy: str, size: int | str | None) -> list[float]:
    """The differences of two losses from those of samples that are shared out evenly."""
    torch.manual_seed(0)
    net = shard_model(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), build_mesh(), strategy=strategy, blocks=(nn.Linear,)
    )
    x, ids = torch.rand(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1, torch.arange(6) + 1
    losses = []
    for sizes in ([3, 3], [0, 6]):
        mine = share(x, sizes)
        batch = {"x": mine, "id": share(ids, sizes), "names": ["a"] * len(mine)}
        rows = reduce_metrics(evaluate(net, [batch], logarithms, microbatch_size=size))
        spec = batch_spec({"x": "feature batch"})
        of_columns = reduce_metrics(evaluate(net, [{"x": mine.t()}], columns, batch_spec=spec, microbatch_size=size))
        losses.append([rows["loss"], of_columns["loss"], float("id" in rows)])
    return [abs(one - other) for one, other in zip(*losses, strict=True)]


@pytest.mark.parametrize("size", [None, 2, "auto"])
@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_rank_without_samples_evaluates_its_own_empty_batch(ranks, strategy, size):
    for differences in ranks(2).run(on_rank_without_samples, strategy, size):
        assert max(differences) <= 1e-12
