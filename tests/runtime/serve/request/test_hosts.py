"""Hosts that may be asked for images, and addresses that lead out of this machine's networks."""

from ipaddress import ip_address

import pytest

from lowbit.formats.errors import RequestError
from lowbit.runtime.serve.request.hosts import allowed_hosts, is_public, target_of

PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700::1", "2002:808:808::1", "64:ff9b::808:808")
INNER = (
    *("127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1"),
    *("169.254.169.254", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "255.255.255.255"),
    *("240.0.0.1", "::", "::1", "::7f00:1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254"),
    *("fec0::1", "ff02::1", "ff0e::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
    *("2002:7f00:1::", "2002:a00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2001::7f00:1"),
    *("192.0.0.192", "168.63.129.16", "::ffff:168.63.129.16", "2002:a83f:8110::"),
)


@pytest.mark.parametrize("text", PUBLIC)
def test_addresses_of_the_internet(text: str) -> None:
    assert is_public(ip_address(text))


@pytest.mark.parametrize("text", INNER)
def test_addresses_of_networks_of_one_s_own(text: str) -> None:
    assert not is_public(ip_address(text))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Example.ORG", "example.org"),
        ("example.org.", "example.org"),
        ("example.org:8443", "example.org:8443"),
        ("10.0.0.5", "10.0.0.5"),
        ("10.0.0.5:80", "10.0.0.5:80"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("[0:0::1]:80", "[::1]:80"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("*", "*"),
    ],
)
def test_names_of_hosts(name: str, found: str) -> None:
    assert allowed_hosts([name]).names == {found}


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "https://example.org", "example.org/", "example.org/a", "example.org?x", "a b"),
        *(
            "u@example.org",
            "*.example.org",
            "example..org",
            "example.org:port",
            "example.org:99999",
        ),
        *("[::1", "fe80::1%eth0", "bücher.example", "a" * 64, "a." * 140 + "b"),
    ],
)
def test_names_that_are_no_hosts(name: str) -> None:
    with pytest.raises(RequestError, match="names no host"):
        allowed_hosts([name])


HOSTS = allowed_hosts(["example.org", "other.example:8443", "10.0.0.5", "[::1]:8080"])


@pytest.mark.parametrize(
    ("address", "host", "path"),
    [
        ("https://example.org/a.png", "example.org", "/a.png"),
        (" HTTP://EXAMPLE.org:80/a.png#x ", "example.org", "/a.png"),
        ("http://example.org.", "example.org", "/"),
        ("https://example.org?q=a/b%20c", "example.org", "/?q=a/b%20c"),
        ("https://example.org/é/\N{GRINNING FACE}", "example.org", "/%C3%A9/%F0%9F%98%80"),
        ("https://other.example:8443/x", "other.example:8443", "/x"),
        ("http://10.0.0.5/x", "10.0.0.5", "/x"),
        ("http://[::ffff:10.0.0.5]/x", "10.0.0.5", "/x"),
        ("http://[0::1]:8080/x", "[::1]:8080", "/x"),
    ],
)
def test_addresses_that_may_be_fetched(address: str, host: str, path: str) -> None:
    target = target_of(address, HOSTS)
    assert (target.host, target.path) == (host, path)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("https://example.com/", "may not fetch images from"),
        ("https://sub.example.org/", "may not fetch images from"),
        ("https://example.org.evil.test/", "may not fetch images from"),
        ("https://example.org:8443/", "may not fetch images from"),
        ("http://example.org:443/", "may not fetch images from"),
        ("https://other.example/", "may not fetch images from"),
        ("http://10.0.0.6/", "may not fetch images from"),
        ("http://[::1]/", "may not fetch images from"),
        ("http://2130706433/", "may not fetch images from"),
        ("https://user@example.org/", "must be http or https"),
        ("https://user:word@example.org/", "must be http or https"),
        ("https://@example.org/", "must be http or https"),
        ("https://example.org\\@evil.test/", "must be http or https"),
        ("https://evil.test\\.example.org/", "must be http or https"),
        ("https://example.org/a b", "must be http or https"),
        ("https://example.org/\r\nX: y", "must be http or https"),
        ("https://exam\tple.org/", "must be http or https"),
        ("https://example.org:0/", "must be http or https"),
        ("https://example.org:99999/", "must be http or https"),
        ("https://example.org:x/", "must be http or https"),
        ("https:///a.png", "must be http or https"),
        ("https:example.org/a.png", "must be http or https"),
        ("//example.org/a.png", "must be http or https"),
        ("file:///etc/passwd", "must be http or https"),
        ("file://example.org/etc/passwd", "must be http or https"),
        ("gopher://example.org/", "must be http or https"),
        ("https://[::1", "must be http or https"),
        ("https://[fe80::1%25eth0]/", "must be http or https"),
        ("https://example.org/\ud800", "must be http or https"),
        ("https://example.org/?\ud800", "must be http or https"),
        ("https://bücher.example/", "must be http or https"),
        ("https://example.org/" + "a" * 9000, "over 8192 characters"),
    ],
)
def test_addresses_that_may_not(address: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        target_of(address, HOSTS)


def test_every_host_is_one_with_public_addresses() -> None:
    hosts = allowed_hosts(["*"])
    assert target_of("https://whatever.test/x", hosts).host == "whatever.test"
    with pytest.raises(RequestError, match="may not fetch"):
        target_of("https://whatever.test:8443/x", hosts)
    assert hosts.takes(ip_address("8.8.8.8"), 443)
    assert not hosts.takes(ip_address("127.0.0.1"), 80)


def test_an_inner_address_is_taken_where_it_is_named_itself() -> None:
    hosts = allowed_hosts(["images.test", "10.0.0.5", "10.0.0.6:8080"])
    assert hosts.takes(ip_address("10.0.0.5"), 80)
    assert hosts.takes(ip_address("10.0.0.6"), 8080)
    assert not hosts.takes(ip_address("10.0.0.6"), 80)
    assert not hosts.takes(ip_address("10.0.0.7"), 80)
