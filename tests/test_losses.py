import math
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtrain.errors import ConfigError
from dtrain.losses import (
    cross_entropy,
    linear_cross_entropy,
    mean_loss,
    soft_cross_entropy,
    sum_loss,
    transformers_loss,
)
from dtrain.testing.checks import memory_budget
from dtrain.transforms.batches.rand_augment import jensen_shannon


def test_cross_entropy_is_the_mean_when_divided():
    logits, targets = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    targets[0, :3] = -100
    loss = cross_entropy(logits, targets)
    assert loss.weight == 7
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss.total / loss.weight, expected)


def test_cross_entropy_accepts_a_custom_ignore_index():
    loss = cross_entropy(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 0]]), ignore_index=0)
    assert loss.weight == 1
    assert loss.total == pytest.approx(torch.tensor(4.0).log().item())


def test_cross_entropy_sums_low_precision_logits_in_float32():
    loss = cross_entropy(torch.zeros(1, 3, 4, dtype=torch.bfloat16), torch.zeros(1, 3, dtype=torch.int64))
    assert loss.total.dtype == torch.float32


def test_cross_entropy_of_only_ignored_targets_is_zero():
    loss = cross_entropy(torch.zeros(1, 3, 4), torch.full((1, 3), -100))
    assert (loss.total, loss.weight) == (0.0, 0)


def test_cross_entropy_refuses_mismatched_shapes():
    with pytest.raises(ConfigError, match=r"got \(2, 5, 7\) and \(2, 4\)"):
        cross_entropy(torch.zeros(2, 5, 7), torch.zeros(2, 4, dtype=torch.int64))


def test_mean_loss_is_mean_times_weight():
    loss = mean_loss(lambda model, batch: batch["x"].mean(), weight=lambda batch: batch["x"].numel())
    result = loss(None, {"x": torch.tensor([1.0, 2.0, 6.0])})
    assert (result.total, result.weight) == (9.0, 3)


def test_mean_loss_requires_a_weight():
    with pytest.raises(TypeError, match="weight"):
        mean_loss(lambda model, batch: batch)
    with pytest.raises(ConfigError, match="weight must be a function of the batch, got 3"):
        mean_loss(lambda model, batch: batch, weight=3)


def test_mean_loss_refuses_non_scalar_losses():
    loss = mean_loss(lambda model, batch: batch, weight=len)
    with pytest.raises(ConfigError, match=r"must return one number, got shape \(3,\)"):
        loss(None, torch.zeros(3))


CLASSES = 4096  # of 400 targets: 13 MB of logits, several blocks of rows


def full_loss(hidden, head, targets, *, smoothing, z_loss, token_weights):
    """Loss of ``linear_cross_entropy``, with all logits."""
    logits = F.linear(hidden, head.weight, getattr(head, "bias", None)).flatten(0, -2)
    options = {"ignore_index": -100, "label_smoothing": smoothing, "reduction": "none"}
    values = F.cross_entropy(logits, targets.flatten(), **options)
    penalties = z_loss * logits.logsumexp(1).square()
    weights = (targets != -100).flatten() if token_weights is None else (targets != -100).flatten() * token_weights.flatten()
    return ((values + penalties) * weights).sum(), weights.sum(), (penalties * weights).sum()


@pytest.mark.parametrize(
    ("bias", "options", "weighted"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"smoothing": 0.2}, False),
        (False, {"z_loss": 0.01}, False),
        (True, {"smoothing": 0.2, "z_loss": 0.01}, True),
    ],
    ids=str,
)
def test_linear_cross_entropy_equals_the_loss_of_all_logits(bias, options, weighted):
    head, hidden = nn.Linear(5, CLASSES, bias=bias, dtype=torch.float64), torch.randn(4, 100, 5, dtype=torch.float64)
    targets = torch.randint(CLASSES, (4, 100))
    targets[0, :7] = targets[3] = -100
    weights = torch.rand(4, 100, dtype=torch.float64) if weighted else None
    inputs = [hidden.requires_grad_(), *head.parameters()]
    loss = linear_cross_entropy(hidden, head, targets, token_weights=weights, **options)
    grads = torch.autograd.grad(3 * loss.total, inputs)
    total, weight, penalty = full_loss(
        hidden, head, targets, **{"smoothing": 0.0, "z_loss": 0.0, **options}, token_weights=weights
    )
    expected = torch.autograd.grad(3 * total, inputs)
    torch.testing.assert_close(loss.total, total, rtol=1e-12, atol=0)
    assert loss.weight == pytest.approx(float(weight), rel=1e-12)
    for grad, other in zip(grads, expected, strict=True):
        assert (grad - other).norm() <= 1e-12 * other.norm()
    if "z_loss" in options:
        torch.testing.assert_close(loss.aux["z_loss"][0], penalty, rtol=1e-12, atol=0)
        assert loss.aux["z_loss"][1] == loss.weight
    assert bool(loss.aux) == ("z_loss" in options)


