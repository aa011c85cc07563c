"""What ``benchmarks/accuracy.py`` counts."""

from dataclasses import replace

import pytest

from benchmarks.accuracy_steps import Call, Row, distinct, kendall_tau

ONE = Row("equal", "mlp", "planner", 1.0, (1.1, 1.2, 1.3), 0.0, (Call("all_reduce", "ring", 8, 0.1, 0.2),))


def test_a_plan_under_two_names_is_one() -> None:
    """Another model's, another prediction's and other collectives' plans are plans of their own, however measured."""
    twin = replace(ONE, plan="data parallel", steps_s=(2.0, 2.0, 2.0))
    others = [replace(ONE, model="gpt"), replace(ONE, predicted_s=1.0 + 1e-15), replace(ONE, calls=())]
    others += [replace(ONE, calls=(replace(ONE.calls[0], decomposition="owners[0]"),))]
    assert distinct([ONE, twin, *others]) == [ONE, *others]


def test_tau_counts_pairs() -> None:
    """Of three pairs two agree, the one that does not is closer than half; what is predicted alike is not agreed on."""
    predicted, measured = [1.0, 2.0, 3.0], [1.0, 2.5, 2.0]
    assert kendall_tau(predicted, measured) == (pytest.approx(1 / 3), 3)
    assert kendall_tau(predicted, measured, tolerance=0.5) == (1.0, 2)
    assert kendall_tau([1.0, 1.0], [1.0, 2.0]) == (-1.0, 1)
