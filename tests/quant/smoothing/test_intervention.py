from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.quant.smoothing.intervention import (
    UNKNOWN,
    UNREACHED,
    Intervention,
    channel_map,
    spread,
)
from llmopt.quant.smoothing.small_model import NUM_TOKENS, RandomModel
from torch import nn

WIDTH = 8


class Toy(nn.Module):
    """One layer: a norm, a gated MLP, and what a test puts between its `up` and `down`."""

    def __init__(self, between: Any = lambda x: x):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(self.between(self.up(y)) * torch.sigmoid(self.gate(y)))


class Whole(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(32, WIDTH), layer

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> tuple[torch.Tensor]:
        return (self.layer(self.embedding(input_ids)),)


def trials(layer: nn.Module) -> Intervention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        model = Whole(layer).requires_grad_(False)
    return Intervention(RandomModel(model, [layer], [{}], torch.arange(NUM_TOKENS)[None]))


@pytest.mark.parametrize("whole", [True, False])
def test_a_norm_with_a_bias_and_a_gated_product_can_be_folded(whole: bool) -> None:
    toy = trials(Toy())
    norm = toy.trial(0, "norm", whole=whole)
    assert norm is not None and norm.keys() == {"up", "gate"}
    assert norm["up"].tolist() == list(range(WIDTH))
    assert toy.trial(0, "up", whole=whole) is not None
    assert toy.trial(0, "gate", whole=whole) is None  # a sigmoid is between
    assert toy.trial(0, "down", whole=whole) is None  # nothing but the residual stream reads it
    assert toy.trial(0, "norm", offset=1.0, whole=whole) is None


def test_a_clamp_that_ordinary_inputs_do_not_reach_is_seen() -> None:
    assert trials(Toy(lambda x: x.clamp(-100, 100))).trial(0, "up") is None


def test_a_channel_that_is_read_by_no_linear_changes_the_logits() -> None:
    class Leaking(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.01 * self.norm(x)

    assert trials(Leaking()).trial(0, "norm") is None


def test_weights_are_restored_after_a_trial() -> None:
    layer = Toy()
    toy = trials(layer)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    toy.trial(0, "norm", offset=1.0)
    toy.trial(0, "up", slice(2, 5))
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_channels_are_told_by_their_scales() -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    x[:, 3] = 0
    scales = spread(2)
    y = torch.stack((x[:, 0] / scales[1], x[:, 1], x[:, 2] / scales[0], x[:, 3]), dim=1)
    channels = channel_map(y, x, scales)
    assert channels is not None
    assert channels.tolist() == [1, UNREACHED, 0, UNKNOWN]
    assert channel_map(y + 0.01, x, scales) is None
    assert channel_map(-y, x, scales) is None


def test_scales_are_distinct_and_none_is_near_one() -> None:
    for count in (1, 2, 7, 64):
        scales = spread(count)
        assert len(set(scales.tolist())) == count == len(scales)
        assert (scales.log().abs() > 1e-3).all()