def test_linear_cross_entropy_takes_less_than_a_sixteenth_of_the_logits():
    with memory_budget(2**40) as budget:
        hidden, head = torch.randn(2048, 2, requires_grad=True), nn.Linear(2, 10_240)
        targets = torch.randint(10_240, (2048,))
        before = budget.live
        linear_cross_entropy(hidden, head, targets, smoothing=0.1, z_loss=1e-4).total.backward()
        gradients = sum(x.grad.nbytes for x in (hidden, *head.parameters()))
        assert budget.peak - before - gradients <= 2048 * 10_240 * 4 / 16


def test_linear_cross_entropy_of_low_precision_sums_in_float32():
    torch.manual_seed(0)
    hidden, head = torch.randn(3, 50, 8, dtype=torch.bfloat16, requires_grad=True), nn.Linear(8, 300, dtype=torch.bfloat16)
    targets = torch.randint(300, (3, 50))
    loss = linear_cross_entropy(hidden, head, targets)
    (loss.total / 150).backward()
    assert (loss.total.dtype, hidden.grad.dtype, head.weight.grad.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    inputs = [hidden, *head.parameters()]
    full = cross_entropy(F.linear(hidden, head.weight, head.bias), targets)
    assert loss.total.item() == pytest.approx(full.total.item(), rel=1e-5)
    for grad, other in zip((x.grad for x in inputs), torch.autograd.grad(full.total / 150, inputs), strict=True):
        assert (grad - other).float().norm() <= 0.01 * other.float().norm()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = linear_cross_entropy(hidden.float(), head.float(), targets)
    assert mixed.total == loss.total


def test_linear_cross_entropy_without_gradients_or_targets():
    head, targets = nn.Linear(2, 3), torch.tensor([0, 2])
    with torch.no_grad():
        loss = linear_cross_entropy(torch.ones(2, 2), head, targets)
    assert not loss.total.requires_grad
    head.requires_grad_(False)
    hidden = torch.ones(2, 2, requires_grad=True)
    linear_cross_entropy(hidden, head, targets).total.backward()
    assert head.weight.grad is None
    assert hidden.grad.any()
    for none in (targets[:0], torch.full((2,), -100)):
        loss = linear_cross_entropy(hidden[: len(none)], nn.Embedding(3, 2), none)
        loss.total.backward()
        assert (loss.total, loss.weight) == (0.0, 0)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("head", "hidden", "targets", "options", "message"),
    [
        (Doubled(2, 3), (4, 2), (4,), {}, r"head must be an nn.Linear or an nn.Embedding .* got Doubled. Use dt.cross_entropy"),
        (nn.Linear(2, 3), (4, 3), (4,), {}, r"hidden must be \[\*, 2\], the inputs of head, got \(4, 3\)"),
        (nn.Linear(2, 3), (4, 2), (3,), {}, r"needs hidden \[\*, dim\] and targets \[\*\], got \(4, 2\) and \(3,\)"),
        (nn.Linear(2, 3), (4, 2), (4,), {"smoothing": 2}, r"smoothing must be a finite number .* got 2"),
        (nn.Linear(2, 3), (4, 2), (4,), {"z_loss": -1}, r"z_loss must be a finite number .* got -1"),
        (
            nn.Linear(2, 3),
            (4, 2),
            (4,),
            {"token_weights": torch.ones(3)},
            r"token_weights must have the shape of targets \(4,\)",
        ),
    ],
    ids=["forward", "dim", "rows", "smoothing", "z_loss", "weights"],
)
def test_linear_cross_entropy_refuses_other_heads_and_shapes(head, hidden, targets, options, message):
    with pytest.raises(ConfigError, match="linear_cross_entropy: " + message):
        linear_cross_entropy(torch.ones(hidden), head, torch.zeros(targets, dtype=torch.int64), **options)


