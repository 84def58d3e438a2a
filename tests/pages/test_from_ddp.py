"""docs/from_ddp.md: each mistake gives the wrong number that the page says, and dtrain the right one, on two ranks."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtrain as dt
from dtrain.testing import count_host_syncs
from pages import ddp_mistakes as shown_code
from pages.shown import ROOT, shown, with_sources

PAGE = ROOT / "docs" / "from_ddp.md"
RAGGED = ([1.0, 2.0, 3.0], [10.0])  # samples of each rank: their squared errors at weight 0 are 1, 4, 9 and 100


def part(values: list[float]) -> dict[str, torch.Tensor]:
    """Samples whose target is their own value."""
    return {"x": torch.ones(len(values), 1), "y": torch.tensor(values).reshape(-1, 1)}


def fresh() -> nn.Linear:
    """Make a model of one weight, which is 0."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def begun(model: nn.Module | None = None) -> dt.TrainState:
    model = dt.shard_model(model or fresh(), dt.build_mesh(), strategy="replicate")
    return dt.compose_step(LOSS).init(model, sgd(model))


LOSS = dt.mean_loss(shown_code.squares, weight=lambda batch: len(batch["x"]))


def reductions(rank: int) -> dict[str, list[float]]:
    """Return the results of the functions that reduce numbers over ranks."""
    numbers: dict[str, list[float]] = {}
    if rank == 1:
        dt.dist.all_gather_json(None)  # rank 1 is late: it comes when rank 0 has read its own
    by_hand = shown_code.logged_loss_by_hand(torch.tensor(float(1 + 2 * rank)))
    if rank == 0:
        dt.dist.all_gather_json(None)
    dist.barrier()
    numbers["logged_loss"] = [by_hand, shown_code.logged_loss_here(torch.tensor(float(1 + 2 * rank)))]

    correct = torch.tensor([True, False, False] if rank == 0 else [True])
    numbers["accuracy"] = [shown_code.accuracy_by_hand(correct), shown_code.accuracy_here(correct)]

    slipped = shown_code.on_rank_0_by_hand(torch.tensor([5.0]), torch.tensor([10.0 * (rank + 1)]))
    if rank == 1:
        dist.all_reduce(torch.zeros(1))  # rank 0 waits for it
    log = dt.loggers.in_memory()
    right = shown_code.on_rank_0_here(torch.tensor([5.0]), torch.tensor([10.0 * (rank + 1)]), log)
    numbers["on_rank_0"] = [slipped, right]

    x = torch.tensor([[float(1 + rank)]], requires_grad=True)
    gradients = []
    for contrast in (shown_code.contrast_by_hand, shown_code.contrast_here):
        x.grad = None
        contrast(x).backward()
        gradients.append(x.grad.item())
    numbers["contrast"] = gradients
    return numbers


def gradients(rank: int) -> dict[str, list[float]]:
    """Return the results of the functions about gradients and updates."""
    mine = part(RAGGED[rank])
    numbers = {
        "gradient": [
            shown_code.gradient_by_hand(DistributedDataParallel(fresh()), mine).item(),
            shown_code.gradient_here(begun(), mine).item(),
        ]
    }
    rest = [part([1.0, 3.0]), part([5.0, 7.0])]  # two microbatches are left for the last step
    numbers["accumulated"] = [
        shown_code.accumulated_by_hand(DistributedDataParallel(fresh()), rest).item(),
        shown_code.accumulated_here(begun(), part([1.0, 3.0, 5.0, 7.0])).item(),
    ]
    plain, sharded = fresh(), dt.shard_model(fresh(), dt.build_mesh(), strategy="replicate")
    shown_code.clipped_by_hand(plain, sgd(plain), part([5.0]))
    shown_code.clipped_here(sharded, sgd(sharded), part([5.0]))
    numbers["clipped"] = [plain.weight.item(), sharded.weight.item()]
    return numbers


