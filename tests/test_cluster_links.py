"""What a cluster description may say of a link beside latency and bandwidth: rates by size of message, and its kind."""

import numpy as np
import pytest

from hap.cluster import ClusterSpec
from hap.errors import ClusterError
from hap.hosts import delay_s
from hap.purchases import changed
from hap.whatif import faster_links, shorter_latency

LAB = """\
name: lab
hosts:
  - name: a
    devices: [{gpu: V100-16GB, count: 2}]
    link: {kind: nvlink, bandwidth: 100GB/s, latency: 5us}
    network: {bandwidth: 1GB/s, latency: 100us, curve: {1MB: 500MB/s, 100kB: 250MB/s}}
  - name: b
    devices: [{gpu: V100-16GB}]
    network: {up: 1GB/s, down: 2GB/s, latency: 50us}
"""
PLAIN = LAB.replace("kind: nvlink, ", "").replace(", curve: {1MB: 500MB/s, 100kB: 250MB/s}", "")
PATH = "links: [{from: b, to: a, bandwidth: 500MB/s, curve: {1MB: 250MB/s}}]\n"


def lab(text: str = LAB) -> ClusterSpec:
    return ClusterSpec.from_yaml(text, "lab.yaml")


def test_a_curve_becomes_delays_smallest_message_first() -> None:
    """Beside 100 us and 1 GB/s: 100 kB take 400 us, not 200; 1 MB takes 2000 us, not 1100."""
    network = lab().hosts[0].network
    assert network is not None
    assert np.allclose(network.duplex.delays, [(100e3, 200e-6), (1e6, 900e-6)])
    at = [delay_s(network.duplex.delays, nbytes) for nbytes in (0, 50e3, 100e3, 550e3, 1e6, 1e9)]
    assert at == pytest.approx([0, 100e-6, 200e-6, 550e-6, 900e-6, 900e-6])


def test_the_fabric_knows_them_for_every_pair() -> None:
    """Between hosts the larger latency, 100 us, and the larger delay; 1 MB from b to a takes 4 ms by the path's own
    curve, which beside 100 us and 2 ms is 1.9 ms."""
    fabric = lab(LAB + PATH).fabric
    assert [size for size, _ in fabric.by_size] == [100e3, 1e6]
    at = fabric.by_size[1][1].latency_s
    assert at[0, 2] == pytest.approx(100e-6 + 900e-6) and at[2, 0] == pytest.approx(100e-6 + 1900e-6)
    assert at[0, 1] == 5e-6 and at[1, 1] == 0 and fabric.latency_s[0, 2] == 100e-6
    assert lab(PLAIN).fabric.by_size == ()


def test_a_description_is_written_and_read_back() -> None:
    first = lab(LAB + PATH)
    again = ClusterSpec.from_yaml(first.to_yaml())
    assert again == first and again.fingerprint == first.fingerprint
    slower = first.hosts[0].model_copy(update={"price_per_hour": 1.0})
    assert slower.network == first.hosts[0].network and slower.link == first.hosts[0].link


def test_the_fingerprint_tells_them_apart() -> None:
    texts = [PLAIN, LAB, LAB + PATH, LAB.replace("nvlink", "pcie"), LAB.replace("500MB/s", "400MB/s")]
    assert len({lab(text).fingerprint for text in texts}) == len(texts)


def test_the_order_of_links_is_not_told() -> None:
    back = "{from: a, to: b, bandwidth: 500MB/s, curve: {1MB: 200MB/s}}"
    path = PATH.partition("[")[2].partition("]")[0]
    spellings = [lab(f"{LAB}links: [{', '.join(paths)}]\n") for paths in ((back, path), (path, back))]
    assert spellings[0].fingerprint == spellings[1].fingerprint
    swapped = lab(f"{LAB}links: [{back.replace('200MB/s', '250MB/s')}, {path.replace('250MB/s', '200MB/s')}]\n")
    assert swapped.fingerprint != spellings[0].fingerprint