def test_linear_cross_entropy_refuses_a_second_backward():
    loss = linear_cross_entropy(torch.ones(1, 2), nn.Linear(2, 3), torch.tensor([1]))
    loss.total.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="linear_cross_entropy: backward must run once per loss"):
        loss.total.backward()


SHAPES = pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 2)], ids=str)


@SHAPES
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_soft_cross_entropy_of_indices_matches_torch(shape, smoothing, weighted):
    logits, targets = torch.randn(*shape, 5, dtype=torch.float64), torch.randint(5, shape)
    targets.view(-1)[1] = -100
    weights = torch.rand(5, dtype=torch.float64) if weighted else None
    loss = soft_cross_entropy(logits, targets, smoothing=smoothing, class_weights=weights)
    expected = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), weight=weights, label_smoothing=smoothing)
    torch.testing.assert_close(loss.total / loss.weight, expected)


@SHAPES
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_soft_cross_entropy_of_one_hot_targets_equals_indices(shape, smoothing, weighted):
    logits, targets = torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, shape)
    hot = F.one_hot(targets, 5).double()
    targets.view(-1)[1], hot.view(-1, 5)[1] = -100, 0.0
    weights = torch.rand(5, dtype=torch.float64) if weighted else None
    one, other = (soft_cross_entropy(logits, t, smoothing=smoothing, class_weights=weights) for t in (targets, hot))
    torch.testing.assert_close(other.total, one.total)
    torch.testing.assert_close(other.weight, one.weight.double())
    (slope,), (expected,) = (torch.autograd.grad(loss.total, logits) for loss in (other, one))
    torch.testing.assert_close(slope, expected)


def test_soft_cross_entropy_weights_rows_by_target_sum():
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    loss = soft_cross_entropy(logits, torch.tensor([[0.5, 0.5], [0.25, 0.25]]))
    assert loss.weight == 1.5
    assert loss.total == pytest.approx(0.5 * math.log(4 / 3) + 0.5 * math.log(4) + 0.5 * math.log(2))


def test_soft_cross_entropy_accepts_ignore_index_and_low_precision():
    loss = soft_cross_entropy(torch.zeros(3, 4, dtype=torch.bfloat16), torch.tensor([0, 1, 0]), ignore_index=0)
    assert (loss.weight, loss.total.dtype) == (1, torch.float32)
    assert loss.total == pytest.approx(math.log(4.0))


def test_soft_cross_entropy_allocates_no_dense_targets_for_indices():
    logits, targets = torch.zeros(4, 1000), torch.zeros(4, dtype=torch.int64)
    with sizes_made() as sizes:
        soft_cross_entropy(logits, targets, smoothing=0.1)
    assert [size for size in sizes if size >= 4000] == [4000]  # the log-softmax


@contextmanager
def sizes_made():
    """Elements of every tensor that an operation makes anew inside."""
    made: list[int] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.extend(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t._base is None)
            return out

    with Mode():
        yield made


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), {}, r"targets must be class indices \(int64\) or probabilities .*got torch.int32"),
        (torch.zeros(3, dtype=torch.int64), {}, r"needs logits \[\*, classes\], .* got \(2, 4\) and \(3,\) torch.int64"),
        (torch.zeros(2, 3), {}, r"got \(2, 4\) and \(2, 3\) torch.float32"),
        (torch.zeros(2, dtype=torch.int64), {"smoothing": 1.5}, r"smoothing must be a finite number .* at most 1, got 1.5"),
        (torch.zeros(2, dtype=torch.int64), {"smoothing": True}, "at most 1, got True"),
        (
            torch.zeros(2, 4),
            {"class_weights": torch.ones(2, 1)},
            r"class_weights must have 4 elements, one per class, got shape \(2, 1\)",
        ),
        (
            torch.zeros(2, dtype=torch.int64),
            {"class_weights": torch.ones(3)},
            r"class_weights must have 4 elements, one per class, got shape \(3,\)",
        ),
    ],
    ids=["dtype", "indices", "probabilities", "smoothing", "bool", "weights of samples", "weights of other classes"],
)
def test_soft_cross_entropy_refuses_invalid_targets_and_options(targets, options, message):
    with pytest.raises(ConfigError, match=message):
        soft_cross_entropy(torch.zeros(2, 4), targets, **options)


