"""Padding by reflection and by the last value, and spectra, which are padded so: one device's loss and gradients, and
sequences are dealt out wherever their dim stands."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from hap.placement import Shard
from tests.zoo.layers import BATCH, WIDTH, Model, case, worst
from tests.zoo.lockstep import TOLERANCE, batch_strategies, possible

ROWS, IMAGES = (BATCH, WIDTH), (BATCH, 4, WIDTH)
WINDOW = torch.hann_window(4, dtype=torch.float64)


def spectrum(y, **options):
    return torch.stft(y, 4, 2, window=WINDOW, return_complex=True, **options).abs()


DEALT_OUT = {
    "sequences, reflected": (lambda y: functional.pad(y, (2, 1), mode="reflect"), ROWS),
    "sequences, the last value": (lambda y: functional.pad(y, (0, 3), mode="replicate"), ROWS),
    "sequences as channels of one sample": (lambda y: functional.pad(y[None], (2, 1), mode="reflect")[0], ROWS),
    "images of one channel": (lambda y: functional.pad(y, (1, 2, 2, 0), mode="reflect"), IMAGES),
    "channels of sequences": (lambda y: functional.pad(y, (1, 2), mode="reflect"), IMAGES),
    "a layer": (nn.ReflectionPad1d(2), ROWS),
    "zeros": (lambda y: functional.pad(y, (1, 2), value=3.0), ROWS),
    "around": (lambda y: functional.pad(y[:, None], (1, 2), mode="circular"), ROWS),
    "a spectrum": (spectrum, ROWS),
    "a spectrum of what is padded by the last value": (lambda y: spectrum(y, pad_mode="replicate"), ROWS),
    "a spectrum of what is padded by zeros": (lambda y: spectrum(y, pad_mode="constant"), ROWS),
    "a spectrum of what is not padded": (lambda y: spectrum(y, center=False), ROWS),
    "a spectrum of both sides, as a method": (
        lambda y: y.stft(4, window=WINDOW, onesided=False, normalized=True, return_complex=True).abs(),
        ROWS,
    ),
}


@pytest.mark.parametrize("name", DEALT_OUT)
def test_sequences_are_dealt_out(name):
    then, shape = DEALT_OUT[name]
    found = case(Model(then), shape)
    made = possible(found)
    dealt = batch_strategies(made)
    padded = [n.name for n in made.graph.nodes if "pad" in n.op or "fft" in n.op or "cat" in n.op]
    assert padded and all(isinstance(dealt[name].inputs[0], Shard) for name in padded)
    assert worst(found) <= TOLERANCE


def test_one_sequence():
    assert worst(case(Model(lambda y: spectrum(y.flatten())), ROWS)) <= TOLERANCE
