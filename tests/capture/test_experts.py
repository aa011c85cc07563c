"""Mixtures of experts: Hugging Face's as its configurations have them, and anybody's products with gathered weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hap.capture import capture
from hap.rules.check import missing
from tests.capture.equality import assert_equals_eager, count

PRODUCT, WEIGHT = "hap.expert_mm.default", "hap.expert_mm_weight.default"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mixture(kind: str, implementation: str | None = None) -> nn.Module:
    import transformers

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 19}
    if kind == "gpt_oss":
        shape |= {"head_dim": 8}
    config = transformers.AutoConfig.for_model(kind, **shape, max_position_embeddings=16)
    given = {} if implementation is None else {"experts_implementation": implementation}
    return transformers.AutoModelForCausalLM.from_config(config, **given)


def loss_of(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("implementation", [None, "eager", "batched_mm"])
def test_hugging_faces_experts_are_products_whatever_kernel_is_configured(
    kind: str, implementation: str | None
) -> None:
    """Weights as (experts, out, in), and as (experts, in, out) with biases; the default is grouped, in float32."""
    ids = torch.randint(0, 19, (3, 5))
    model = mixture(kind, implementation)
    graph = assert_equals_eager(model, {"input_ids": ids}, loss_fn=loss_of, targets=ids, tolerance=2e-6)
    assert (count(graph)[PRODUCT], count(graph)[WEIGHT]) == (4, 2)
    assert "aten.sort.default" not in count(graph)
    assert missing(graph) == ()


def test_hugging_faces_choice_of_a_kernel_is_its_own_again_afterwards() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as INTERFACE

    ids = torch.randint(0, 19, (3, 5))
    capture(mixture("mixtral"), {"input_ids": ids}, loss_fn=loss_of, example_targets=ids)
    with pytest.raises(ValueError, match="no attribute"):
        capture(mixture("mixtral"), {"input_ids": ids}, loss_fn=refusing, example_targets=ids)
    assert INTERFACE.get_interface("eager", len) is len


def refusing(output: Any, labels: torch.Tensor) -> torch.Tensor:
    raise ValueError("no attribute")


class Relations(nn.Module):
    """Every row by the matrix of its relation, from the left or from the right."""

    def __init__(self, relations: int, *, left: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(relations, 6, 4, dtype=torch.float64))
        self.before = nn.Linear(4, 4 if left else 6, dtype=torch.float64)
        self.left = left

    def forward(self, x: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        rows, own = self.before(x), self.weight[relation]
        if self.left:
            return torch.bmm(own, rows.unsqueeze(2)).squeeze(2)
        return torch.bmm(rows.unsqueeze(1), own).squeeze(1)


@pytest.mark.parametrize("left", [True, False])
def test_a_product_with_a_gathered_weight_gathers_nothing(left: bool) -> None:
    model, x, relation = Relations(3, left=left), torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 3
    graph = assert_equals_eager(model, (x, relation), loss_fn=lambda y: y.square().sum())
    assert (count(graph)[PRODUCT], count(graph)[WEIGHT]) == (2, 1)
    assert not {"aten.bmm.default", "aten.index.Tensor", "aten.index_put.default"} & set(count(graph))


def test_more_matrices_than_rows_are_gathered() -> None:
    """One product each would be more products than rows."""
    model, x, relation = Relations(8, left=True), torch.randn(7, 4, dtype=torch.float64), torch.arange(7)
    graph = assert_equals_eager(model, (x, relation), loss_fn=lambda y: y.square().sum())
    assert PRODUCT not in count(graph)


def test_several_rows_with_one_matrix_are_a_batched_product() -> None:
    class Several(Relations):
        def forward(self, x: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
            return torch.bmm(self.weight[relation], x)

    model, x = Several(3, left=True), torch.randn(7, 4, 5, dtype=torch.float64)
    graph = assert_equals_eager(model, (x, torch.arange(7) % 3), loss_fn=lambda y: y.square().sum())
    assert PRODUCT not in count(graph) and WEIGHT not in count(graph)


def test_a_weight_that_autocast_narrows_is_narrowed_whole() -> None:
    model = Relations(3, left=True).float()
    x, relation = torch.randn(7, 4), torch.arange(7) % 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = capture(model, (x, relation), loss_fn=lambda y: y.float().square().sum())
    (product, _) = (n for n in graph.nodes if n.op == PRODUCT)
    assert graph.meta(product.args[1]).dtype == torch.bfloat16
    (weight,) = (n for n in graph.nodes if n.op == WEIGHT)
    assert weight.meta.dtype == torch.bfloat16
    assert graph.meta(graph.gradients["weight"]).dtype == torch.float32


def test_outer_products_in_another_order_are_no_gradient_of_a_weight() -> None:
    """Rows and outer products change places: as many, but others."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3, 3, 1, dtype=torch.float64))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            made = torch.bmm(self.scale, x.unsqueeze(1)).transpose(0, 1)
            return x.new_zeros(2, 3, 5).index_put((at,), made, accumulate=True)

    x, at = torch.randn(3, 5, dtype=torch.float64), torch.tensor([1, 0, 1])
    graph = assert_equals_eager(Turned(), (x, at), loss_fn=lambda y: y.square().sum())
    assert "aten.index_put.default" in count(graph) and WEIGHT not in count(graph)


def test_a_library_without_the_interface_is_traced_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.integrations.moe  # noqa: F401

    monkeypatch.delattr("transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS")
    graph = capture(nn.Linear(4, 2), torch.randn(3, 4), loss_fn=lambda y: y.square().sum())
    assert "aten.mm.default" in count(graph)