def cut_logits() -> str:
    mesh = init_device_mesh("cpu", (2,))
    logits = distribute_tensor(torch.zeros(2, 4), mesh, [Shard(-1)])
    with pytest.raises(ConfigError, match=r"logits must not be sharded along the classes. Use dt.cross_entropy") as info:
        soft_cross_entropy(logits, torch.zeros(2, dtype=torch.int64))
    return type(info.value).__name__


def test_soft_cross_entropy_refuses_sharded_logits(ranks):
    assert ranks(2).run(cut_logits) == ["ConfigError"] * 2


def test_jensen_shannon_is_the_mean_divergence_from_the_mixture():
    views = [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
    loss = jensen_shannon(views)
    p = [view.softmax(-1) for view in views]
    middle = (p[0] + p[1] + p[2]) / 3
    expected = sum(F.kl_div(middle.log(), distribution, reduction="sum") for distribution in p) / 3
    torch.testing.assert_close(loss.total, expected)
    assert loss.weight == 4
    assert jensen_shannon([views[0], views[0]]).total.abs() < 1e-12


@pytest.mark.parametrize("views", [[], [torch.zeros(2, 3)], [torch.zeros(2, 3), torch.zeros(2, 4)], [torch.zeros(3)] * 2])
def test_jensen_shannon_refuses_views_of_invalid_shapes(views):
    with pytest.raises(ConfigError, match=r"needs logits \[\*, classes\] of two or more views of one shape, got \["):
        jensen_shannon(views)


def test_sum_loss_counts_the_items_and_sums_metrics():
    policy, value = torch.randn(3, 5, requires_grad=True), torch.rand(3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    loss = sum_loss(policy + 0.5 * value, mask, policy=policy, value=value)
    assert loss.weight == 9
    torch.testing.assert_close(loss.total, (policy + 0.5 * value)[mask.bool()].sum())
    assert loss.aux.keys() == {"policy", "value"}
    torch.testing.assert_close(loss.aux["value"][0] / loss.aux["value"][1], value[mask.bool()].mean())
    assert not loss.aux["policy"][0].requires_grad
    assert sum_loss(policy).weight == 15
    weights = torch.rand(3, 5)
    weighted = sum_loss(policy, weights)
    torch.testing.assert_close(weighted.total / weighted.weight, (policy * weights).sum() / weights.sum())


def test_sum_loss_ignores_masked_values_that_are_not_finite():
    values = torch.tensor([1.0, 0.0, 4.0], requires_grad=True)
    loss = sum_loss(values.log(), torch.tensor([True, False, True]))
    (slope,) = torch.autograd.grad(loss.total, values)
    assert loss.total.item() == pytest.approx(math.log(4.0))
    assert slope[[0, 2]].tolist() == [1.0, 0.25]


def test_sum_loss_sums_low_precision_in_float32():
    assert sum_loss(torch.ones(1000, dtype=torch.bfloat16)).total == 1000.0


@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.bfloat16, 1001), (torch.float16, 70_000), (torch.bool, 300), (torch.uint8, 300)]
)
def test_sum_loss_counts_a_mask_of_low_precision_exactly(dtype, count):
    loss = sum_loss(torch.ones(count), torch.ones(count, dtype=dtype))
    assert (float(loss.weight), float(loss.total)) == (count, count)


def test_sum_loss_refuses_a_mean_or_a_sum():
    with pytest.raises(ConfigError, match=r"sum_loss: .* Give one number per item, before any mean or sum"):
        sum_loss(torch.ones(3).mean())


