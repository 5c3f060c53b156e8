"""The port on which a replica of Ray Serve takes calls.

Serve opens it on all addresses of the machine, and unpickles what it gets. It asks for Ray's token only where Ray runs
with one. This module is the only one that changes private functions of Ray: `add_port_to_grpc_server`, as in 2.60.
"""

from __future__ import annotations

import ray
from ray.serve._private import replica


def bind_to_node() -> None:
    """Open the port on the address of this node only. A constructor of a deployment calls it: Serve opens it later."""
    add_port, node = replica.add_port_to_grpc_server, ray.util.get_node_ip_address()
    host = f"[{node}]" if ":" in node else node
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", host))
