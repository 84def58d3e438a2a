"""States of models that train with plain SGD."""

from __future__ import annotations

import torch
from torch import nn

from dtrain.state import TrainState, init_state


def state_of(net: nn.Module) -> TrainState:
    return init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
