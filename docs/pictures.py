"""Draws images/concepts.svg: ``python docs/pictures.py``."""

from pathlib import Path

import matplotlib.pyplot as plt

plt.rcParams.update({"svg.hashsalt": "hap", "font.size": 10, "font.family": "sans-serif", "svg.fonttype": "none"})
COLOURS = ("#3b82c4", "#2f9e77", "#e08a2e")
RANKS = ("fast", "medium", "slow")
SHARES = (7, 6, 3)


def batch(axes: plt.Axes) -> None:
    start = 0
    for rank, (share, colour) in enumerate(zip(SHARES, COLOURS, strict=True)):
        for atom in range(share):
            axes.add_patch(plt.Rectangle((start + atom, 0), 0.9, 0.9, color=colour))
        axes.text(start + share / 2, -0.35, f"{RANKS[rank]}: {share}", ha="center", va="top")
        start += share
    axes.set(xlim=(-0.2, 16.2), ylim=(-1.1, 1.2), title="a batch of 16, dealt 7 + 6 + 3")


def weight(axes: plt.Axes, title: str, kind: str) -> None:
    """Three ranks, each with its part of one weight; what is gathered for use in pale."""
    for rank, colour in enumerate(COLOURS):
        left = rank * 1.4
        axes.add_patch(plt.Rectangle((left, 0), 1.1, 1, fill=False, edgecolor="#8a8982"))
        height, bottom = SHARES[rank] / 16, 1 - sum(SHARES[: rank + 1]) / 16
        if kind == "copied":
            axes.add_patch(plt.Rectangle((left, 0), 1.1, 1, color=colour))
        else:
            if kind == "gathered":
                axes.add_patch(plt.Rectangle((left, 0), 1.1, 1, color=colour, alpha=0.25))
            axes.add_patch(plt.Rectangle((left, bottom), 1.1, height, color=colour))
    axes.set(xlim=(-0.1, 4.1), ylim=(-0.05, 1.05), title=title)


figure = plt.figure(figsize=(9, 3.6), layout="constrained")
top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.2])
batch(top.subplots())
for axes, (title, kind) in zip(
    bottom.subplots(1, 3),
    (("copied on every rank", "copied"), ("sharded, gathered for use", "gathered"), ("used in shards", "shards")),
    strict=True,
):
    weight(axes, title, kind)
for axes in figure.axes:
    axes.axis("off")
figure.savefig(Path(__file__).parent / "images" / "concepts.svg", metadata={"Date": None}, facecolor="white")
