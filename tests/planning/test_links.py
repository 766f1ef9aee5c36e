"""Times of collectives: the two-level formula by hand, groups of layouts, measured rows, and order."""

import pytest

from hexad.config import HexadError
from hexad.planning.links import Cluster, Group, in_domain_seconds
from hexad.topology.hardware import (
    CollectiveConstants,
    Hardware,
    NetworkConstants,
    hardware_names,
    load_hardware,
)
from hexad.topology.layout import Layout

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


def simple(copies: float = 0.0, start: float = 0.0, hop: float = 0.0) -> Hardware:
    """100 GB/s inside domains of 8, 10 GB/s between them, no latency but what is asked for."""
    one = CollectiveConstants(start_us=start, hop_us=hop, gb_per_s=100, copies=copies)
    network = NetworkConstants(efficiency=0.5, latency_us=start, hop_us=hop, tree_hop_us=hop)
    hardware = load_hardware("h100")
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    constants = hardware.constants.model_copy(
        update={"collectives": dict.fromkeys(names, one), "network": network}
    )
    return hardware.model_copy(update={"constants": constants, "network_gb_per_s": 20.0})


@pytest.mark.parametrize(
    ("operation", "group", "gigabytes_inside", "gigabytes_outside"),
    [
        # 16 GB over 8 ranks of one domain
        ("all_gather", Group(8, 8, 1), 14, 0),
        ("reduce_scatter", Group(8, 8, 1), 14, 0),
        ("all_reduce", Group(8, 8, 1), 28, 0),
        ("all_to_all", Group(8, 8, 1), 14, 0),
        ("broadcast", Group(8, 8, 1), 16, 0),
        ("send", Group(2, 2, 1), 16, 0),
        # one rank in each of 4 domains: all that a rank sends leaves its domain
        ("all_gather", Group(4, 1, 4), 0, 12),
        ("all_reduce", Group(4, 1, 4), 0, 24),
        ("all_to_all", Group(4, 1, 4), 0, 12),
        ("send", Group(2, 1, 2), 0, 16),
        # 8 ranks in each of 4 domains: rings through 8 cards bring all but the receiver's 0.5 GB
        ("all_gather", Group(32, 8, 4), 14, 15.5 / 8),
        ("reduce_scatter", Group(32, 8, 4), 14, 15.5 / 8),
        ("all_reduce", Group(32, 8, 4), 28, 31 / 8),
        ("all_to_all", Group(32, 8, 4), 3.5, 12),
        ("broadcast", Group(32, 8, 4), 16, 2),
    ],
)
def test_bytes_of_two_levels_by_hand(
    operation: str, group: Group, gigabytes_inside: float, gigabytes_outside: float
) -> None:
    cluster = Cluster(simple(), 32)
    expected = max(gigabytes_inside / 100, gigabytes_outside / 10)
    assert cluster.seconds(operation, 16e9, group) == pytest.approx(expected)


def test_latency_by_hand() -> None:
    cluster = Cluster(simple(start=5, hop=1), 4096)

    def us(operation: str, group: Group) -> float:
        return cluster.seconds(operation, 1e-3, group) * 1e6

    assert us("all_gather", Group(8, 8, 1)) == pytest.approx(5 + 7)
    assert us("all_reduce", Group(8, 8, 1)) == pytest.approx(5 + 14)
    assert us("all_gather", Group(32, 8, 4)) == pytest.approx(5 + 5 + 4 * 7 + 3)  # one ring of all
    assert us("all_reduce", Group(4096, 8, 512)) == pytest.approx(
        5 + 5 + 2 * (7 + 9)
    )  # a tree between domains
    assert us("all_gather", Group(512, 1, 512)) == pytest.approx(5 + 5 + 9)
    assert us("send", Group(2, 1, 2)) == pytest.approx(5 + 5 + 1)
    assert us("all_gather", Group(1, 1, 1)) == 0


