"""The addresses by which the nodes reach each other: those of the inventory or, with WireGuard, those in the tunnel."""

from __future__ import annotations

import ipaddress


def addresses(outside: dict, network: str) -> dict:
    """Node name -> address.

    `outside`: node name -> address in the inventory; `network`: that of the tunnel, empty without a tunnel.
    """
    return {name: tunnel_address(address, network) if network else address for name, address in outside.items()}


def tunnel_address(address: str, network: str) -> str:
    """The last bits of an address, in the tunnel's network. A node keeps its address when other nodes come and go.

    Text that is no address or no network stays as it is: preflight refuses it.
    """
    try:
        whole = ipaddress.ip_network(network)
        return str(whole[int(ipaddress.ip_address(address)) % whole.num_addresses])
    except ValueError:
        return address


class FilterModule:
    """Ansible looks for this class."""

    def filters(self) -> dict:
        return {"mpitrain_addresses": addresses}
