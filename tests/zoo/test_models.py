"""Every model of the zoo at its small size: no rule missing, and any sound strategies equal PyTorch on one device."""

import pytest

from benchmarks.zoo_models import ZOO, find
from hap.errors import PlanError
from hap.rules.check import missing
from tests.zoo.hosts import hosts_error
from tests.zoo.lockstep import TOLERANCE, captured, random_error

NAMES = [model.name for model in ZOO]
MIXED = {  # the module that mixes samples
    "whisper": "model.model.decoder.embed_positions",
}


@pytest.fixture(scope="module", params=NAMES)
def small(request):
    """One model after the other, each captured once."""
    return request.param, find(request.param).build("small")


def test_random_strategies_equal_one_device(small):
    name, case = small
    error, where = random_error(case, seed=NAMES.index(name))
    assert error <= TOLERANCE, where


def test_a_batch_dealt_to_hosts_equals_one_device(small):
    """Or is refused in a line, where the model mixes samples."""
    name, case = small
    if name not in MIXED:
        error, where = hosts_error(case, (3, 1, 2))
        assert error <= TOLERANCE, where
        return
    with pytest.raises(PlanError) as refusal:
        hosts_error(case, (3, 1, 2))
    assert str(refusal.value) == (
        f"aten.index_put.default in module {MIXED[name]!r} mixes the samples of a batch, so hosts cannot each run a "
        "part of it; plan on one axis"
    )


@pytest.mark.long
def test_no_rule_is_missing_at_the_published_size_where_operators_differ_most():
    for name in ("mixtral", "hap_vit_moe"):
        assert missing(captured(find(name).build("real"))) == ()


def test_a_small_case_is_the_same_every_time():
    first, second = (find("resnet50").build("small") for _ in range(2))
    assert first.inputs["pixel_values"].equal(second.inputs["pixel_values"])
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert a.equal(b)


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no model 'nonesuch' in the zoo; known: gpt2, bert"):
        find("nonesuch")


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2", 124.4),
        ("bert", 109.5),
        ("granite_moe", 1334.6),
        ("vit", 86.6),
        ("resnet50", 25.6),
        ("vgg19", 143.7),
        ("hap_vgg", 139.6),
        ("hap_vit", 56.8),
    ],
)
def test_published_sizes(name, millions):
    parameters = sum(p.numel() for p in find(name).build("real").model.parameters())
    assert round(parameters / 1e6, 1) == millions
