"""What ``benchmarks/zoo.py`` compares on real ranks."""

import pytest

from benchmarks.zoo_models.equality import check


@pytest.mark.long
def test_frozen_parameters_are_compared_too() -> None:
    """Whisper's positions of the encoder are fixed."""
    found = check("whisper")
    assert found.equal and len(found.errors) == 3
