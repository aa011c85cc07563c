"""What-if: edits of a cluster by the words of the command line, and the ranking of the variants."""

import json

import pytest
import torch

from hap.build import BuiltModel
from hap.cluster import ClusterSpec
from hap.errors import ClusterError
from hap.purchases import ALL, NOW, Change, Ranking, Variant, changed, compare
from tests.report.plans import cluster_of_four

THREE = """
name: three
hosts:
  - {name: a-1, devices: [{gpu: T4}], network: {bandwidth: 1GB/s, latency: 10us}}
  - {name: b, devices: [{gpu: T4}], network: {bandwidth: 2GB/s, latency: 10us}}
  - {name: c, devices: [{gpu: T4}], network: {bandwidth: 4GB/s, latency: 10us}}
"""


def three() -> ClusterSpec:
    return ClusterSpec.from_yaml(THREE)


def test_an_added_host() -> None:
    found = changed(three(), [("add", "8xA100-40GB@12.5")])
    host = found.hosts[-1]
    assert (host.name, host.size, host.link, host.price_per_hour) == ("new-1", 8, "nvlink", 12.5)
    assert found.link(2, 3).bandwidth_bytes_per_s == 4e9  # the fastest network there is
    assert changed(three(), [("add", "2xT4")]).hosts[-1].link == "pcie4"
    assert [h.name for h in changed(three(), [("add", "1xT4"), ("add", "1xT4")]).hosts[3:]] == ["new-1", "new-2"]


def test_a_host_less_takes_its_links_along() -> None:
    linked = changed(three(), [("link", "b-c=500MB/s")])
    found = changed(linked, [("without", "c")])
    assert [h.name for h in found.hosts] == ["a-1", "b"] and found.links == ()


def test_a_slower_link_is_a_limit() -> None:
    found = changed(three(), [("link", "a-1-b=500MB/s")])
    assert found.link(0, 1).bandwidth_bytes_per_s == found.link(1, 0).bandwidth_bytes_per_s == 5e8
    assert found.link(0, 2).bandwidth_bytes_per_s == 1e9


def test_a_faster_link_changes_that_pair_alone() -> None:
    found = changed(three(), [("link", "a-1-b=24Gbit/s")])
    assert found.link(0, 1).bandwidth_bytes_per_s == found.link(1, 0).bandwidth_bytes_per_s == 3e9
    assert found.link(0, 2).bandwidth_bytes_per_s == found.link(2, 0).bandwidth_bytes_per_s == 1e9
    assert found.link(1, 2).bandwidth_bytes_per_s == found.link(2, 1).bandwidth_bytes_per_s == 2e9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("add", "A100"), "expected a number and a GPU"),
        (("add", "2xA100-4GB"), "A100"),
        (("without", "d"), r"no host 'd'.*\(hosts: a-1, b, c\)"),
        (("link", "a-b=1GB/s"), "expected HOST-HOST=RATE"),
        (("link", "b-c=1"), "has no unit"),
        (("link", "b-c"), "expected a rate"),
    ],
)
def test_what_makes_no_sense(change: Change, says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        changed(three(), [change])


def test_the_last_host_stays() -> None:
    with pytest.raises(ClusterError, match="no host would be left"):
        changed(three(), [("without", "a-1"), ("without", "b"), ("without", "c")])


def test_the_ranking() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
        batch = torch.zeros(256, 512)
    built = BuiltModel(model, (batch,), None, lambda out: out.square().mean())
    changes = [("without", "small"), ("link", "big-small=8GB/s")]
    found = compare(built, cluster_of_four(), changes, optimizer="adamw", effort="quick")
    assert sorted(v.name for v in found.variants) == sorted([NOW, ALL, "link big-small=8GB/s", "without small"])
    rates = [v.samples_per_s or 0.0 for v in found.variants]
    assert rates == sorted(rates, reverse=True)
    by_name = {v.name: v for v in found.variants}
    assert (by_name[NOW].price_per_hour, by_name["without small"].price_per_hour) == (4.0, 3.0)
    assert by_name["link big-small=8GB/s"].price_per_hour is by_name[ALL].price_per_hour is None  # nobody says it
    assert by_name["link big-small=8GB/s"].samples_per_s >= by_name[NOW].samples_per_s  # type: ignore[operator]
    json.dumps(found.to_json())


def test_what_is_printed() -> None:
    fast, slow = Variant("add x", 3, 0.5, 20.0, 8.0), Variant(NOW, 2, 1.0, 10.0, 2.0)
    none = Variant("without y", 1, None, None, 1.0, "too small")
    lines = str(Ranking((fast, slow, none))).splitlines()
    assert lines[1].split() == ["add", "x", "3", "500", "ms", "20", "+100.0%", "8.00", "9", "k"]
    assert "does not fit: too small" in lines[3] and lines[-1] == f"most samples for the money: {NOW}"
