"""By which addresses the nodes reach each other: those of the inventory, or with WireGuard those in the tunnel."""

from __future__ import annotations

import ipaddress


def addresses(outside: dict, network: str) -> dict:
    """Node name -> address. `outside`: the same with the inventory's; `network`: the tunnel's, empty without one."""
    return {name: tunnel_address(address, network) if network else address for name, address in outside.items()}


def tunnel_address(address: str, network: str) -> str:
    """The last bits of an address, in the tunnel's network; the same node has the same one, whoever comes and goes.

    What cannot be an address or a network stays as it is: preflight says so.
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