def test_the_faster_protocol_counts() -> None:
    constants = CollectiveConstants(start_us=10, gb_per_s=100, low_latency=0.5, switch_us=20, copies=1)
    # 2 ranks: half of the tensor is sent, half is copied. Both protocols take as long at 2 MB.
    for nbytes, expected in ((1e6, 10 + 20), (2e6, 10 + 40), (4e6, 10 + 20 + 40)):
        assert in_domain_seconds("all_gather", 2, nbytes, constants) == pytest.approx(expected * 1e-6)


@pytest.mark.parametrize("domain", [1, 3, 4, 6, 8, 12, 72])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(world=64, tensor=8, pipeline=2),
        Layout(world=144, tensor=4, context=3, pipeline=2),
        Layout(world=96, tensor=2, context=2, pipeline=4, expert=6),
        Layout(world=48, tensor=2, expert=4, expert_tensor=2, order="data-tensor-context-expert-pipeline"),
        Layout(world=5),
    ],
    ids=lambda layout: f"{layout.world}",
)
def test_groups_of_layouts_are_those_of_their_ranks(layout: Layout, domain: int) -> None:
    for axes in (
        ("tensor",),
        ("context",),
        ("data",),
        ("pipeline",),
        ("data", "context"),
        ("expert",),
        ("expert_data",),
    ):
        groups = set()
        for ranks in layout.groups(*axes):
            domains = [rank // domain for rank in ranks]
            groups.add((len(set(domains)), min(map(domains.count, domains))))
        count, local = max(groups, key=lambda group: (group[0], -group[1]))
        expected = Group(len(ranks), local, count)
        assert Group.of_axes(layout, axes, domain) == expected, axes
        if len(groups) == 1 and len(layout.digits(*axes)) == 1:
            degree, stride = layout.digits(*axes)[0]
            assert Group.strided(degree, stride, domain) == expected


@pytest.mark.parametrize("domain", [1, 2, 3, 8, 12])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(world=96, tensor=2, context=3),
        Layout(world=64, tensor=4, pipeline=2, order="tensor-context-expert-pipeline-data"),
        Layout(world=60, context=5, pipeline=2),
        Layout(world=36, tensor=3, order="data-tensor-context-expert-pipeline"),
        Layout(world=28, tensor=7),
    ],
    ids=lambda layout: f"{layout.world}",
)
def test_runs_of_a_group_and_their_places(layout: Layout, domain: int) -> None:
    """As a mesh splits an axis: runs of neighbouring places, and the same place of every run."""
    axes = ("context", "data")
    groups = layout.groups(*axes)
    whole = len(groups[0])
    for size in (size for size in range(1, whole + 1) if whole % size == 0):
        runs = [ranks[begin : begin + size] for ranks in groups for begin in range(0, whole, size)]
        places = [ranks[place::size] for ranks in groups for place in range(size)]
        expected = []
        for parts in (runs, places):
            domains = [[rank // domain for rank in part] for part in parts]
            local = {(len(set(own)), min(map(own.count, own))) for own in domains}
            count, least = max(local, key=lambda group: (group[0], -group[1]))
            expected.append(Group(len(parts[0]), least, count))
        assert list(Group.split(layout, axes, size, domain)) == expected, size


def test_a_group_that_begins_inside_a_domain_may_cross_into_the_next() -> None:
    layout = Layout(world=24, tensor=6)  # the first group fits into a domain of 8, the second does not
    assert Group.strided(6, 1, 8) == Group(6, 6, 1)
    assert Group.of_axes(layout, ("tensor",), 8) == Group(6, 2, 2)


def test_groups_of_large_worlds_need_no_lists() -> None:
    layout = Layout(world=2**22, tensor=8, pipeline=16)
    assert Cluster(load_hardware("h100"), 2**22).group(layout, "data") == Group(2**15, 1, 2**15)
    assert Cluster(load_hardware("gb200"), 2**22, domain=64).group(layout, "data") == Group(2**15, 8, 2**12)


@pytest.mark.parametrize("kind", hardware_names())
def test_times_grow_with_bytes_and_ranks(kind: str) -> None:
    cluster = Cluster(load_hardware(kind), 16384, domain=8)
    groups = [
        Group(2, 2, 1),
        Group(4, 4, 1),
        Group(8, 8, 1),
        *(Group(8 * n, 8, n) for n in (2, 4, 16, 512, 2048)),
    ]
    sizes = [1, 1e3, 1e5, 1e6, 3e6, 1e7, 3e7, 1e8, 1e9, 1e11]
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        for group in groups:
            times = [cluster.seconds(operation, nbytes, group) for nbytes in sizes]
            assert times[0] > 0 and times == sorted(times)
        for nbytes in sizes[:4]:
            times = [cluster.seconds(operation, nbytes, group) for group in groups]
            assert times == sorted(times), (operation, nbytes)
    for operation in OPERATIONS:
        # No collective exceeds what the links carry.
        assert cluster.seconds(operation, 1e9, groups[0]) >= 0.5e9 / (cluster.hardware.link_gb_per_s * 1e9)
        slow = Cluster(cluster.hardware, 16384, network=1e6, domain=8)
        assert slow.seconds(operation, 1e9, groups[4]) > cluster.seconds(operation, 1e9, groups[4])


MEASURED = """
a100 all_reduce 8 512 22.6|a100 all_reduce 8 16777216 216|a100 all_reduce 8 536870912 4295
a100 all_gather 8 536870912 2289|a100 all_gather 2 536870912 1790|a100 all_to_all 8 536870912 2314
a100 reduce_scatter 4 536870912 2031|a100 all_reduce 2 512 9.9|h100 all_reduce 8 512 15.6
h100 all_reduce 8 16777216 122|h100 all_reduce 8 536870912 2388|h100 all_gather 8 536870912 1401
h100 all_gather 2 536870912 1040|h100 all_to_all 8 536870912 1480|h100 reduce_scatter 4 536870912 1328
h100 all_gather 8 16777216 68.5|h200 all_reduce 8 536870912 2350|h200 all_gather 4 536870912 1271
h200 reduce_scatter 8 536870912 1410|h200 all_to_all 8 16777216 71.7|b200 all_reduce 8 512 25.8
b200 all_reduce 8 536870912 1420|b200 all_gather 8 536870912 762|b200 all_to_all 8 536870912 836
gb200 all_reduce 4 536870912 1298|gb200 all_gather 4 536870912 706|gb200 reduce_scatter 4 512 11.7
gb200 all_to_all 2 536870912 777|gb300 all_reduce 4 536870912 1289|gb300 all_gather 2 536870912 600
gb300 reduce_scatter 4 536870912 758|gb300 all_to_all 4 524288 17.2|v100 all_reduce 8 536870912 7004
v100 all_reduce 8 1073741824 13969
"""
"""Kind, operation, GPUs, bytes and microseconds: ai-dynamo/aiconfigurator's tables; V100: vTrain's."""


@pytest.mark.parametrize("row", [row for row in MEASURED.replace("\n", "|").split("|") if row])
def test_measured_collectives(row: str) -> None:
    kind, operation, ranks, nbytes, us = row.split()
    cluster = Cluster(load_hardware(kind), 8)
    group = Group(int(ranks), int(ranks), 1)
    assert cluster.seconds(operation, int(nbytes), group) * 1e6 == pytest.approx(float(us), rel=0.25)


def test_groups_and_numbers_that_do_not_fit_are_refused() -> None:
    hardware = load_hardware("h100")
    with pytest.raises(HexadError, match="found a group of 16 ranks, but 8 GPUs"):
        Cluster(hardware, 8).seconds("all_reduce", 1, Group(16, 8, 2))
    with pytest.raises(HexadError, match="network: found -1"):
        Cluster(hardware, 8, network=-1)
    constants = hardware.constants.model_copy(update={"collectives": {}})
    bare = Cluster(hardware.model_copy(update={"constants": constants}), 8)
    with pytest.raises(HexadError, match=r"constants\.collectives\.all_reduce is missing"):
        bare.seconds("all_reduce", 1, Group(8, 8, 1))
