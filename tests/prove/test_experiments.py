"""An experiment takes one cause out of a script: each change does what its sentence says."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import rnn
from torch.utils.data import DataLoader

import dtrain as dt
from dtrain.prove.causes import EXPERIMENTS
from dtrain.testing import run_ranks

BATCH_NORM_INNOCENT = """
import torch
from torch import nn
import dtrain as dt
with dt.init_dist() as info:
    mesh = dt.build_mesh()
    dt.seed_all(0)
    # In eval mode batch norm uses no statistics of the batch. Only its affine part trains.
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = dt.shard_model(model, mesh, strategy="replicate")
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    loader = dt.build_loader(torch.utils.data.TensorDataset(x), mesh=mesh, global_batch_size=12, seed=0)
    def loss_fn(model, batch):
        # The mistake: a sum that only rank 0 counts in full.
        model.train(False)
        total = model(batch[0]).square().sum()
        with torch.enable_grad():
            model.train(True)
            model(batch[0])
            model.train(False)
        return dt.LossSum(total=total / (1 + info.rank), weight=len(batch[0]))
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in loader.until("2ba"):
        state, metrics = step(state, batch)
"""


def run_alone(function, *args):
    """Run a function of this file in a process of its own, as experiments change torch for good, and return what it prints."""
    call = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_experiments as t; "
    done = subprocess.run(
        [sys.executable, "-c", f"{call}print(t.{function.__name__}(*{args!r}))"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def draws_with_seeds(folder, equal):
    from dtrain.prove.experiments import Seeds
    from dtrain.prove.run_config import RunConfig
    from dtrain.prove.run_log import RunLog

    def places():
        text = Path(__file__).read_text().split("\n")
        return [f"{__file__}:{number}" for number, line in enumerate(text, start=1) if line.endswith("# seed")]

    seeds = {place: [7] for place in places()} if equal else {}
    Seeds(RunConfig(name="run", folder=folder, script=__file__, seeds=seeds), RunLog(Path(folder), 0))
    numbers = [
        torch.rand(1, generator=torch.Generator().manual_seed(3)).item(),  # seed
        random.Random(3).random(),  # seed
        np.random.default_rng(3).random(),  # seed
    ]
    assert isinstance(torch.default_generator, torch.Generator)
    return [round(float(number), 6) for number in numbers], Path(folder, "rank-0.jsonl").read_text().count('"seed": 3')


def plain_draws(seed):
    numbers = torch.rand(1, generator=torch.Generator().manual_seed(seed)).item(), random.Random(seed).random()
    return [round(float(number), 6) for number in (*numbers, np.random.default_rng(seed).random())]


@pytest.mark.costly
@pytest.mark.parametrize(("equal", "seed"), [(False, 3), (True, 7)], ids=["recorded", "replaced"])
def test_seeds_of_the_script_are_recorded_and_replaced(tmp_path, equal, seed):
    assert run_alone(draws_with_seeds, str(tmp_path), equal) == str((plain_draws(seed), 3))


def gradient_through_gathers():
    from dtrain.prove.experiments import take_out

    take_out("gather_without_gradient")
    rank = dist.get_rank()
    x = torch.full((2,), 1.0 + rank, requires_grad=True)
    parts, whole = [torch.empty(2) for _ in range(2)], torch.empty(4)
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(whole, x)
    (torch.cat(parts).square().sum() + whole.sum()).backward()
    return [part.tolist() for part in (whole.detach(), x.grad)]


def test_gathers_return_gradients_of_all_ranks():
    # Two ranks have the same loss: 2 * (2 * x + 1).
    assert run_ranks(gradient_through_gathers, 2) == [[[1, 1, 2, 2], [6, 6]], [[1, 1, 2, 2], [10, 10]]]


@pytest.fixture
def widened(monkeypatch):
    """Return a function that pads batches to one width. It replaces ``pad_sequence``, until the test ends."""
    monkeypatch.setattr(rnn, "pad_sequence", rnn.pad_sequence)
    return widen_batches


def widen_batches(*batches, width=6):
    from dtrain.prove.experiments import Padding
    from dtrain.prove.run_config import RunConfig

    padding = Padding(RunConfig(name="run", folder="", script="", width=width))
    return [padding.widen(batch) for batch in batches]


def test_batches_are_padded_to_one_width_with_their_own_padding(widened):
    ids = torch.tensor([[5, 6, 1, 1], [5, 7, 8, 9]])
    batch = {"ids": ids, "mask": (ids != 1).long(), "labels": ids.masked_fill(ids == 1, -100), "y": torch.tensor([1, 0])}
    # No sample of the second batch is padded, and its values are those of the first.
    short = {"ids": ids[1:, :3], "mask": torch.ones(1, 3), "labels": ids[1:, :3], "y": torch.tensor([1])}
    first, second = widened(batch, short)
    assert first["ids"].tolist() == [[5, 6, 1, 1, 1, 1], [5, 7, 8, 9, 1, 1]]
    assert first["mask"].tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert first["labels"].tolist() == [[5, 6, -100, -100, -100, -100], [5, 7, 8, 9, -100, -100]]
    assert first["y"] is batch["y"]
    assert [second[name][0, 3:].tolist() for name in ("ids", "mask", "labels")] == [[1] * 3, [0] * 3, [-100] * 3]
    # A mask of attention and microbatches, and a batch that has no padding.
    parts = dt.data.MicrobatchList([(ids, torch.ones(2, 4, 4)), (ids[:, :2], torch.ones(2, 2, 2))])
    (microbatches,) = widened(parts)
    assert [list(tensor.shape) for part in microbatches for tensor in part] == [[2, 6], [2, 6, 6]] * 2
    (whole,) = widened(batch, width=4)
    assert all(torch.equal(whole[name], batch[name]) for name in batch)


def test_sequences_are_padded_to_one_width(widened):
    widened(width=5)
    sequences = [torch.ones(2), torch.ones(3)]
    padded = rnn.pad_sequence(sequences, batch_first=True, padding_value=-1.0)
    assert padded.tolist() == [[1.0, 1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, -1.0, -1.0]]
    assert rnn.pad_sequence([torch.ones(2, 7)]).shape == (5, 1, 7)


class Noisy:
    def __getitem__(self, index):
        return torch.stack([torch.rand(()), torch.tensor(np.random.rand()), torch.tensor(random.random())])

    def __len__(self):
        return 4


def drawn_samples():
    from dtrain.prove.experiments import take_out

    take_out("augmentation_by_worker")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn = [torch.cat([*DataLoader(Noisy(), batch_size=size)]) for size in (4, 2)]
    mesh = dt.build_mesh()
    drawn.append(torch.cat([*dt.build_loader(Noisy(), mesh=mesh, global_batch_size=2, seed=0, shuffle=False).one_epoch()]))
    assert len(drawn[0].unique()) == 12
    torch.manual_seed(0)
    assert torch.equal(before, torch.get_rng_state())
    return all(torch.equal(other, drawn[0]) for other in drawn[1:])


def test_samples_draw_the_same_numbers_in_all_layouts():
    assert run_ranks(drawn_samples, 1) == [True]


def shares_of_batches(folder, sizes):
    """Return the shares that two ranks get of batches of ``sizes``, if they have read batches of -1."""
    from dtrain.prove.experiments import Replay
    from dtrain.prove.run_config import RunConfig

    configs = [RunConfig(name="run", folder="", script="", ranks=ranks, batches=folder) for ranks in (1, 2)]
    wholes = [{"x": torch.arange(size), "names": [str(number) for number in range(size)]} for size in sizes]
    writer, readers = Replay(configs[0], 0), [Replay(configs[1], rank) for rank in range(2)]
    assert [writer.exchange("loader", whole) for whole in wholes] == wholes
    own = {"x": torch.full((3,), -1), "names": ["-1"] * 3}
    shares = [[reader.exchange("loader", own) for _ in sizes] for reader in readers]
    assert all([str(number) for number in share["x"].tolist()] == share["names"] for rank in shares for share in rank)
    return [[share["x"].tolist() for share in rank] for rank in shares]


def test_batches_of_one_rank_are_dealt_to_ranks(tmp_path):
    # A rank that reads 3 samples cannot have 4 of 7, unless all ranks can have equal shares.
    assert shares_of_batches(str(tmp_path), [6, 7, 2]) == [[[0, 2, 4], [-1] * 3, [0]], [[1, 3, 5], [1, 3, 5], [1]]]


def lost_sums(dtype, terms):
    """Return the sums that lose terms: one in place, one of new tensors, and one that begins again, each of ``terms``."""
    from dtrain.prove.overrides import LowSums

    lost = []
    with LowSums(lambda value, total, count: lost.append((float(value), total, count))):
        total, sums = torch.zeros((), dtype=dtype), torch.zeros(1, dtype=dtype)
        for _ in range(terms):
            total += 1.0
            sums = sums + torch.ones(1, dtype=dtype)
        for _ in range(terms):
            total.fill_(3.0)
            total.add_(-3.0)
    return lost


@pytest.mark.parametrize(
    ("dtype", "terms", "lost"),
    [
        (torch.bfloat16, 265, [(256.0, 265.0, 265)] * 2),
        (torch.bfloat16, 264, []),
        (torch.float32, 1000, []),
    ],
)
def test_sum_that_loses_terms_is_followed_in_float64(dtype, terms, lost):
    assert lost_sums(dtype, terms) == lost


def dtypes_on_cpu():
    """Return the dtypes of tensors for a GPU and in low precision, in a run on the CPU in float64."""
    from dtrain.prove.overrides import keep_on_cpu, use_one_dtype

    low = []
    use_one_dtype("fp64", low.append)
    keep_on_cpu(__file__, lambda: None)
    tensors = torch.zeros(1, dtype=torch.bfloat16, device="cuda"), torch.ones(1).half(), torch.ones(1).to("cuda", torch.float32)
    return [tensor.dtype for tensor in tensors], low


@pytest.mark.costly
def test_script_that_names_gpus_and_dtypes_computes_in_float64():
    assert run_alone(dtypes_on_cpu) == "([torch.float64, torch.float64, torch.float64], [torch.bfloat16, torch.float16])"


def dtypes_of_recomputed_forwards():
    """Return the dtypes in which a function that names float32 runs, in a forward and again in two kinds of backward."""
    from torch.utils.checkpoint import checkpoint

    from dtrain.prove.overrides import keep_on_cpu, use_one_dtype

    use_one_dtype("fp64", lambda dtype: None)
    keep_on_cpu(__file__, lambda: None)
    seen = []

    def square(value):
        wide = value.to(torch.float32)
        seen.append(wide.dtype)
        return wide.square().to("cuda")

    value = torch.ones(3, requires_grad=True)
    checkpoint(square, value, use_reentrant=False).sum().backward()
    torch.autograd.grad(checkpoint(square, value, use_reentrant=False).sum(), value)
    return seen


@pytest.mark.costly
def test_checkpointed_forward_runs_again_in_the_dtype_of_the_run():
    assert run_alone(dtypes_of_recomputed_forwards) == str([torch.float64] * 4)


def clipped_and_recomputed():
    from torch.utils.checkpoint import checkpoint

    from dtrain.prove.experiments import take_out

    take_out("clip_local_norm")
    take_out("recompute_draws_again")
    weight = torch.ones(1000, requires_grad=True)
    weight.grad = torch.full((1000,), 2.0)
    norm = torch.nn.utils.clip_grad_norm_([weight], 0.5)
    kept = weight.grad.unique().tolist(), round(norm.item(), 3)
    weight.grad = None
    output = torch.utils.checkpoint.checkpoint(
        lambda w: torch.nn.functional.dropout(w * w, 0.5), weight, use_reentrant=False, preserve_rng_state=False
    )
    output.sum().backward()
    assert checkpoint is not torch.utils.checkpoint.checkpoint
    return kept, torch.equal(weight.grad, 2 * output.detach())


@pytest.mark.costly
def test_nothing_is_clipped_and_recomputation_draws_the_same_numbers():
    assert run_alone(clipped_and_recomputed) == "(([2.0], 63.246), True)"


def names_of_compiled():
    from dtrain.prove.overrides import compile_nothing

    compile_nothing()
    model = torch.compile(torch.nn.Linear(2, 2), fullgraph=True)
    # A print breaks a graph.
    model.register_forward_hook(lambda module, inputs, output: print("eager", end=" "))
    model(torch.ones(2))
    return list(model.state_dict())


@pytest.mark.costly
def test_compiled_module_runs_as_written_and_keeps_its_prefix():
    assert run_alone(names_of_compiled) == "eager ['_orig_mod.weight', '_orig_mod.bias']"


@pytest.mark.costly
def test_cause_that_an_experiment_refutes_is_not_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(BATCH_NORM_INNOCENT)
    report = dt.prove.prove("loop.py", steps=2, world_sizes=(2,), timeout_s=600.0)
    assert report.findings, report.text()
    assert {finding.cause.code for finding in report.findings} & {"local_batch_norm"} == set(), report.text()


TWO_BUGS = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import dtrain as dt

with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), LAYER)
    if info.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x), batch_size=12 // info.world_size, SAMPLER)
    for number, (inputs,) in zip(range(4), loader, strict=False):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        # DDP averages over ranks, too.
        (loss / info.world_size).backward()
        optimizer.step()
"""


