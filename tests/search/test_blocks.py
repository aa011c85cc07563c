"""Blocks by what is alive, and what to keep of them by a minimum cut: worked out on paper for a residual tower."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from hap.capture import capture
from hap.graph import Graph
from hap.search.blocks import find_blocks
from tests._support import gpt2
from tests.search.models import mlp

ROWS, WIDTH, INNER, LAYERS = 32, 8, 32, 4
ROW = 4 * ROWS  # bytes of a column


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@cache
def tower(rows: int = ROWS, width: int = WIDTH, layers: int = LAYERS) -> Graph:
    with torch.device("meta"):
        steps = [Layer(width) for _ in range(layers)]
        model, x = nn.Sequential(nn.Linear(width, width), *steps), torch.empty(rows, width)
    return capture(model, x, loss_fn=nn.functional.mse_loss, example_targets=x, name="tower")


def ops(graph: Graph, names: tuple[str, ...]) -> list[str]:
    return [graph.by_name[name].op.split(".")[1] for name in names]


def test_each_layer_is_a_block() -> None:
    blocks = find_blocks(tower())
    assert [b.label for b in blocks] == ["0 to 1", "2.norm to 2", "3.norm to 3", "4.norm to 4"]
    assert len({ops(tower(), b.calls["all"]).__repr__() for b in blocks[1:]}) == 1


def test_a_layer_keeps_what_its_backward_pass_reads() -> None:
    """Of a row: the norm's output, mean and rstd, what goes into GELU and what comes out; with what goes on to the next
    layer, whose norm reads it."""
    block = find_blocks(tower())[1]
    assert block.plain_bytes == ROW * (WIDTH + 2 + INNER + INNER + WIDTH)


def test_cheap_keeps_the_product_and_all_keeps_what_goes_on() -> None:
    block = find_blocks(tower())[1]
    assert block.kept_bytes == {"cheap": ROW * (INNER + WIDTH), "all": ROW * WIDTH}
    cheap, everything = (ops(tower(), block.calls[what]) for what in ("cheap", "all"))
    assert cheap.count("native_layer_norm") == 1 and cheap.count("gelu") == 1 and "mm" not in cheap
    assert everything.count("mm") == 1  # not the second product: nobody in the backward pass reads what it makes


def test_nothing_is_repeated_that_ends_a_block() -> None:
    graph = tower()
    repeated = {name for b in find_blocks(graph) for calls in b.calls.values() for name in calls}
    sums = [n for n in graph.nodes if n.op == "aten.add.Tensor" and n.phase == "forward"]
    residual = [n.name for n in sums if n.module in {str(1 + i) for i in range(LAYERS)}]
    assert len(residual) == LAYERS and not repeated.intersection(residual)


def test_a_relu_is_not_worth_repeating() -> None:
    """It would be made again from a product that would have to be kept in its place."""
    graph = mlp(batch=64, width=8, layers=4).graph
    assert all("cheap" not in b.calls for b in find_blocks(graph))


def test_layers_of_gpt2_are_found_without_their_names() -> None:
    """Both layers, in one block or in two each, and cut alike: in between, what attention made may be kept."""
    graph = gpt2.graph()
    blocks = [b for b in find_blocks(graph) if "attention" in ops(graph, b.calls.get("all", ()))]
    assert len(blocks) == 2
    tokens = 8 * gpt2.BATCH * gpt2.LENGTH  # bytes of a number for each
    assert all(b.kept_bytes["all"] == tokens * gpt2.WIDTH for b in blocks)
    assert all(b.kept_bytes["products"] == tokens * (2 * gpt2.WIDTH + gpt2.HEADS) for b in blocks)
    assert all("attention" not in ops(graph, b.calls["products"]) for b in blocks)
