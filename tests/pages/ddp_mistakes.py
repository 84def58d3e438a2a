"""Run mistakes of loops written by hand on ``torch.distributed``, and the same mistakes with dtrain.

docs/from_ddp.md shows each function of this module that is named ``..._by_hand`` or ``..._here``. ``test_from_ddp.py`` beside
it runs them all on two ranks and compares the results. After a change: ``python tests/written.py``.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

import dtrain as dt

# The page shows this code at 88 columns.
# fmt: off


def logged_loss_by_hand(loss):
    dist.all_reduce(loss, async_op=True)  # returns at once; nothing waits for it
    return loss.item() / dist.get_world_size()


def logged_loss_here(loss):
    return dt.dist.reduce_mean(loss).item()


def squares(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def gradient_by_hand(ddp, batch):
    # DDP takes the mean over ranks of means over samples
    squares(ddp, batch).backward()
    return ddp.module.weight.grad


def gradient_here(state, batch):
    loss_fn = dt.mean_loss(squares, weight=lambda rows: len(rows["x"]))
    state, _ = dt.microbatch_step(state, batch, loss_fn=loss_fn)
    return dict(
        dt.full_params({name: param.grad for name, param in state.params.items()})
    )["weight"]


def accuracy_by_hand(correct):
    accuracy = correct.float().mean()
    dist.all_reduce(accuracy)
    return accuracy.item() / dist.get_world_size()


def accuracy_here(correct):
    # a sum and its weight
    metrics = {
        "accuracy": dt.typing.Metric(
            correct.sum().float(), torch.tensor(float(len(correct)))
        )
    }
    return dt.reduce_metrics(metrics)["accuracy"]


def two_epochs_by_hand(dataset):
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    # sampler.set_epoch(epoch) is missing
    return [[batch.tolist() for batch in loader] for epoch in range(2)]


def two_epochs_here(dataset, mesh):
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=4, seed=0)
    return [[batch.tolist() for batch in loader.until(end)] for end in ("1ep", "2ep")]


def held_out_mean_by_hand(dataset):
    # pads to equal shares
    loader = DataLoader(
        dataset, batch_size=2, sampler=DistributedSampler(dataset, shuffle=False)
    )
    seen = torch.zeros(2)
    for batch in loader:
        seen += torch.tensor([batch.sum(), len(batch)])
    dist.all_reduce(seen)
    return (seen[0] / seen[1]).item()


def held_out_mean_here(model, dataset, mesh):
    loader = dt.build_loader(
        dataset, mesh=mesh, global_batch_size=4, seed=0, shuffle=False
    )
    metrics = dt.evaluate(
        model,
        loader,
        lambda model, batch: dt.LossSum(total=batch.sum(), weight=len(batch)),
    )
    return dt.reduce_metrics(metrics)["loss"]


def accumulated_by_hand(ddp, microbatches, accumulate=4):
    *first, last = microbatches
    with ddp.no_sync():
        for microbatch in first:
            (squares(ddp, microbatch) / accumulate).backward()
    # the last step of an epoch has fewer than 4
    (squares(ddp, last) / accumulate).backward()
    return ddp.module.weight.grad


def accumulated_here(state, batch):
    loss_fn = dt.mean_loss(squares, weight=lambda rows: len(rows["x"]))
    state, _ = dt.microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=2)
    return dict(dt.full_params({name: param.grad for name, param in state.params.items()}))["weight"]


def clipped_by_hand(model, optimizer, batch):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(squares(model, batch)).backward()
    # of a gradient that is 65,536 times too large
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def clipped_here(model, optimizer, batch):
    loss_fn = dt.mean_loss(squares, weight=lambda rows: len(rows["x"]))
    step = dt.compose_step(loss_fn, [dt.transforms.loss_scale(), dt.transforms.clip_by_norm(1.0)])
    step(step.init(model, optimizer), batch)


def on_rank_0_by_hand(loss, gradient):
    if dist.get_rank() == 0:
        dist.all_reduce(loss)  # only rank 0 logs, so only rank 0 asks
    # the first reduction of rank 1 meets the first one of rank 0
    dist.all_reduce(gradient)
    return gradient.item()


def on_rank_0_here(loss, gradient, log):
    mean = dt.dist.reduce_mean(loss)  # a collective: every rank
    log(1, {"loss": mean.item()})  # a logger writes on rank 0
    return dt.dist.reduce_sum(gradient).item()


def saved_by_hand(model, writer, path, train):
    # holds the tensors that the next step writes into
    writer.submit(torch.save, model.state_dict(), path)
    train()


def saved_here(state, folder, train):
    dt.save_sharded(folder, state, mode="async")  # copied before it returns, written behind
    train()


def mean_of_losses_by_hand(model, optimizer, batches):
    total = 0.0
    for batch in batches:
        optimizer.zero_grad()
        loss = squares(model, batch)
        loss.backward()
        optimizer.step()
        total += loss.item()  # each step waits until the device is done
    return total / len(batches)


def mean_of_losses_here(state, step, batches):
    total = {}
    for batch in batches:
        state, metrics = step(state, batch)
        # sums and weights, on the device
        total = dt.step.add_metrics(total, metrics) if total else metrics
    return dt.reduce_metrics(total)["loss"]


def dropped_by_hand(x):
    torch.manual_seed(0)  # "for reproducibility"
    return F.dropout(x, 0.5)


def dropped_here(x, rank):
    dt.seed_all(0, rank)
    return torch.nn.functional.dropout(x, 0.5)


def samples_of_a_step_by_hand(dataset):
    # 4 on every rank
    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
    return len(next(iter(loader))) * dist.get_world_size()


def samples_of_a_step_here(dataset, mesh):
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=4, seed=0)
    return dt.dist.reduce_sum(len(next(iter(loader.until("1ep")))))


def resumed_by_hand(dataset, saved):
    sampler = DistributedSampler(dataset, seed=0)
    # the epoch is all that was saved, and it begins anew
    sampler.set_epoch(saved["epoch"])
    return [
        batch.tolist() for batch in DataLoader(dataset, batch_size=2, sampler=sampler)
    ]


def resumed_here(dataset, saved, mesh):
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=4, seed=0)
    loader.load_state_dict(saved)  # a checkpoint has it: step.init(model, optimizer, loader=loader)
    return [batch.tolist() for batch in loader.until("1ep")]


def contrast_by_hand(x):
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)  # copies, through which no gradient flows
    rows[dist.get_rank()] = x  # the usual patch: one of them is the original
    return (x @ torch.cat(rows).T).sum()


def contrast_here(x):
    return (x @ dt.dist.all_gather_with_grad(x).T).sum()
