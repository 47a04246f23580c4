"""Formats of strings, compared with Python's own readers and writers of them."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, time
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tools.calls.schemas import FORMATS
from tests.tiers import examples

READ: dict[str, Callable[[str], Any]] = {
    "time": time.fromisoformat,
    "uuid": UUID,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
}
WRITTEN: dict[str, st.SearchStrategy[Any]] = {
    "date": st.dates().map(str),
    "time": st.times(timezones=st.just(UTC)).map(time.isoformat),
    "date-time": st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat),
    "uuid": st.uuids().map(str),
    "ipv4": st.ip_addresses(v=4).map(str),
    "ipv6": st.ip_addresses(v=6).map(str),
}


@pytest.mark.parametrize("name", READ)
@given(st.data())
@examples(100)
def test_what_a_format_permits_can_be_read(name: str, data: Any) -> None:
    READ[name](data.draw(st.from_regex(re.compile(FORMATS[name], re.ASCII), fullmatch=True)).removesuffix("\n"))


@pytest.mark.parametrize("name", WRITTEN)
@given(st.data())
@examples(100)
def test_what_is_written_is_permitted(name: str, data: Any) -> None:
    assert re.fullmatch(FORMATS[name], data.draw(WRITTEN[name]))


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        ("date", "2024-12-31", "2024-13-01"),
        ("time", "23:59:59.5+01:30", "23:59"),
        ("duration", "P1Y2M3DT4H5M6S", "P1YT"),
        ("duration", "PT30M", "P1H"),
        ("duration", "P2W", "P"),
        ("email", "a.b+c@example.com", ".a@example.com"),
        ("hostname", "a-1.example", "-a.example"),
        ("uri", "https://example.com/a?b=c#d", "example.com"),
        ("uri", "mailto:a@example.com", "a b:c"),
        ("ipv4", "255.0.10.1", "256.0.0.1"),
        ("ipv6", "1:2:3:4:5:6:7::", "1:2:3:4:5:6:7:8::"),
    ],
)
def test_formats_without_a_reader(name: str, yes: str, no: str) -> None:
    assert re.fullmatch(FORMATS[name], yes) and not re.fullmatch(FORMATS[name], no)
