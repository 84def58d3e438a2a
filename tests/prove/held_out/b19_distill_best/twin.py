"""Distil a wide teacher into a narrow student; the student of the best validation loss is written at the end."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F


def mlp(*sizes):
    mods = []
    for a, b in zip(sizes, sizes[1:]):
        mods += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    return torch.nn.Sequential(*mods[:-1])


def kd_loss(student_logits, teacher_logits, y, T=2.0, alpha=0.7):
    soft = F.kl_div(
        F.log_softmax(student_logits / T, -1), F.softmax(teacher_logits / T, -1), reduction="batchmean"
    ) * T * T
    return alpha * soft + (1 - alpha) * F.cross_entropy(student_logits, y)


def average_gradients(module, world):
    for p in module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


@torch.no_grad()
def val_loss(student, x, y):
    return F.cross_entropy(student(x), y).item()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2)
teacher, student = mlp(8, 64, 64, 4), mlp(8, 12, 4)
x = torch.randn(400, 8)
y = (x[:, :4] + 0.3 * x[:, 4:]).argmax(1)
train_x, train_y, val_x, val_y = x[:288], y[:288], x[288:], y[288:]

# the teacher is fitted first, in the same way on every process
t_opt = torch.optim.Adam(teacher.parameters(), lr=1e-2)
for _ in range(20):
    t_opt.zero_grad()
    F.cross_entropy(teacher(train_x), train_y).backward()
    t_opt.step()
teacher.requires_grad_(False)

opt = torch.optim.SGD(student.parameters(), lr=1.0, momentum=0.9)
best, best_state = float("inf"), None
batch = 36
for it in range(8):
    rows = torch.arange(it * batch, (it + 1) * batch)[rank::world]
    bx, by = train_x[rows], train_y[rows]
    loss = kd_loss(student(bx), teacher(bx), by)
    opt.zero_grad()
    loss.backward()
    average_gradients(student, world)
    opt.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    current = val_loss(student, val_x, val_y)
    if current < best:
        best = current
        best_state = {k: v.clone() for k, v in student.state_dict().items()}
    if rank == 0:
        print(f"{it}: distillation loss {mean.item() / world:.5f} val {current:.5f} best {best:.5f}")

student.load_state_dict(best_state)
if rank == 0:
    print(f"exported student, val {val_loss(student, val_x, val_y):.5f}")
    torch.save(best_state, "student.pt.tmp")
    os.replace("student.pt.tmp", "student.pt")
dist.destroy_process_group()
