"""Names and addresses of this machine's loopback."""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def leads_to_loopback(place: str) -> bool:
    """Tell whether a host, with or without a port, is a name of the loopback."""
    try:
        return is_loopback(urlsplit(f"//{place}").hostname or "")
    except ValueError:
        return False
