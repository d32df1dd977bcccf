from __future__ import annotations

import random
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest

from penstock.config.rules.allowed_hosts import AllowedHosts, is_public


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.255.0.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
        *(
            "169.254.169.254",
            "169.254.170.2",
            "100.64.0.1",
            "100.100.100.200",
            "192.0.0.192",
            "168.63.129.16",
        ),
        *("192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "192.88.99.1"),
        *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
        *(
            "::",
            "::1",
            "fe80::1",
            "fe80::1%eth0",
            "fc00::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fec0::1",
            "ff02::1",
        ),
        *("100::1", "2001:db8::1", "3fff::1", "5f00::1", "2001::1", "64:ff9b:1::a00:1"),
        # IPv4 within IPv6: mapped, compatible, translated, NAT64, 6to4, Teredo, ISATAP.
        *(
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "::ffff:0:127.0.0.1",
        ),
        *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::1", "2001:0:4136:e378::1"),
        "2a00:1450::5efe:a00:1",
    ],
)
def test_addresses_of_no_public_host(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "8.8.8.8", "93.184.215.14", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"],
)
def test_public_addresses(address: str) -> None:
    assert is_public(ip_address(address))


def test_all_that_is_public_is_so_by_python_too() -> None:
    chance = random.Random(3)
    for _ in range(3000):
        address = IPv4Address(chance.getrandbits(32))
        assert not is_public(address) or (
            address.is_global and not address.is_multicast and not address.is_reserved
        )
        wide = IPv6Address(chance.getrandbits(8) << 120 | chance.getrandbits(120))
        assert not is_public(wide) or (wide.is_global and not wide.is_multicast)


@pytest.mark.parametrize(
    ("entry", "allowed", "others"),
    [
        (
            "images.example.com",
            ["images.example.com:443", "images.example.com:80"],
            ["images.example.com:8080"],
        ),
        (
            "images.example.com",
            [],
            ["a.images.example.com:443", "example.com:443", "ximages.example.com:443"],
        ),
        ("Images.Example.COM.", ["images.example.com:443"], []),
        ("images.example.com:8443", ["images.example.com:8443"], ["images.example.com:443"]),
        (
            "*.example.com",
            ["a.example.com:443", "b.a.example.com:80"],
            ["example.com:443", "aexample.com:443"],
        ),
        (".example.com:81", ["a.example.com:81"], ["a.example.com:80", "example.com:81"]),
        ("bücher.example", ["xn--bcher-kva.example:443"], ["bucher.example:443"]),
        ("*", ["anything.test:443", "8.8.8.8:443"], ["anything.test:22"]),
        ("10.0.0.5", ["10.0.0.5:80"], ["10.0.0.6:80", "10.0.0.5:6379", "ten.test:80"]),
        ("10.0.0.5:9000", ["10.0.0.5:9000"], ["10.0.0.5:80"]),
        ("10.0.0.0/8", ["10.9.9.9:80"], ["11.0.0.1:80"]),
        ("::1", ["::1:80"], []),
        ("[::1]", ["::1:80"], []),
        ("[::1]:8000", ["::1:8000"], ["::1:80"]),
    ],
)
def test_entries(entry: str, allowed: list[str], others: list[str]) -> None:
    hosts = AllowedHosts([entry])
    for expected, listed in ((True, allowed), (False, others)):
        for place in listed:
            host, _, port = place.rpartition(":")
            assert hosts.allows(host, int(port)) is expected, place


@pytest.mark.parametrize(
    "entry",
    [
        *(
            "",
            " ",
            "https://example.com",
            "example.com/path",
            "example.com:0",
            "example.com:65536",
            "example.com:x",
        ),
        *(
            "a b",
            "user@example.com",
            "*.*.com",
            "a.*.com",
            "**",
            "10.0.0.1/8",
            "10.0.0.0/8:80",
            "..",
            "a..b",
            "[x]",
        ),
        *("*x.com", "example.com:80:80", "a" * 64 + ".com"),
    ],
)
def test_an_entry_that_is_none_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match="is none of DOMAIN") as error:
        AllowedHosts(["good.example", entry])
    assert f"--allowed-media-domains {entry!r}: " in str(error.value)


@pytest.mark.parametrize(
    ("entries", "address", "port", "reached"),
    [
        ([], "8.8.8.8", 443, True),
        (["images.test"], "10.0.0.5", 80, False),
        (["*"], "10.0.0.5", 80, False),
        (["images.test:8000"], "127.0.0.1", 8000, False),
        (["images.test", "10.0.0.5"], "10.0.0.5", 80, True),
        (["images.test:8000", "10.0.0.5"], "10.0.0.5", 8000, True),
        (["images.test:8000", "10.0.0.5:8001"], "10.0.0.5", 8000, False),
        (["10.0.0.0/8"], "::ffff:10.0.0.5", 80, True),
        (["10.0.0.0/8"], "64:ff9b::a00:5", 80, True),
        (["0.0.0.0/0"], "127.0.0.1", 80, True),
        (["0.0.0.0/0"], "169.254.169.254", 80, False),
        (["0.0.0.0/0"], "::ffff:169.254.169.254", 80, False),
        (["0.0.0.0/0"], "168.63.129.16", 80, False),
        (["::/0"], "fd00:ec2::254", 80, False),
        (["169.254.0.0/16"], "169.254.169.254", 80, False),
        (["169.254.169.254"], "169.254.169.254", 80, True),
    ],
)
def test_private_addresses_need_an_entry_that_is_an_address(
    entries: list[str], address: str, port: int, reached: bool
) -> None:
    assert AllowedHosts(entries).reaches(ip_address(address), port) is reached
