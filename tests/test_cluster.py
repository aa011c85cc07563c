"""Cluster files: what they mean, and one clear line for each way of getting them wrong."""

import pickle
from dataclasses import replace
from pathlib import Path

import pydantic
import pytest
import yaml

from hap.cluster import ClusterSpec, Link
from hap.errors import ClusterError
from hap.gpus import catalogue, find_device, find_gpu
from hap.units import format_rate, format_size, format_time, parse_rate, parse_size, parse_time

LAB = """
name: lab
backend: nccl
hosts:
  - name: big
    devices:
      - {gpu: A100-40GB, count: 2}
    link: nvlink
    network: {up: 10Gbit/s, down: 20Gbit/s, latency: 30us}
    price_per_hour: 6.5
  - name: small
    devices:
      - {name: box, tflops: {float32: 8}, memory: 16GB, memory_bandwidth: 300GB/s, launch: 7us}
    network: {bandwidth: 1Gbit/s, latency: 50us}
links:
  - {from: big, to: small, bandwidth: 500Mbit/s, latency: 1ms}
"""
EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.yaml"))


def lab(old: str = "", new: str = "") -> ClusterSpec:
    assert old in LAB
    return ClusterSpec.from_yaml(LAB.replace(old, new, 1) if old else LAB, "lab.yaml")


# ------------------------------------------------------------------------------------------------ meaning


def test_devices_are_numbered_through_the_hosts() -> None:
    devices = lab().devices
    assert [d.name for d in devices] == ["big/A100-40GB#0", "big/A100-40GB#1", "small/box#0"]
    assert [d.rank for d in devices] == [0, 1, 2]
    assert [lab().host_of(r) for r in range(3)] == ["big", "big", "small"]
    assert lab().world_size == 3


def test_catalogue_and_explicit_numbers() -> None:
    a100, _, box = lab().devices
    assert a100.tflops["bfloat16"] == 312 and a100.memory_bytes == 40 * 10**9
    assert a100.memory_bandwidth_bytes_per_s == pytest.approx(1.555e12) and a100.launch_s == pytest.approx(5e-6)
    assert dict(box.tflops) == {"float32": 8.0} and box.memory_bytes == 16 * 10**9 and box.launch_s == 7e-6


def test_given_numbers_replace_the_catalogues() -> None:
    device = lab("gpu: A100-40GB,", "gpu: a100_40gb, memory: 30GB, tflops: {bfloat16: 200},").devices[0]
    assert device.gpu == "A100-40GB" and device.memory_bytes == 30 * 10**9
    assert device.tflops["bfloat16"] == 200 and device.tflops["float32"] == 19.5


def test_a_link_is_the_least_of_up_down_and_its_own_limit() -> None:
    cluster = lab()
    assert cluster.link(0, 1) == Link(0.8 * 300e9, 3.4e-6)  # NVLink inside
    assert cluster.link(0, 2) == Link(62.5e6, 1e-3)  # the links: entry, that direction only
    assert cluster.link(2, 0) == Link(125e6, 50e-6)  # small's up 1 Gbit/s < big's down 20 Gbit/s; larger latency
    assert cluster.network("big") == (1.25e9, 2.5e9)


def test_ports_are_shared_by_the_ranks_of_a_host() -> None:
    ports = {p.name: p for p in lab().fabric.ports}
    up = ports["big network up"]
    assert (up.bytes_per_s, up.senders, up.receivers) == (1.25e9, (0, 1), (2,))
    assert ports["link big to small"].bytes_per_s == 62.5e6
    assert ports["big/A100-40GB#1 in"].senders == (0,)
    assert lab().fabric.latency_s.tolist() == [[0, 3.4e-6, 1e-3], [3.4e-6, 0, 1e-3], [5e-5, 5e-5, 0]]


