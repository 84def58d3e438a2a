"""Train a decoder whose ranks share each batch and compute one part of its sequences each: base of other scripts here."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dtrain as dt

VOCAB, LENGTH, DIM = 16, 12, 8


def own_part(info):
    size = LENGTH // info.world_size
    return slice(info.rank * size, (info.rank + 1) * size)


def whole(part):
    """Gather ``[batch, part of the length, ...]`` of all ranks."""
    return dt.dist.all_gather_with_grad(part.transpose(0, 1)).transpose(0, 1)


def attend(info, query, key, value, documents):
    places = torch.arange(LENGTH)
    mask = (places >= places[:, None]).T & (documents[:, :, None] == documents[:, None])
    return F.scaled_dot_product_attention(query, whole(key), whole(value), attn_mask=mask[:, own_part(info)])


def loss_of(info, model, tokens, labels, positions, documents):
    part = own_part(info)
    logits = model(tokens[:, part], positions[:, part], documents)
    total = F.cross_entropy(logits.flatten(0, 1), labels[:, part].flatten(), reduction="sum")
    return total / (labels != -100).sum() * info.world_size  # DDP takes the mean over ranks


class Decoder(nn.Module):
    def __init__(self, info, attend):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.qkv, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, VOCAB)
        self.info, self.attend = info, attend

    def forward(self, tokens, positions, documents):
        x = self.embed(tokens) + self.position(positions)
        return self.head(x + self.attend(self.info, *self.qkv(x).chunk(3, -1), documents))


def dataset(cut):
    """Sequences of two documents, of which the second begins at ``cut``."""
    tokens = torch.randint(VOCAB, (48, LENGTH), generator=torch.Generator().manual_seed(1))
    places = torch.arange(LENGTH).expand(48, -1)
    labels = tokens.roll(-1, 1).masked_fill((places == cut - 1) | (places == LENGTH - 1), -100)
    return TensorDataset(tokens, labels, places - cut * (places >= cut), (places >= cut).long())


def train(attend=attend, loss_of=loss_of, cut=LENGTH):
    with dt.init_dist() as info:
        torch.manual_seed(0)
        model = Decoder(info, attend)
        if info.world_size > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = DataLoader(dataset(cut), 12, shuffle=True, generator=torch.Generator().manual_seed(2))
        for number, batch in enumerate(loader, start=1):
            loss = loss_of(info, model, *batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shown = dt.dist.reduce_mean(loss.detach())
            if info.rank == 0:
                print(f"step {number} loss {shown:.6f}")
