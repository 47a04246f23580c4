"""Names and addresses of this machine."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether an address or a name stands for this machine only."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
