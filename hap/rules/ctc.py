"""The rule of the CTC loss: sequences are independent, time and classes stay whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Row, Rule, partial_rows


def ctc(call: Call) -> Iterator[Row]:
    """``(log_probs (T, N, C), targets (N, S), input_lengths (N,), target_lengths (N,), ...) -> (N,)``."""
    yield Row((Dim(1), Dim(0), Dim(0), Dim(0)), (Dim(0),))


def ctc_backward(call: Call) -> Iterator[Row]:
    """``(grad (N,), log_probs, targets, ...) -> (T, N, C)``; linear in grad."""
    yield Row((Dim(0), Dim(1), Dim(0), Dim(0), Dim(0)), (Dim(1),))
    yield from partial_rows(call, ("PRRRR",))


RULES: Mapping[str, Rule] = {"hap.ctc.default": ctc, "hap.ctc_backward.default": ctc_backward}
