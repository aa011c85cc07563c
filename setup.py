"""Packaging. ``cost_models/``, ``search/`` and ``codegen/`` stand beside ``hap/`` and install inside it."""

from setuptools import find_packages, setup

ROOMS = ("cost_models", "search", "codegen")


def packages() -> dict[str, str]:
    """Package name -> folder, for every package that ships."""
    found = {name: name.replace(".", "/") for name in find_packages(include=["hap", "hap.*"])}
    for room in ROOMS:
        for name in [room, *(f"{room}.{sub}" for sub in find_packages(where=room))]:
            found[f"hap.{name}"] = name.replace(".", "/")
    return found


MAPPING = packages()
setup(packages=sorted(MAPPING), package_dir=MAPPING, package_data={"": ["py.typed", "*.csv", "*.json", "*.yaml"]})