def test_sum_loss_refuses_another_shape():
    with pytest.raises(
        ConfigError, match=r"sum_loss: kl must have the shape of values \(3,\), got \(\). Give one number per item"
    ):
        sum_loss(torch.zeros(3), kl=torch.zeros(()))
    with pytest.raises(ConfigError, match=r"sum_loss: mask must have the shape of values \(3, 2\), got \(3,\)"):
        sum_loss(torch.zeros(3, 2), torch.ones(3))


def tiny_transformer(kind):
    """A small model of transformers, and the shift of its labels."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 11}
    torch.manual_seed(0)
    if kind == "Llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), 1
    if kind == "GPT2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=11)), 1
    if kind == "T5":
        config = transformers.T5Config(
            d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=11, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config), 0
    config = transformers.BertConfig(**sizes, num_labels=11)
    return getattr(transformers, f"BertFor{kind}")(config), 0


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "T5", "MaskedLM", "TokenClassification", "SequenceClassification"])
def test_transformers_loss_is_the_exact_sum_of_the_labels_that_count(kind):
    model, shift = tiny_transformer(kind)
    model.double().eval()
    tokens = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone() if kind != "SequenceClassification" else tokens[:, 0].clone()
    if labels.ndim > 1:
        labels[0, 2:], labels[1, 4:], labels[2, 0] = -100, -100, -100
    batch = {"input_ids": tokens, "labels": labels}
    loss = transformers_loss(model, batch)
    logits = model(**batch).logits
    expected = cross_entropy(logits[:, :-1], labels[:, 1:]) if shift else cross_entropy(logits, labels)
    assert loss.weight == expected.weight
    torch.testing.assert_close(loss.total.double(), expected.total, rtol=1e-6, atol=1e-6)
    parts = [transformers_loss(model, {name: value[rows] for name, value in batch.items()}) for rows in (slice(1), slice(1, 3))]
    torch.testing.assert_close(parts[0].total + parts[1].total, loss.total, rtol=1e-6, atol=1e-6)
    assert parts[0].weight + parts[1].weight == loss.weight


def test_transformers_loss_of_no_label_is_zero_with_a_zero_gradient():
    model, _ = tiny_transformer("Llama")
    tokens = torch.ones(2, 4, dtype=torch.int64)
    loss = transformers_loss(model, {"input_ids": tokens, "labels": torch.full_like(tokens, -100)})
    loss.total.backward()
    assert (loss.total, loss.weight) == (0.0, 0)
    assert all(param.grad is None or not param.grad.any() for param in model.parameters())


class WithoutLoss(torch.nn.Module):
    def forward(self, labels):
        return labels


def test_transformers_loss_refuses_batches_and_models_without_labels():
    model, _ = tiny_transformer("Llama")
    with pytest.raises(ConfigError, match=r"batch must be a mapping with integer labels, got dict. Use dt.mean_loss"):
        transformers_loss(model, {"input_ids": torch.ones(1, 2, dtype=torch.int64)})
    with pytest.raises(ConfigError, match=r"got labels of torch.float32"):
        transformers_loss(model, {"labels": torch.ones(1)})
    tokens = torch.ones(1, 2, dtype=torch.int64)
    with pytest.raises(
        ConfigError, match=r"transformers_loss: the model must return one loss, got NoneType. Pass a model with"
    ):
        transformers_loss(model, {"input_ids": tokens, "labels": tokens, "return_dict": False})


@pytest.mark.parametrize("kind", ["T5", "MaskedLM", "TokenClassification", "SequenceClassification"])
def test_transformers_loss_without_a_counted_label_is_zero_for_models_with_a_mean(kind):
    model, _ = tiny_transformer(kind)
    tokens = torch.ones(2, 4, dtype=torch.int64)
    labels = torch.full_like(tokens[:, 0] if kind == "SequenceClassification" else tokens, -100)
    loss = transformers_loss(model, {"input_ids": tokens, "labels": labels})
    loss.total.backward()
    assert (loss.total, loss.weight) == (0.0, 0)
    assert all(param.grad is None or not param.grad.any() for param in model.parameters())


def models_of_other_losses():
    """Models of transformers whose loss is no mean over the labels that are not -100, or counts them in another way."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 11}
    bart = transformers.BartConfig(d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, vocab_size=11)
    image = {"hidden_sizes": [8] * 4, "decoder_hidden_size": 8, "depths": [1] * 4, "num_attention_heads": [1] * 4}
    return [
        transformers.BertForPreTraining(transformers.BertConfig(**sizes)),
        transformers.BertForMultipleChoice(transformers.BertConfig(**sizes)),
        transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_labels=1)),
        transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, problem_type="regression")),
        # Its labels are the next tokens already.
        transformers.BartForCausalLM(bart),
        transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**image)),
        WithoutLoss(),
    ]


