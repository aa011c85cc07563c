"""Models drawn at random equal one device, by any plan: see ``drawn``."""

import pytest

from tests.zoo import drawn
from tests.zoo.drawn import ALONG, ELEMENTWISE, PAIRS, SHAPES, WEIGHED, WITH_WORDS, Model, compare

OTHERS = [pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 200)]


@pytest.mark.parametrize("seed", [*range(12), *OTHERS])
def test_any_model_is_one_devices(seed):
    said = compare(seed)
    assert said is None, f"{said}\n{Model(seed)}"


def test_every_call_is_drawn():
    """A call that never can be made would be left out without a word."""
    names = {name for seed in range(150) for name, *_ in Model(seed).calls}
    wanted = {n for kind in (ELEMENTWISE, PAIRS, ALONG, SHAPES, WEIGHED, WITH_WORDS) for n in kind}
    assert wanted <= {name.removesuffix(", tanh") for name in names}


def test_the_comparison_sees_a_wrong_gradient(monkeypatch):
    run = drawn.run_lockstep

    def wrong(program, values):
        step = run(program, values)
        name = max(step.gradients, key=lambda n: float(step.gradients[n].abs().max()))
        step.gradients[name].view(-1)[0] += step.gradients[name].abs().max() / 1000
        return step

    monkeypatch.setattr(drawn, "run_lockstep", wrong)
    said = compare(0)
    assert said is not None and "is not one device's" in said
