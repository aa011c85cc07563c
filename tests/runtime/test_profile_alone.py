"""Measuring a cluster of one device, which has no links and no collectives."""

from __future__ import annotations

import torch
from torch import nn

import hap
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.runtime.collectives import Communicator
from hap.runtime.profile import measure
from hap.runtime.profile_step import whole_calls

ONE = ClusterSpec.from_yaml(
    "name: one\nbackend: gloo\nhosts: [{name: h, devices: [{name: d, tflops: {float32: 1}, memory: 1GB, "
    "memory_bandwidth: 10GB/s}]}]\n"
)


def test_one_device_is_measured_and_planned_for() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.ones(4, 8)
    graph = capture(model, x, loss_fn=torch.sum)
    profile = measure(ONE, Communicator(), [(graph, whole_calls(graph))], optimizers=("sgd",))
    assert (len(profile.ranks), profile.links, profile.collectives) == (1, (), ())
    given = {"example_inputs": x, "loss_fn": torch.sum, "optimizer": "sgd", "effort": "quick"}
    plans = [hap.plan(model, ONE, profile=p, **given) for p in (profile, None)]  # type: ignore[arg-type]
    assert plans[0].strategies == plans[1].strategies
    assert plans[0].predicted.step_s != plans[1].predicted.step_s > 0
