"""Next frame regression on toy videos with Accelerate, gradient accumulation and clipping."""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

GLOBAL_BATCH = 24
ACCUM = 2


class MovingDot(Dataset):
    """Three frames with a moving dot; the target is the fourth."""

    def __init__(self, n=192, size=8):
        g = torch.Generator().manual_seed(31)
        self.start = torch.randint(size, (n, 2), generator=g)
        self.speed = torch.randint(-1, 2, (n, 2), generator=g)
        self.size = size

    def __len__(self):
        return len(self.start)

    def __getitem__(self, i):
        frames = torch.zeros(4, self.size, self.size)
        for t in range(4):
            r, c = ((self.start[i] + t * self.speed[i]) % self.size).tolist()
            frames[t, r, c] = 5.0
        return frames[:3], frames[3:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1, padding_mode="circular")
        self.conv2 = nn.Conv2d(12, 12, 3, padding=1, padding_mode="circular")
        self.conv3 = nn.Conv2d(12, 1, 1)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        return self.conv3(x)


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUM)
    set_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    per_device = GLOBAL_BATCH // accelerator.num_processes // ACCUM
    loader = DataLoader(MovingDot(), batch_size=per_device, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step, running = 0, 0.0
    for frames, target in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(frames), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        running += accelerator.reduce(loss.detach(), reduction="mean").item() / ACCUM
        if accelerator.sync_gradients:
            step += 1
            accelerator.print(f"step {step} | mse {running:.6f}")
            running = 0.0
    accelerator.end_training()


if __name__ == "__main__":
    main()