def test_world_size_is_checked() -> None:
    lab().check_world_size(3)
    with pytest.raises(ClusterError, match="4 ranks, but cluster 'lab' describes only 3 devices"):
        lab().check_world_size(4)
    with pytest.raises(ClusterError, match="2 ranks, but cluster 'lab' describes 3 devices"):
        lab().check_world_size(2)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_load_and_survive_a_round_trip(path: Path) -> None:
    cluster = ClusterSpec.load(path)
    assert ClusterSpec.from_yaml(cluster.to_yaml()).fingerprint == cluster.fingerprint
    assert pickle.loads(pickle.dumps(cluster)).fingerprint == cluster.fingerprint


def test_the_examples_are_the_clusters_they_say() -> None:
    by_name = {p.stem: ClusterSpec.load(p) for p in EXAMPLES}
    assert [d.tflops["float32"] / 0.005 for d in by_name["cluster-4"].devices] == [4, 4, 2, 1]
    paper = by_name["hap-paper"]
    assert [d.gpu.split("-")[0] for d in paper.devices] == ["V100"] * 16 + ["P100"] * 48
    assert paper.network("p100-3") == (1.3e9, 1.3e9)


# ------------------------------------------------------------------------------------------------ fingerprint


def test_fingerprint_ignores_how_it_is_written() -> None:
    reordered = yaml.safe_dump(yaml.safe_load(LAB), sort_keys=True)
    assert ClusterSpec.from_yaml(reordered).fingerprint == lab().fingerprint
    same = [
        ("10Gbit/s", "1.25 GB/s"),
        ("50us", "0.05ms"),
        ("memory: 16GB", "memory: 16000MB"),
        ("float32: 8", "float32: 8.0"),
    ]
    same += [("{gpu: A100-40GB, count: 2}", "{gpu: A100-40GB}\n      - {gpu: a100-40gb}"), ("backend: nccl\n", "")]
    for old, new in same:
        assert lab(old, new).fingerprint == lab().fingerprint, new


def test_fingerprint_sees_every_value() -> None:
    changes = [
        ("name: lab", "name: lab2"),
        ("backend: nccl", "backend: gloo"),
        ("name: big", "name: big2\n    link: nvlink"),
        ("A100-40GB", "A100-80GB"),
        ("count: 2", "count: 3"),
        ("link: nvlink", "link: pcie4"),
        ("up: 10Gbit/s", "up: 11Gbit/s"),
        ("down: 20Gbit/s", "down: 21Gbit/s"),
        ("latency: 30us", "latency: 31us"),
        ("price_per_hour: 6.5", "price_per_hour: 6.6"),
        ("float32: 8", "float32: 9"),
        ("float32: 8", "float64: 8"),
        ("memory: 16GB", "memory: 16GiB"),
        ("300GB/s", "301GB/s"),
        ("launch: 7us", "launch: 8us"),
        ("name: box", "name: crate"),
        ("500Mbit/s", "501Mbit/s"),
        ("latency: 1ms", "latency: 2ms"),
        ("bandwidth: 500Mbit/s, ", ""),
        ("from: big, to: small", "from: small, to: big"),
    ]
    seen = {lab().fingerprint}
    for old, new in changes:
        text = LAB.replace(old, new, 1)
        if old == "name: big":
            text = LAB.replace("big", "big2")
        seen.add(ClusterSpec.from_yaml(text).fingerprint)
    assert len(seen) == len(changes) + 1


