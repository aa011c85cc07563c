"""The zoo: models that users train, each at its published size and at one that a core runs in seconds."""

from __future__ import annotations

from benchmarks.zoo_models import generative, hap_paper, language, ranking, science, vision
from benchmarks.zoo_models.case import Case, Size, ZooModel

__all__ = ["ZOO", "Case", "Size", "ZooModel", "find"]

ZOO: tuple[ZooModel, ...] = (
    *language.MODELS,
    *vision.MODELS,
    *generative.MODELS,
    *science.MODELS,
    *ranking.MODELS,
    *hap_paper.MODELS,
)


def find(name: str) -> ZooModel:
    """The model of that name. ValueError naming the known ones."""
    for model in ZOO:
        if model.name == name:
            return model
    raise ValueError(f"no model {name!r} in the zoo; known: {', '.join(m.name for m in ZOO)}")