def waits(rank: int) -> dict[str, list[float]]:
    """Count the host syncs in ten steps, after the steps in which ranks compare their batches."""
    batches = [part([float(number)]) for number in range(10)]
    model, step = fresh(), dt.compose_step(LOSS)
    optimizer = sgd(model)
    with count_host_syncs() as by_hand:
        shown_code.mean_of_losses_by_hand(model, optimizer, batches)
    counts = [by_hand.count]
    for steps in (10, 20):
        state = begun()
        for batch in batches[:3]:
            state, _ = step(state, batch)
        with count_host_syncs() as here:
            shown_code.mean_of_losses_here(state, step, batches * (steps // 10))
        counts.append(here.count)
    return {"mean_of_losses": counts[:2], "of_more_losses": counts[1:]}


def samples(rank: int) -> dict[str, list]:
    """Return the results of the functions about data on this rank."""
    mesh, eight = dt.build_mesh(), torch.arange(8.0)
    odd = torch.tensor([6.0, 0.0, 0.0, 0.0, 0.0])
    loader = dt.build_loader(eight, mesh=mesh, global_batch_size=4, seed=0)
    before = next(iter(loader.until("1ep"))).tolist()
    ones = torch.ones(64)
    return {
        "two_epochs": [shown_code.two_epochs_by_hand(eight), shown_code.two_epochs_here(eight, mesh)],
        "held_out_mean": [shown_code.held_out_mean_by_hand(odd), shown_code.held_out_mean_here(fresh(), odd, mesh)],
        "samples_of_a_step": [shown_code.samples_of_a_step_by_hand(eight), shown_code.samples_of_a_step_here(eight, mesh)],
        "resumed": [
            [shown_code.resumed_by_hand(eight, {"epoch": 0})[0], *shown_code.resumed_by_hand(eight, {"epoch": 0})],
            [before, *shown_code.resumed_here(eight, loader.state_dict(), mesh)],
        ],
        "dropped": [shown_code.dropped_by_hand(ones).tolist(), shown_code.dropped_here(ones, rank).tolist()],
    }


def saves(rank: int, folder: str) -> dict[str, list[float]]:
    """The weight in the file, of a model whose weight was 0 when the save was asked for, and is another after the next step."""
    model, path = fresh(), Path(folder) / f"by-hand-{rank}.pt"
    written = Event()

    def train() -> None:
        with torch.no_grad():
            model.weight -= 1
        written.set()

    with ThreadPoolExecutor(1) as writer:
        writer.submit(written.wait)  # the file before is still being written
        shown_code.saved_by_hand(model, writer, path, train)
    by_hand = torch.load(path)["weight"].item()
    state = begun()

    def one_step() -> None:
        dt.optimizer_step(*dt.microbatch_step(state, part([5.0]), loss_fn=LOSS))

    shown_code.saved_here(state, f"{folder}/here", one_step)
    restored = dt.load_sharded(f"{folder}/here", begun())
    return {"saved": [by_hand, dict(dt.full_params(restored))["weight"].item()]}


def everything(folder: str) -> dict[str, list]:
    rank = dist.get_rank()
    with torch.random.fork_rng():
        return reductions(rank) | gradients(rank) | waits(rank) | samples(rank) | saves(rank, folder)


@pytest.fixture(scope="module")
def results(ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list]]:
    return ranks(2).run(everything, str(tmp_path_factory.mktemp("saves")), timeout_s=300)


# Name, rank, the number by hand, the number here. The page quotes them.
NUMBERS = [
    ("logged_loss", 0, 0.5, 2.0),
    ("gradient", 0, -12.0, -8.0),  # -(4 + 20) / 2, and -2 * 16 / 4
    ("gradient", 1, -12.0, -8.0),
    ("accuracy", 0, 2 / 3, 0.5),
    ("held_out_mean", 0, 2.0, 1.2),
    ("accumulated", 0, -4.0, -8.0),
    ("clipped", 0, 2.0**-16, 1.0),
    ("on_rank_0", 1, 25.0, 30.0),
    ("saved", 0, -1.0, 0.0),
    ("samples_of_a_step", 0, 8, 4),
    ("contrast", 0, 4.0, 6.0),
    ("contrast", 1, 5.0, 6.0),
    ("mean_of_losses", 0, 10, 1),
]


@pytest.mark.parametrize(("name", "rank", "by_hand", "here"), NUMBERS, ids=[f"{row[0]}-{row[1]}" for row in NUMBERS])
def test_ddp_code_gives_wrong_and_dtrain_correct_numbers(results, name, rank, by_hand, here) -> None:
    assert results[rank][name] == pytest.approx([by_hand, here], rel=1e-5)


def test_host_syncs_do_not_increase_with_steps(results) -> None:
    assert results[0]["of_more_losses"][0] == results[0]["of_more_losses"][1]


def test_missing_set_epoch_repeats_the_previous_order(results) -> None:
    for rank in (0, 1):
        (first, second), (ours, next_) = results[rank]["two_epochs"]
        assert first == second
        assert ours != next_


def test_restarted_sampler_repeats_samples(results) -> None:
    by_hand = [sample for rank in (0, 1) for batch in results[rank]["resumed"][0] for sample in batch]
    here = [sample for rank in (0, 1) for batch in results[rank]["resumed"][1] for sample in batch]
    assert len(by_hand) == 12
    assert sorted(here) == list(range(8))


def test_equal_seed_gives_equal_dropout_masks_on_all_ranks(results) -> None:
    assert results[0]["dropped"][0] == results[1]["dropped"][0]
    assert results[0]["dropped"][1] != results[1]["dropped"][1]


def test_page_quotes_the_measured_numbers() -> None:
    expected: dict[str, set[float]] = {"resumed": {12}, "two_epochs": set(), "dropped": set()}
    for name, _, by_hand, _ in NUMBERS:
        expected.setdefault(name, set()).add(by_hand)
    quoted = {}
    for section in PAGE.read_text().split("\n### ")[1:]:
        (name,) = re.findall(r"py: (\w+)_by_hand -->", section)
        quoted[name] = {float(number) for number in re.findall(r"\*\*(-?[\d.]+)\*\*", section)}
    assert quoted.keys() == expected.keys()
    for name, numbers in expected.items():
        assert sorted(quoted[name]) == pytest.approx(sorted(numbers), rel=0.02), name


def test_page_shows_the_tested_code() -> None:
    assert with_sources(PAGE.read_text()) == PAGE.read_text(), "run python tests/written.py"
    names = {name for name in vars(shown_code) if name.endswith(("_by_hand", "_here"))}
    assert {name for file, name in shown(PAGE.read_text())} == names | {"squares"}
    tested = {name for name, *_ in NUMBERS} | {"two_epochs", "resumed", "dropped"}
    assert {re.sub("_(by_hand|here)$", "", name) for name in names} == tested
    assert sys.modules[shown_code.__name__].__file__.endswith("tests/pages/ddp_mistakes.py")