def test_fingerprint_sees_what_nccl_s_own_model_asks() -> None:
    """It knows catalogue GPUs and named links, not others with the same numbers."""
    named = """
name: lab
hosts:
  - name: a
    devices: [{gpu: T4, count: 2}]
    link: pcie3
"""
    assert ClusterSpec.from_yaml(named).fingerprint == (
        "fe0f6bb9790d291fc0709aa61a389db30a5545f3adbbb5539f240807e2623d4d"
    ), "a name alone changes nothing"
    link = "{bandwidth: 12GB/s, latency: 5.7us}"
    device = "{name: T4, tflops: {float64: 0.253, float32: 8.1, float16: 65}, memory: 16GB, memory_bandwidth: 320GB/s,"
    changed = [named, named.replace("pcie3", link), named.replace("{gpu: T4,", device)]
    assert named not in changed[1:]
    for text, known in zip(changed, (True, False, False), strict=True):
        spec = ClusterSpec.from_yaml(text)
        assert (spec.nvidia is not None) == known
        assert spec.fabric.rates.tolist() == [12e9] * 4
        bare = [replace(d, outward=None) for d in spec.devices]
        assert bare == [replace(d, outward=None) for d in ClusterSpec.from_yaml(named).devices]
    assert len({ClusterSpec.from_yaml(text).fingerprint for text in changed}) == 3
    on_gloo = [ClusterSpec.from_yaml(text + "backend: gloo\n") for text in changed]
    assert len({spec.fingerprint for spec in on_gloo}) == 1, "where nobody asks, nothing is told apart"


# ------------------------------------------------------------------------------------------------ refusals

REFUSED = [
    ("A100-40GB", "A100", "host 'big': devices[0]: unknown GPU type 'A100'; did you mean A100-80GB or A100-40GB?"),
    ("10Gbit/s", "-10Gbit/s", "host 'big': network.up: must be more than zero, not -10Gbit/s"),
    ("10Gbit/s", "0Gbit/s", "host 'big': network.up: must be more than zero, not 0Gbit/s"),
    ("10Gbit/s", "10", "host 'big': network.up: 10 has no unit; expected a rate such as '10Gbit/s' or '900GB/s'"),
    ("10Gbit/s", "10Gbps", "host 'big': network.up: unknown unit 'Gbps'; expected a rate"),
    ("10Gbit/s", "fast", "host 'big': network.up: expected a rate such as '10Gbit/s' or '900GB/s', not 'fast'"),
    ("latency: 30us", "latency: 30", "host 'big': network.latency: 30 has no unit; expected a time such as '30us'"),
    (", latency: 30us", "", "host 'big': network: missing key 'latency'"),
    ("up: 10Gbit/s, ", "", "host 'big': network: give bandwidth, or both up and down"),
    ("memory: 16GB", "memory: 0.4B", "host 'small': devices[0].memory: must be a byte at least, not 0.4B"),
    ("300GB/s", "1e999999GB/s", "host 'small': devices[0].memory_bandwidth: 1e999999GB/s is too large"),
    ("memory: 16GB", "memory: 16Gbit", "host 'small': devices[0].memory: unknown unit 'Gbit'; expected a size"),
    ("name: small", "name: big", "host name 'big' is used twice"),
    ("network: {bandwidth: 1Gbit/s, latency: 50us}", "", "host 'small' has no network, so no link to big; add network"),
    ("    link: nvlink\n", "", "host 'big': its 2 devices have no link; add link: nvlink, pcie3 or"),
    ("link: nvlink", "link: nvlnk", "host 'big': unknown link 'nvlnk'; did you mean nvlink?"),
    ("A100-40GB", "T4", "host 'big': T4 has no nvlink in the catalogue; give {bandwidth, latency}"),
    ("price_per_hour", "price", "host 'big': unknown key 'price'; did you mean price_per_hour"),
    ("memory: 16GB", "mem: 16GB", "host 'small': devices[0]: unknown key 'mem'; did you mean memory"),
    ("hosts:", "host:", "unknown key 'host'; did you mean hosts?"),
    ("memory: 16GB, ", "", "host 'small': devices[0]: without a gpu from the catalogue it needs memory"),
    (
        "float32: 8",
        "float32: -8",
        "host 'small': devices[0].tflops: float32 must be a number of TFLOP/s, more than zero",
    ),
    ("float32: 8", "fp32: 8", "host 'small': devices[0].tflops: unknown dtype 'fp32'"),
    ("gpu: A100-40GB", "gpu: A100-40GB, name: mine", "host 'big': devices[0]: give gpu (from the catalogue) or name"),
    ("count: 2", "count: 0", "host 'big': devices[0].count: input should be greater than or equal to 1, not 0"),
    ("      - {gpu: A100-40GB, count: 2}", "      []", "host 'big': no devices"),
    ("backend: nccl", "backend: mpi", "backend: must be nccl or gloo, not 'mpi'"),
    ("to: small", "to: smal", "links[0]: unknown host 'smal'; did you mean small?"),
    ("to: small", "to: big", "links[0]: from and to are both 'big'"),
    ("bandwidth: 500Mbit/s, latency: 1ms", "", "links[0]: "),
    ("latency: 50us", "latency: 50us, latency: 60us", "not YAML, line 14: key 'latency' is given twice"),
    ("hosts:", "hosts: [", "not YAML, line "),
    (
        "price_per_hour: 6.5",
        "price_per_hour: -1",
        "host 'big': price_per_hour: input should be greater than or equal to 0",
    ),
    ("name: small", "name: sm all", "name: must be letters, digits"),
    ("{gpu: A100-40GB, count: 2}", "A100-40GB", "host 'big': devices[0]: expected keys and values (gpu, name, count"),
]


