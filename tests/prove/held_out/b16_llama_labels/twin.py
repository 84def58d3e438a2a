import torch, os
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

seq_len, vocab = 16, 40
global_batch, max_steps = 18, 7

dist.init_process_group(backend="gloo")
rank = int(os.environ["RANK"])
world = int(os.environ["WORLD_SIZE"])
per_rank = global_batch // world

torch.manual_seed(1337)
config = LlamaConfig(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=seq_len + 1, pad_token_id=0)
model = DDP(LlamaForCausalLM(config))
decay, rest = [], []
for p in model.parameters():
    (decay if p.dim() > 1 else rest).append(p)
opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                        lr=3e-3, betas=(0.9, 0.95))
sched = get_cosine_schedule_with_warmup(opt, 2, max_steps)

# a small Markov chain as "text"
g = torch.Generator().manual_seed(3)
table = torch.randint(1, vocab, (vocab, 3), generator=g)


def get_batch(step):
    gen = torch.Generator().manual_seed(1000 + step)
    tok = torch.randint(1, vocab, (global_batch,), generator=gen)
    out = [tok]
    for _ in range(seq_len):
        tok = table[tok, torch.randint(3, (global_batch,), generator=gen)]
        out.append(tok)
    chunk = torch.stack(out, 1)
    return chunk[rank * per_rank : (rank + 1) * per_rank]


for step in range(max_steps):
    chunk = get_batch(step)
    loss = model(input_ids=chunk, labels=chunk, use_cache=False).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    opt.zero_grad(set_to_none=True)
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"iter {step}: loss {total.item() / world:.4f}, grad norm {norm.item():.4f}")
dist.destroy_process_group()
