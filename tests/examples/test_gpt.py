"""The example model: shapes, causality, positions, construction without storage, sampling."""

import math

import pytest
import torch
from torch import nn

from helpers.gpt import GPT, Block, GPTConfig, Linear, Rotary, generate

SMALL = GPTConfig(n_layer=2, n_head=2, dim=16, max_seq=12)

# float32 sums of at most 64 terms of order 1, in an order that may differ with the shape of the matmul.
FLOAT32_REORDERING = 1e-5


def build(config: GPTConfig = SMALL, seed: int = 0) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT(config)


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("seq", [1, 5, 12])
def test_logits_have_one_row_per_byte(batch: int, seq: int) -> None:
    model = build()
    logits = model(random_bytes(batch, seq))
    assert logits.shape == (batch, seq, 256)
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_logits_depend_only_on_current_and_earlier_bytes() -> None:
    model = build()
    before = random_bytes(2, 12)
    after = before.clone()
    after[:, 6] = (after[:, 6] + 1) % 256
    with torch.no_grad():
        changed = (model(before) - model(after)).abs().amax(dim=-1)  # [batch, seq]
    assert (changed[:, :6] <= FLOAT32_REORDERING).all()
    assert (changed[:, 6:] > 10 * FLOAT32_REORDERING).all()


def test_order_of_the_context_matters() -> None:
    model = build()
    text = random_bytes(1, 8)
    swapped = text[:, [1, 0, *range(2, 8)]]
    with torch.no_grad():
        difference = (model(text) - model(swapped))[:, -1].abs().max()
    assert difference > 10 * FLOAT32_REORDERING


def test_logits_at_the_start_of_training_are_close_to_uniform_in_scale() -> None:
    logits = build(GPTConfig(n_layer=4, n_head=4, dim=64, max_seq=32))(random_bytes(4, 32))
    assert 0.05 < logits.std() < 2  # neither dead nor so sure of itself that the first loss is far above ln 256


def test_sequence_above_max_seq_is_refused() -> None:
    with pytest.raises(ValueError, match="seq <= max_seq, got 13 > 12"):
        build()(random_bytes(1, 13))


def test_rotary_keeps_norms_and_makes_products_depend_on_distance_only() -> None:
    rotary = Rotary(8, 16)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 8, generator=generator)
    # The same query and key at every position, so that products[i, j] is q at i times k at j.
    turned_q, turned_k = (rotary(x.expand(1, 1, 16, 8))[0, 0] for x in (q, k))
    products = turned_q @ turned_k.T
    for distance in range(-15, 16):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=FLOAT32_REORDERING, rtol=0)
    assert products[0].std() > 0.1  # and on the distance they do depend
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(16), atol=FLOAT32_REORDERING, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rotary_keeps_the_dtype(dtype: torch.dtype) -> None:
    assert Rotary(8, 16)(torch.ones(1, 1, 4, 8, dtype=dtype)).dtype == dtype


def test_rotary_leaves_position_zero_alone_and_is_not_saved() -> None:
    rotary = Rotary(8, 16)
    x = torch.arange(8.0).expand(1, 1, 1, 8)
    assert torch.equal(rotary(x), x)
    assert not rotary.state_dict()
    assert (rotary.dim, rotary.max_seq, rotary.base) == (8, 16, 10_000.0)


def test_model_built_on_meta_has_no_storage_and_equals_a_real_one_after_initialising_each_module() -> None:
    with torch.device("meta"):
        model = GPT(SMALL)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))

    for module in model.modules():
        owned = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not owned:
            continue
        module.to_empty(device="cpu", recurse=False)
        for tensor in owned:
            tensor.data.fill_(math.nan)  # shows every value that is not initialised below
        if isinstance(module, Rotary):
            module.__init__(dim=module.dim, max_seq=module.max_seq, base=module.base)  # type: ignore[misc]
        else:
            module.reset_parameters()

    real = build()
    for (name, tensor), (other_name, other) in zip(model.named_parameters(), real.named_parameters(), strict=True):
        assert name == other_name
        assert tensor.isfinite().all(), name
        if tensor.ndim == 1:
            assert torch.equal(tensor, other), name  # norms start at one
        else:
            assert tensor.std().item() == pytest.approx(other.std().item(), rel=0.2), name  # another draw of >= 256 numbers
    for (name, tensor), other in zip(model.named_buffers(), real.buffers(), strict=True):
        assert torch.equal(tensor, other), name
    assert model(random_bytes(2, 12)).isfinite().all()


def test_linear_keeps_the_scale_of_its_input_times_the_gain() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        y = Linear(256, 512, gain=0.5)(torch.randn(64, 256))
    assert y.std().item() == pytest.approx(0.5, rel=0.05)


def test_head_is_not_tied_to_the_embedding() -> None:
    model = build()
    assert model.head.weight is not model.embedding.weight
    assert [type(block) for block in model.blocks] == [Block, Block]
    assert len(list(model.parameters())) == len(list(model.named_parameters(remove_duplicate=False)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 0}, "n_layer >= 1, got n_layer=0"),
        ({"max_seq": 0}, "max_seq >= 1, got max_seq=0"),
        ({"dim": 18}, r"multiple of 2 \* n_head.*dim=18, n_head=2"),
    ],
    ids=["no-layers", "no-positions", "odd-head"],
)
def test_config_refuses_invalid_sizes(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{"n_layer": 2, "n_head": 2, "dim": 16, "max_seq": 12} | change)


class Successor(nn.Module):
    """Predicts byte + 1, and notes the shape of every window it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SMALL
        self.shown: list[tuple[int, ...]] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.shown.append(tuple(input_ids.shape))
        return 100 * nn.functional.one_hot((input_ids + 1) % 256, 256).float()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_continues_the_prompt_through_a_sliding_window(temperature: float) -> None:
    model = Successor()
    written = generate(model, b"ABCDEFGHIJ", max_new=5, temperature=temperature, seed=0, device="cpu")
    assert written == b"KLMNO"
    assert model.shown == [(1, 10), (1, 11), (1, 12), (1, 12), (1, 12)]
    assert model.training


def test_generate_depends_on_its_seed_only_and_leaves_the_global_generator_alone() -> None:
    model = build().eval()
    state = torch.get_rng_state()
    first, again, other = (generate(model, b"def ", max_new=20, temperature=1.0, seed=seed, device="cpu") for seed in (1, 1, 2))
    assert len(first) == 20
    assert first == again != other
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training


def test_generate_of_zero_tokens_returns_no_tokens() -> None:
    assert generate(build(), b"x", max_new=0, temperature=1.0, seed=0, device="cpu") == b""


def test_generate_restores_the_mode_when_a_forward_fails() -> None:
    model = build()
    model.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, b"x", max_new=1, temperature=1.0, seed=0, device="cpu")
    assert model.training


def test_generate_refuses_an_empty_prompt_and_a_negative_temperature() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        generate(build(), b"", max_new=1, temperature=1.0, seed=0, device="cpu")
    with pytest.raises(ValueError, match="temperature >= 0, got temperature=-1"):
        generate(build(), b"x", max_new=1, temperature=-1.0, seed=0, device="cpu")


def test_a_few_steps_learn_a_repeated_sequence() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.tensor([list(b"abcdabcdabcd")])
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    assert generate(model, b"abcdab", max_new=4, temperature=0, seed=0, device="cpu") == b"cdab"
