"""Models drawn at random equal one device, by any plan: see ``tests._support.models``."""

import pytest

from tests._support import models
from tests._support.models import Model, compare

OTHERS = [pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 200)]


@pytest.mark.parametrize("seed", [*range(12), *OTHERS])
def test_any_model_is_one_devices(seed):
    assert compare(seed) is None, Model(seed)


def test_the_comparison_sees_a_wrong_gradient(monkeypatch):
    run = models.run_lockstep

    def wrong(program, values):
        step = run(program, values)
        name = max(step.gradients, key=lambda n: float(step.gradients[n].abs().max()))
        step.gradients[name].view(-1)[0] += step.gradients[name].abs().max() / 1000
        return step

    monkeypatch.setattr(models, "run_lockstep", wrong)
    said = compare(0)
    assert said is not None and "is not one device's" in said
