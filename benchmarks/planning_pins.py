"""Whether a pin that a user might try leads to a shorter step than the search finds by itself.

Small models (multi-layer perceptrons, transformer encoders, language models, convolutional networks) and clusters of up
to three unlike hosts with up to eight devices are drawn at random, by seeds. Each is planned as it is and with a few
simple pins. A pin takes choices away, so none should end shorter; where one does, by the step as run, the search passed
something by. Most of these graphs are small: there a search is not long, and latencies and bundles decide.

    python benchmarks/planning_pins.py [--seeds 0:100]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.common import Report, parse
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.errors import HapError
from hap.rules.choices import Choices, choices
from hap.search import Pins, plan_graph
from hap.search.judge import TIE

NAME = "planning_pins"
PINS = {
    "*: S(0)": {"*": "S(0)"},
    "*.weight: S(1)": {"*.weight": "S(1)"},
    "*.weight: S(0)": {"*.weight": "S(0)"},
    "*: R, args.*: S(0)": {"*": "R", "args.*": "S(0)"},
    "*: R": {"*": "R"},
    "args.*: S(0)": {"args.*": "S(0)"},
}
MOST_DEVICES = 8
HOST = """
  - name: h{0}
    devices: [{{name: k{1}, count: {2}, tflops: {{float32: {1}}}, memory: 64GB, memory_bandwidth: {3}GB/s}}]
    link: {{bandwidth: {4}, latency: 4us}}
    network: {{bandwidth: {5}, latency: {6}}}"""
LINKS = ("6GB/s", "12GB/s", "50GB/s", "300GB/s")
NETWORKS = ("0.1GB/s", "1GB/s", "3GB/s", "12GB/s", "50GB/s")


class Encoder(nn.Module):
    """Pre-norm layers and a head; with ``words`` a language model, whose head may have the embedding's weight."""

    def __init__(self, width: int, layers: int, words: int = 0, *, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width) if words else None
        layer = partial(nn.TransformerEncoderLayer, width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.Sequential(*(layer() for _ in range(layers)))
        self.head = nn.Linear(width, words or width, bias=not words)
        if tied and self.words is not None:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.words is None:
            loss: torch.Tensor = self.head(self.layers(x)).square().mean()
            return loss
        return F.cross_entropy(self.head(self.layers(self.words(x))).flatten(0, 1), x.flatten())


def layers_of(widths: Sequence[int]) -> nn.Sequential:
    made: list[nn.Module] = []
    for before, after in pairwise(widths):
        made += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*made[:-1])


def convolutions(channels: Sequence[int], hidden: int) -> nn.Sequential:
    """On images of 32 x 32."""
    made: list[nn.Module] = []
    for before, after in zip((3, *channels), channels, strict=False):
        made += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    inner = channels[-1] * (32 >> len(channels)) ** 2
    return nn.Sequential(*made, nn.Flatten(), nn.Linear(inner, hidden), nn.ReLU(), nn.Linear(hidden, 100))


def drawn_model(draw: random.Random) -> tuple[str, Choices]:
    kind = draw.choice(("perceptron", "encoder", "encoder", "language model", "convolutions"))
    with torch.device("meta"):
        module: nn.Module
        if kind == "perceptron":
            widths = [draw.choice((64, 256, 512, 1000, 2048, 4096)) for _ in range(draw.randint(3, 7))]
            module, x = layers_of(widths), torch.empty(draw.choice((16, 64, 256, 1024)), widths[0])
            name = "-".join(map(str, widths))
        elif kind == "encoder":
            width, layers = draw.choice((256, 512, 768, 1024)), draw.randint(1, 4)
            module = Encoder(width, layers)
            x = torch.empty(draw.choice((8, 16, 32, 64)), draw.choice((32, 64, 128, 256)), width)
            name = f"encoder, {layers} layers"
        elif kind == "language model":
            width, layers, words = draw.choice((128, 256, 512)), draw.randint(1, 3), draw.choice((1000, 8000, 30000))
            tied = draw.random() < 0.5
            module = Encoder(width, layers, words, tied=tied)
            x = torch.zeros(draw.choice((8, 32)), draw.choice((32, 128)), dtype=torch.int64)
            name = f"{'tied ' if tied else ''}language model, {layers} layers of {width}, {words} words"
        else:
            channels = [draw.choice((16, 32, 64, 128)) for _ in range(draw.randint(2, 4))]
            module = convolutions(channels, draw.choice((256, 1024, 4096)))
            x, name = torch.empty(draw.choice((16, 64, 256)), 3, 32, 32), f"convolutions {'-'.join(map(str, channels))}"
        loss = None if isinstance(module, Encoder) else lambda out: out.square().mean()
        return f"{name} on {'x'.join(map(str, x.shape))}", choices(capture(module, x, loss_fn=loss, name="drawn"))


