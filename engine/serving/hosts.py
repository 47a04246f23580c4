"""Names and addresses of this machine."""

from ipaddress import ip_address
from urllib.parse import urlsplit

LOCAL, EVERY = "localhost", "*"
"""Words for origins: those of this machine, on every port, and all."""


def is_loopback(host: str) -> bool:
    """Whether an address or a name stands for this machine only."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def is_origin(text: str) -> bool:
    """Whether a text is an origin, such as ``https://chat.example``, or one of the words for several."""
    if text in (LOCAL, EVERY):
        return True
    try:
        parts = urlsplit(text)
        return parts.scheme != "" and bool(parts.hostname) and text == f"{parts.scheme}://{parts.netloc}"
    except ValueError:
        return False