@pytest.mark.costly
@pytest.mark.parametrize(
    ("layer", "sampler", "cause", "change"),
    [
        # All ranks read the same samples.
        ("nn.Tanh()", "shuffle=True, generator=torch.Generator().manual_seed(0)", "sampler_without_rank", "equal batches"),
        ("nn.BatchNorm1d(4)", "sampler=DistributedSampler(x, seed=0)", "local_batch_norm", EXPERIMENTS["local_batch_norm"]),
    ],
)
def test_mistake_behind_another_one_is_found(layer, sampler, cause, change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(TWO_BUGS.replace("LAYER", layer).replace("SAMPLER", sampler))
    report = dt.prove.prove("loop.py", world_sizes=(2,), timeout_s=600.0)
    codes = [finding.cause.code for finding in report.findings]
    assert codes == [cause, "gradient_scaled_by_ranks"], report.text()
    assert [row.findings for row in report.rows if row.name == "2 ranks"] == [(0, 1)]
    assert report.findings[0].cause.shown
    assert report.findings[1].run.endswith(change)


@pytest.mark.costly
def test_experiment_that_shows_a_cause_is_in_the_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = Path(__file__).parent / "bugs" / "gather_without_gradient.py"
    report = dt.prove.prove(script, steps=2, world_sizes=(2,), timeout_s=600.0)
    finding = report.as_dict()["findings"][0]
    assert (finding["cause"], finding["shown"]) == ("gather_without_gradient", True)
    assert finding["evidence"] == "Shown by an experiment: with a gather that returns gradients, the runs agree."
    assert f"   {finding['evidence']}" in report.text().splitlines()


OTHER_SLOPE = """
import torch
import torch.distributed as dist
from torch import nn
import dtrain as dt
with dt.init_dist() as info:
    mesh = dt.build_mesh()
    dt.seed_all(0)
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.near, self.far = nn.Linear(3, 4), nn.Linear(3, 4)
            self.far.load_state_dict(self.near.state_dict())
        def forward(self, x):
            y = self.near(x)
            if info.world_size == 1:
                return y
            return OUTPUT  # on several ranks
    model = dt.shard_model(Model(), mesh)
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    loader = dt.build_loader(torch.utils.data.TensorDataset(x), mesh=mesh, global_batch_size=12, seed=0)
    step = dt.compose_step(lambda model, batch: dt.sum_loss(model(batch[0]).square().sum(1)))
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in loader.until("2ba"):
        state, metrics = step(state, batch)
"""


@pytest.mark.costly
@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("(1.0 + info.world_size) * y - info.world_size * y.detach()", "gradient_not_of_loss"),
        # The gradient is another one, and that of the loss.
        ("y + y.square() - self.far(x).square()", "samples_interact"),
    ],
    ids=["detached", "another loss"],
)
def test_a_finite_difference_tells_whether_a_gradient_is_that_of_the_loss(output, cause, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(OTHER_SLOPE.replace("OUTPUT", output))
    report = dt.prove.prove("loop.py", steps=2, world_sizes=(2,), timeout_s=600.0)
    finding = report.findings[0]
    assert (finding.difference.kind, finding.cause.code) == ("gradient", cause), report.text()
    assert finding.cause.shown == (cause == "gradient_not_of_loss")
    if finding.cause.shown:
        assert "the gradient is 3 times the slope of the loss, and equal to it in the other run." in finding.cause.evidence


def test_a_script_with_a_process_group_of_gloo_names_no_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = Path(__file__).parent / "bugs" / "entropy_without_gradient.py"
    report = dt.prove.prove(script, ["--fixed"], steps=2, world_sizes=(2,), fast=True, timeout_s=600.0)
    assert report.passed, report.text()
    assert not [remark for remark in report.remarks() if "GPU" in remark]
