"""Clip the gradient by its global norm."""

from __future__ import annotations

from dtrain.arguments import check_number
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.state import TrainState
from dtrain.step.metrics import unit_weight
from dtrain.step.optimizer import clip_grad_norm_
from dtrain.step.transform import Transform, UpdateFn
from dtrain.typing import Metric, Metrics, Schedule


def clip_by_norm(max_norm: float | Schedule, *, eps: float = 1e-6) -> Transform:
    """Scale the gradient to a global L2 norm of at most ``max_norm`` before the update.

    Adds the metric ``grad_norm``, the norm before clipping.

    Formula: ``grad = grad * min(1, max_norm / (norm(grad) + eps))``, with the norm over all parameters together

    Args:
        max_norm: number > 0 or a schedule.
        eps: addition to the norm in the quotient, >= 0.

    Mutates: ``.grad``, in the step.
    Collective: one all-reduce of a scalar per mesh axis that gradients are sharded on. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0, eps=0.0)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> state, metrics = step(state, torch.tensor([[3.0, 4.0]]))
        >>> (
        ...     metrics["grad_norm"].total.item(),
        ...     [round(value, 4) for value in model.weight[0].tolist()],
        ... )
        (5.0, [-0.6, -0.8])

    Raises:
        ConfigError: ``max_norm`` is not positive (a schedule is checked in each step), or ``eps`` is not a finite number >= 0.

    Source: Pascanu et al. 2013, arXiv:1211.5063, section 3.2.

    Suggested values:
        GPT-3 and other decoders: ``max_norm=1.0`` (Brown et al. 2020, arXiv:2005.14165, appendix B)
        BERT pre-training and fine-tuning: ``max_norm=1.0`` (Devlin et al. 2019, the authors' ``optimization.py``)
        LSTM language model, 650 and 1500 units: ``max_norm=5`` and ``10`` (Zaremba et al. 2014, arXiv:1409.2329, section 4.1)
    When not to use: the reported ``grad_norm`` exceeds ``max_norm`` in most steps. Then the limit acts as a second learning
        rate: lower the rate, or raise the limit.
    """
    limit = hyperparameter(max_norm, "clip_by_norm: max_norm", "(0, inf]")
    check_number("clip_by_norm", "eps", eps, minimum=0)

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            norm = clip_grad_norm_(state.params, limit(state.clock), eps=eps)
            # The norm of an empty set of gradients (a mask of frozen parameters) is on the host.
            norm = norm.to(state.device)
            return inner(state, {**metrics, "grad_norm": Metric(norm, unit_weight(norm.device))})

        return update_fn

    return Transform(name="clip_by_norm", update=update, hyperparameters=(limit,))