def test_a_curve_towards_nobody_slows_nothing() -> None:
    """A host alone has a network for what is summed over hosts. Inside, NCCL is asked as ever."""
    network = LAB.partition("    network")[2].partition("\n")[0]
    found = lab(f"hosts:\n  - name: a\n    devices: [{{gpu: T4, count: 2}}]\n    link: pcie3\n    network{network}\n")
    assert found.fabric.by_size == () and found.nvidia is not None
    plain = found.model_copy(update={"hosts": (found.hosts[0].model_copy(update={"network": None}),)})
    assert plain.fingerprint != found.fingerprint


def test_a_kind_is_what_nccl_asks() -> None:
    only = LAB.replace(", curve: {1MB: 500MB/s, 100kB: 250MB/s}", "")
    found = lab(only).nvidia
    assert found is not None and (found.inside, found.oldest, found.most_on_a_host) == ("nvlink", 70, 2)
    assert lab(PLAIN).nvidia is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "1MB: 500MB/s",
            "1MB: 950MB/s",
            "network: curve: 1MB at 950MB/s is more than latency and bandwidth allow, 909.1",
        ),
        ("{1MB: 500MB/s, 100kB: 250MB/s}", "{}", "network.curve: expected rates by the size of a message, such as"),
        ("{1MB: 500MB/s, 100kB: 250MB/s}", "500MB/s", "network.curve: expected rates by the size of a message"),
        ("100kB: 250MB/s", "0.1MB: 250MB/s, 100kB: 250MB/s", "network.curve: a size is given twice"),
        ("100kB: 250MB/s", "100: 250MB/s", "network.curve: 100 has no unit; expected a size"),
        ("100kB: 250MB/s", "100kB: 250", "network.curve: 250 has no unit; expected a rate"),
        ("kind: nvlink", "kind: nvlinks", "link.kind: must be nvlink or pcie, not 'nvlinks'"),
    ],
)
def test_a_mistake_gets_one_clear_line(old: str, new: str, message: str) -> None:
    assert old in LAB
    with pytest.raises(ClusterError) as e:
        lab(LAB.replace(old, new))
    assert str(e.value).startswith(f"lab.yaml: host 'a': {message}") and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth: 500MB/s, ", "latency: 1ms, ", "a curve needs a bandwidth, that of the largest messages"),
        ("1MB: 250MB/s", "1MB: 490MB/s", "curve: 1MB at 490MB/s is more than latency and bandwidth allow, 476.2MB/s"),
    ],
)
def test_a_mistake_on_a_path_does_too(old: str, new: str, message: str) -> None:
    with pytest.raises(ClusterError) as e:
        lab(LAB + PATH.replace(old, new))
    assert str(e.value) == f"lab.yaml: links[0]: {message}"


def test_a_faster_link_is_still_of_its_kind() -> None:
    """What-ifs write links in numbers: NCCL is asked about the same kind, and a curve stays."""
    only = LAB.replace(", curve: {1MB: 500MB/s, 100kB: 250MB/s}", "").replace(
        "{kind: nvlink, bandwidth: 100GB/s, latency: 5us}", "nvlink"
    )
    for change in (lambda c: faster_links(c, 2.0), shorter_latency):
        found = change(lab(only)).nvidia
        assert found is not None and found.inside == "nvlink"
    curved = LAB.replace("latency: 5us", "latency: 5us, curve: {1MB: 10GB/s}")
    inside = faster_links(lab(curved), 2.0).hosts[0].inside
    assert inside is not None and inside.up_bytes_per_s == 200e9
    assert inside.delays == ((1e6, pytest.approx(1e6 / 10e9 - 5e-6 - 1e6 / 200e9)),)


def test_a_bought_link_keeps_what_a_network_says_of_small_messages() -> None:
    bought = changed(lab(LAB + PATH), [("link", "a-b=10GB/s")])
    network = bought.hosts[0].network
    assert network is not None and network.up == 10e9 and network.curve == {100_000: 250e6, 1_000_000: 500e6}
    assert [p.curve for p in bought.links] == [None, None]
