# Character-level-ish LSTM trained with truncated BPTT. 12 long streams, hidden state carried from window to window.
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

STREAMS, WINDOW, HIDDEN, SYMBOLS, STEPS = 12, 15, 24, 9, 8
CKPT_DIR = "state"


class CharLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(SYMBOLS, 10)
        self.rnn = nn.LSTM(10, HIDDEN, batch_first=True)
        self.fc = nn.Linear(HIDDEN, SYMBOLS)

    def forward(self, x, hc):
        y, hc = self.rnn(self.emb(x), hc)
        return self.fc(y), hc


def make_streams():
    g = torch.Generator().manual_seed(2)
    jump = torch.randint(1, 4, (STREAMS, 1), generator=g)
    noise = (torch.rand(STREAMS, STEPS * WINDOW + 1, generator=g) < 0.1).long()
    t = torch.arange(STEPS * WINDOW + 1)
    return (jump * t + noise) % SYMBOLS


def gather_hidden(hc, world):
    out = []
    for part in hc:
        bufs = [torch.empty_like(part) for _ in range(world)]
        dist.all_gather(bufs, part.contiguous())
        out.append(torch.cat(bufs, 1))
    return out


def split_hidden(hc, rank, world):
    return tuple(t.chunk(world, 1)[rank].contiguous() for t in hc)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    model = DDP(CharLSTM())
    opt = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    loss_fn = nn.CrossEntropyLoss()
    text = make_streams().chunk(world)[rank]

    zeros = [torch.zeros(1, STREAMS, HIDDEN), torch.zeros(1, STREAMS, HIDDEN)]
    hc = split_hidden(zeros, rank, world)
    begin = 0
    path = os.path.join(CKPT_DIR, "lstm.pt")
    if os.path.isfile(path):
        saved = torch.load(path)
        model.module.load_state_dict(saved["weights"])
        opt.load_state_dict(saved["optimizer"])
        hc = split_hidden(saved["hidden"], rank, world)
        begin = saved["window"] + 1

    for w in range(begin, STEPS):
        lo = w * WINDOW
        x, y = text[:, lo:lo + WINDOW], text[:, lo + 1:lo + WINDOW + 1]
        logits, hc = model(x, hc)
        hc = tuple(t.detach() for t in hc)
        loss = loss_fn(logits.flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        full = gather_hidden(hc, world)
        if rank == 0:
            print("window %d: loss %.6f, |h| %.5f" % (w, mean.item() / world, full[0].norm().item()), flush=True)
            os.makedirs(CKPT_DIR, exist_ok=True)
            torch.save({
                "weights": model.module.state_dict(),
                "optimizer": opt.state_dict(),
                "hidden": full,
                "window": w,
            }, path + ".new")
            os.replace(path + ".new", path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