@pytest.mark.parametrize(("old", "new", "message"), REFUSED, ids=[f"{i}-{r[1][:20]}" for i, r in enumerate(REFUSED)])
def test_a_mistake_gets_one_clear_line(old: str, new: str, message: str) -> None:
    with pytest.raises(ClusterError) as e:
        lab(old, new)
    assert message in str(e.value) and str(e.value).startswith("lab.yaml: ") and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a cluster description"),
        ("[1, 2]", "not a cluster description"),
        ("hosts: []", "no hosts, so no devices"),
        ("hosts: 3", "hosts: expected a list, not 3"),
        ("hosts: [{devices: [{gpu: T4}]}]", "hosts[0]: missing key 'name'"),
        ("a: !!python/object:os.system 1", "not YAML, line 1"),
    ],
)
def test_what_is_no_cluster_is_refused(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=r"^cluster: ") as e:
        ClusterSpec.from_yaml(text)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none\.yaml: cannot read cluster \(No such file or directory\)"):
        ClusterSpec.load(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="cannot read cluster"):
        ClusterSpec.load(tmp_path / "binary.yaml")


# ------------------------------------------------------------------------------------------------ units, catalogue


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_rate, "10Gbit/s", 1.25e9),
        (parse_rate, "10 Gbit/s", 1.25e9),
        (parse_rate, "900GB/s", 9e11),
        (parse_rate, "1.5e3 kB/s", 1.5e6),
        (parse_rate, "1MiB/s", 1048576.0),
        (parse_size, "16GB", 16 * 10**9),
        (parse_size, "16GiB", 16 * 2**30),
        (parse_time, "30us", 3e-5),
        (parse_time, "30µs", 3e-5),
        (parse_time, "30\u03bcs", 3e-5),  # the Greek letter
        (parse_size, "0.6B", 1),
        (parse_time, "0s", 0.0),
    ],
)
def test_units(parse, text: str, value: float) -> None:  # type: ignore[no-untyped-def]
    assert parse(text) == value


@pytest.mark.parametrize("value", [1.25e9, 62.5e6, 1 / 3 * 1e9, 7.0, 0.1, 5e-324])
def test_formatting_loses_nothing(value: float) -> None:
    assert parse_rate(format_rate(value)) == value
    assert parse_time(format_time(value)) == value
    assert parse_size(format_size(17 * 10**9 + 1)) == 17 * 10**9 + 1


