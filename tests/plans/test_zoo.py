"""The project guards its own zoo: plans of small models, kept in ``plans/`` beside this file.

Where one got worse on purpose (a cost model that knows more, say): ``pytest tests/plans/test_zoo.py --hap-update``, and
the diff of the plans is reviewed with the change.
"""

from pathlib import Path

import pytest

from benchmarks.zoo_models.language import MODELS as LANGUAGE
from benchmarks.zoo_models.vision import MODELS as VISION
from hap.testing import HapPlan

CLUSTER = Path(__file__).with_name("unequal.yaml")
BUILDERS = {m.name: m.build for m in (*LANGUAGE, *VISION)}


@pytest.mark.parametrize("name", ["gpt2", "lstm", "vit", "vgg19"])
def test_zoo(name: str, hap_plan: HapPlan) -> None:
    case = BUILDERS[name]("small")
    hap_plan.check(
        case.model,
        CLUSTER,
        case.inputs,
        example_targets=case.targets,
        loss_fn=case.loss_fn,
        effort="quick",
        max_step_regression=0.02,
        max_memory_regression=0.05,
    )