def test_transformers_loss_refuses_models_whose_labels_it_cannot_count():
    for model in models_of_other_losses():
        with pytest.raises(ConfigError, match=rf"must have a loss .* got {type(model).__name__}.* Use dt\.mean_loss"):
            transformers_loss(model, {"input_ids": torch.ones(1, 2, dtype=torch.int64), "labels": torch.ones(1, 2).long()})


PROMPTS = {
    "PromptTuningConfig": {},
    "PromptEncoderConfig": {"encoder_hidden_size": 4},
    "MultitaskPromptTuningConfig": {},
    "PrefixTuningConfig": {},
    "LoraConfig": None,
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", PROMPTS)
def test_transformers_loss_counts_the_first_label_after_virtual_tokens(kind):
    peft = pytest.importorskip("peft")
    model, _ = tiny_transformer("Llama")
    options = {"r": 2, "target_modules": ["q_proj"]} if PROMPTS[kind] is None else {"num_virtual_tokens": 3, **PROMPTS[kind]}
    model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options)).double().eval()
    tokens = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens.masked_fill(torch.tensor([[False] * 3 + [True] * 3, [False] * 6, [True] + [False] * 5]), -100)
    batch = {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
    if kind.startswith("Multitask"):
        batch["task_ids"] = torch.zeros(3, dtype=torch.int64)
    loss, own = transformers_loss(model, batch), model(**batch).loss
    follows = kind not in ("PrefixTuningConfig", "LoraConfig")
    assert loss.weight == (labels if follows else labels[:, 1:]).ne(-100).sum()
    torch.testing.assert_close(loss.total / loss.weight, own, rtol=1e-6, atol=1e-6, check_dtype=False)
    parts = [transformers_loss(model, {name: value[rows] for name, value in batch.items()}) for rows in (slice(1), slice(1, 3))]
    torch.testing.assert_close(parts[0].total + parts[1].total, loss.total, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_transformers_loss_refuses_virtual_tokens_with_labels():
    peft = pytest.importorskip("peft")
    config = peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2])
    model = peft.get_peft_model(tiny_transformer("Llama")[0], config)
    tokens = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"got LlamaForCausalLM with loss_type 'ForCausalLM' and CPT of peft\. Use dt\.mean"):
        transformers_loss(model, {"input_ids": tokens, "labels": tokens})


def test_transformers_loss_refuses_a_loss_with_a_mean_over_the_microbatch_added():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 11}
    experts = {"intermediate_size": 16, "num_local_experts": 2, "output_router_logits": True}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts))
    tokens = torch.ones(1, 4, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    with pytest.raises(ConfigError, match=r"got one with aux_loss added.* Set model\.config\.output_router_logits = False"):
        transformers_loss(model, batch)
    model.config.output_router_logits = False
    assert transformers_loss(model, batch).weight == 3
    with pytest.raises(ConfigError, match="got one with aux_loss added"):
        transformers_loss(model, {**batch, "output_router_logits": True})
    model.router_aux_loss_coef = 0.0
    assert transformers_loss(model, {**batch, "output_router_logits": True}).weight == 3
    model.config.z_loss_coefficient = 0.1
    with pytest.raises(ConfigError, match=r"got one with z_loss added.*\(z_loss_coefficient = 0\)"):
        transformers_loss(model, batch)