def drawn_cluster(draw: random.Random) -> ClusterSpec:
    while True:
        hosts = [(draw.choice((2, 5, 10, 20, 40)), draw.choice((1, 1, 2, 4))) for _ in range(draw.randint(1, 3))]
        if 2 <= sum(count for _, count in hosts) <= MOST_DEVICES:
            break
    text = ""
    for i, (speed, count) in enumerate(hosts):
        ways = draw.choice(LINKS), draw.choice(NETWORKS), draw.choice(("5us", "30us", "200us"))
        text += HOST.format(i, speed, count, 60 * speed, *ways)
    return ClusterSpec.from_yaml(f"name: drawn\nbackend: {draw.choice(('gloo', 'nccl'))}\nhosts:{text}")


@dataclass(frozen=True)
class Beside:
    """Steps as run, in seconds: of the plan, and by pin of those that can be planned with it."""

    run_s: float
    pinned_s: dict[str, float]

    @property
    def shortest(self) -> str:
        """The pin whose plan is."""
        return min(self.pinned_s, key=self.pinned_s.__getitem__)

    def behind(self, pin: str) -> float:
        """How much longer the plan is than the one with a pin; below 0 if it is not."""
        return self.run_s / self.pinned_s[pin] - 1

    @property
    def worst(self) -> float:
        return self.behind(self.shortest)


def beside(found: Choices, on: ClusterSpec, pins: Mapping[str, Mapping[str, str]], case: str) -> Beside:
    """``case`` planned as it is, and with each of ``pins``, by name."""
    plan, pinned_s = plan_graph(found, on), dict[str, float]()
    for name, placements in pins.items():
        try:
            pinned_s[name] = plan_graph(found, on, pins=Pins(placements=placements)).predicted.as_run_s
        except HapError as e:
            print(f"{case}, {name}: {e}", flush=True)
    return Beside(plan.predicted.as_run_s, pinned_s)


@dataclass(frozen=True)
class Row:
    seed: int
    what: str
    where: str
    steps: Beside


def compared(seed: int) -> Row:
    draw = random.Random(seed)
    (what, found), on = drawn_model(draw), drawn_cluster(draw)
    counts = Counter((d.host, f"{d.tflops['float32']:g}") for d in on.devices)
    hosts = ", ".join(f"{count} x {speed} TFLOP/s" for (_, speed), count in counts.items())
    return Row(seed, what, f"{on.backend}, {hosts}", beside(found, on, PINS, f"seed {seed}"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:100", help="first and end, as in 0:100")
    options = parse(NAME, "Plans with simple pins beside the search's own.", parser=parser, selects=("--seeds",))
    report = Report(NAME, "Plans with simple pins beside the search's own", options)
    first, end = map(int, options.extra.seeds.split(":"))
    rows = []
    for seed in range(first, min(end, first + 10) if options.quick else end):
        rows.append(compared(seed))
        print(f"seed {seed}, {rows[-1].what}: {rows[-1].steps.worst:+.2%}", flush=True)
    report.figure("cases", len(rows))
    report.figure("a pin is shorter by over 1 %", sum(r.steps.worst > TIE for r in rows))
    report.figure("worst", max(r.steps.worst for r in rows))
    shown = sorted((r for r in rows if r.steps.worst > TIE), key=lambda r: -r.steps.worst)
    cells = [
        (r.seed, r.what, r.where, f"{1e3 * r.steps.run_s:.3f}", r.steps.shortest, f"{r.steps.worst:.1%}") for r in shown
    ]
    columns = ("seed", "model", "cluster", "as run ms", "shortest pin", "longer")
    report.table("Where a pin ends shorter by more than a tie", columns, cells)
    report.text("All others: no pin ends shorter by more than 1 %, which the search does not tell apart.")
    report.write(None)


if __name__ == "__main__":
    main()
