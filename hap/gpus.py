"""The GPU catalogue: what the vendors' data sheets say, read from ``gpus.csv`` beside this file.

``float32`` is the plain (non-tensor-core) rate, ``tf32``, ``float16`` and ``bfloat16`` the dense tensor-core rate where
there is one (on P100 plain half precision). ``link_gb_s`` is one direction of all links of the card together.
``compute_capability`` is NVIDIA's (its table of CUDA GPUs; from memory). An empty cell is a number that the card does
not have or that nobody looked up; column ``status`` says which of the others were checked. Memory is counted in decimal
GB, a little less than the card really has.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16")
_VARIANTS = frozenset(("d", "laptop", "max", "mobile", "nvl", "super", "ti"))  # behind a model: another card's name


@dataclass(frozen=True)
class Gpu:
    """One row. ``tflops`` maps a dtype of ``DTYPES`` to TFLOP/s; ``link`` is nvlink, xgmi, pcie or "" (unknown);
    ``compute_capability`` is 80 for 8.0, None for a card that is not NVIDIA's."""

    name: str
    tflops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    link: str
    link_bytes_per_s: float | None
    compute_capability: int | None
    source: str
    status: str


@cache
def catalogue() -> Mapping[str, Gpu]:
    """Every GPU by name, in the file's order."""
    text = resources.files("hap").joinpath("gpus.csv").read_text(encoding="utf-8")
    return {row["gpu"]: _gpu(row) for row in csv.DictReader(text.splitlines())}


def find_gpu(name: str) -> Gpu:
    """The row of that name, in any case, with blanks or underscores for dashes. ValueError names the closest."""
    by_key = {key_of(n): gpu for n, gpu in catalogue().items()}
    if (found := by_key.get(key_of(name))) is not None:
        return found
    names = [gpu.name for key, gpu in by_key.items() if key_of(name) and key_of(name) in key]
    suggestion = suggest(name, names or catalogue())
    raise ValueError(f"unknown GPU type {name!r}{suggestion} (or give tflops, memory, memory_bandwidth)")


def find_device(name: str, memory_bytes: int) -> Gpu | None:
    """The row of a GPU that calls itself ``name`` ("NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", "Tesla T4") and
    says that it has ``memory_bytes``; None if the catalogue has none. The row's model ("A100", "RTX 3090") must be said
    as whole words and not be a part of another ("RTX 3090 Ti"), its memory be within a tenth, and a card that says it
    is on PCIe or on SXM be a row of such cards."""
    said = _words(name)
    on_pcie, on_sxm = "pcie" in said, any(word.startswith("sxm") for word in said)
    found: list[tuple[bool, float, Gpu]] = []
    for gpu in catalogue().values():
        model = [w for w in _words(gpu.name) if w != "pcie" and not w.endswith("gb")]
        away = abs(gpu.memory_bytes - memory_bytes) / gpu.memory_bytes
        begins = [i for i in range(len(said)) if said[i : i + len(model)] == model]
        alone = any(_VARIANTS.isdisjoint(said[i + len(model) :]) for i in begins)
        elsewhere = on_sxm if gpu.link == "pcie" else on_pcie
        if away <= 0.1 and alone and not elsewhere:
            found.append((("pcie" in _words(gpu.name)) != on_pcie, away, gpu))
    return min(found, key=lambda f: f[:2])[2] if found else None


def _words(name: str) -> list[str]:
    """ "NVIDIA GeForce RTX 2080 Ti" -> nvidia, geforce, rtx, 2080, ti."""
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def key_of(name: str) -> str:
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def suggest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean A or B?"``, or nothing when no known word is close."""
    by_key = {key_of(k): k for k in known}
    close = difflib.get_close_matches(key_of(word), by_key, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(by_key[c] for c in close)}?" if close else ""


def _gpu(row: Mapping[str, str]) -> Gpu:
    return Gpu(
        name=row["gpu"],
        tflops={d: float(row[d]) for d in DTYPES if row[d]},
        memory_bytes=round(float(row["memory_gb"]) * 1e9),
        memory_bandwidth_bytes_per_s=float(row["memory_bandwidth_gb_s"]) * 1e9,
        link=row["link"],
        link_bytes_per_s=float(row["link_gb_s"]) * 1e9 if row["link_gb_s"] else None,
        compute_capability=round(float(row["compute_capability"]) * 10) if row["compute_capability"] else None,
        source=row["source"],
        status=row["status"],
    )
