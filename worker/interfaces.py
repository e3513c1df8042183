"""Which network interface of this machine owns an address. Not for: choosing the address (the agent registers one)."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import Final

_SIOCGIFCONF: Final = 0x8912
_IFREQ_BYTES: Final = 40
"""Size of `struct ifreq` on 64-bit Linux: 16 bytes of name, then a `sockaddr` in a union of 24 bytes."""


def interface_of(address: str) -> str | None:
    """Name of the interface that has `address` (IPv4 or IPv6 literal, or a name that resolves); None when none has."""
    wanted = _resolve(address)
    if wanted is None:
        return None
    if wanted.version == 6:
        return _ipv6_interfaces().get(wanted)
    if wanted.is_loopback:
        return "lo"  # all of 127.0.0.0/8 is there, though only 127.0.0.1 is listed
    return _ipv4_interfaces().get(wanted)


def _resolve(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        pass
    try:
        return ipaddress.ip_address(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError):
        return None


def _ipv4_interfaces() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    """Every IPv4 address of this machine with its interface, aliases too. An alias `eth0:1` is named `eth0`."""
    num_bytes = 64 * _IFREQ_BYTES
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        while True:
            buffer = array.array("B", bytes(num_bytes))
            pointer = buffer.buffer_info()[0]
            answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iL", num_bytes, pointer))
            used = struct.unpack("iL", answer)[0]
            if used < num_bytes:
                break
            num_bytes *= 2  # the kernel fills what there is and does not say that it was too little
    data = buffer.tobytes()[:used]
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str] = {}
    for start in range(0, len(data), _IFREQ_BYTES):
        name = data[start : start + 16].partition(b"\0")[0].decode("ascii", "replace")
        found[ipaddress.IPv4Address(data[start + 20 : start + 24])] = name.partition(":")[0]
    return found


def _ipv6_interfaces() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    path = Path("/proc/net/if_inet6")
    if not path.exists():
        return {}
    rows = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {ipaddress.IPv6Address(bytes.fromhex(row[0])): row[5] for row in rows}
