"""Messages between hosts, also where ranks compute on GPUs, whose process group cannot carry them."""

from typing import Any

import torch

from hexad.comm.messages import Outbox, take
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..pool import Pool


def exchanged(device: str) -> tuple[list[Any], bool]:
    """What this rank receives from the next one, and whether it came over the group of all ranks."""
    mesh = Mesh.create(Layout(data=3, world=3), torch.device("cpu"))
    mesh.device = torch.device(device)
    hosts = mesh.on_hosts()
    outbox = Outbox(hosts)
    messages = [("text", mesh.rank), b"\1" * 5000, None]
    for message in messages:
        outbox.put(message, [(mesh.rank - 1) % 3])
    received = [take(hosts, (mesh.rank + 1) % 3) for _ in messages]
    outbox.flush()
    return received, hosts.group is mesh.world.group


def test_messages_of_ranks_on_any_device(pool: Pool) -> None:
    for device, shared in (("cpu", True), ("cuda:0", False)):
        for rank, (received, same) in enumerate(pool.run(3, exchanged, device)):
            assert received == [("text", (rank + 1) % 3), b"\1" * 5000, None]
            assert same == shared