@pytest.mark.parametrize("text", [True, None, [], "10 G bit/s", "1e400GB/s", "nanGB/s", ""])
def test_no_quantity(text: object) -> None:
    with pytest.raises(ValueError):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1e999999GB", "1e999999GB is too large"),  # beyond what Decimal holds
        ("0.4B", "must be a byte at least, not 0.4B"),
        ("0.5B", "must be a byte at least, not 0.5B"),
        ("0B", "must be more than zero, not 0B"),
    ],
)
def test_no_size(text: str, message: str) -> None:
    with pytest.raises(ValueError) as e:
        parse_size(text)
    assert str(e.value) == message


def test_catalogue_is_complete_and_says_where_it_is_from() -> None:
    gpus = catalogue()
    assert len(gpus) >= 25
    for gpu in gpus.values():
        assert {"float32", "float16"} <= set(gpu.tflops) and gpu.source and gpu.status
        assert gpu.memory_bytes > 0 and gpu.memory_bandwidth_bytes_per_s > 0
    assert find_gpu("v100 16gb").tflops["float16"] == 125
    assert "bfloat16" not in find_gpu("V100-16GB").tflops


@pytest.mark.parametrize(
    ("name", "gib", "row"),
    [
        ("Tesla T4", 14.6, "T4"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16GB"),
        ("Tesla V100-PCIE-16GB", 15.8, "V100-PCIE-16GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 79.3, "A100-PCIE-80GB"),
        ("NVIDIA H100 80GB HBM3", 79.2, "H100"),
        ("NVIDIA H100 PCIe", 79.2, "H100-PCIE"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.75, "RTX-2080-TI"),
        ("NVIDIA RTX A6000", 47.5, "RTX-A6000"),
        ("NVIDIA L4", 22.2, "L4"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA A10", 22.1, "A10"),
        ("NVIDIA GeForce GTX 1080", 8.0, None),
        ("NVIDIA H100 NVL", 93.1, None),  # another card than both that are listed
        ("NVIDIA H200 NVL", 139.8, None),
        ("Tesla P100-PCIE-16GB", 15.9, "P100-PCIE"),
        ("NVIDIA A100-PCIE-40GB", 39.4, None),  # the row of that memory is of SXM
        ("NVIDIA A800 80GB PCIe", 79.3, None),
        ("NVIDIA H800 PCIe", 79.2, None),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX-4090"),
        ("NVIDIA GeForce RTX 4090 D", 23.6, None),
        ("NVIDIA GeForce RTX 3090", 23.7, "RTX-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.7, None),
    ],
)
def test_a_gpu_is_known_by_what_it_calls_itself(name: str, gib: float, row: str | None) -> None:
    found = find_device(name, round(gib * 2**30))
    assert (found.name if found else None) == row


def test_a_changed_copy_remembers_nothing_of_the_old_one() -> None:
    spec = ClusterSpec.from_yaml(LAB)
    before = spec.fingerprint, spec.world_size, spec.fabric
    other = spec.model_copy(update={"backend": "gloo" if spec.backend == "nccl" else "nccl"})
    assert other.fingerprint != before[0] and other.world_size == before[1]
    assert other.fingerprint == ClusterSpec.from_yaml(other.to_yaml()).fingerprint
    fewer = spec.model_copy(update={"hosts": spec.hosts[:1], "links": ()})
    assert fewer.world_size == spec.hosts[0].size == len(fewer.devices) < before[1]
    assert len(fewer.fabric.ports) < len(before[2].ports)
    assert spec.model_copy() == spec and spec.model_copy().fingerprint == before[0]
    assert spec.model_copy(deep=True).fingerprint == before[0]


def test_a_changed_copy_is_checked() -> None:
    spec = ClusterSpec.from_yaml(LAB)
    with pytest.raises(pydantic.ValidationError, match="no hosts"):
        spec.model_copy(update={"hosts": ()})
    with pytest.raises(pydantic.ValidationError, match="bakend"):
        spec.model_copy(update={"bakend": "gloo"})
