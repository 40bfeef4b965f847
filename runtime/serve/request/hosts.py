"""Hosts that the server may ask for images, and the addresses that lead to them.

A client chooses an image's address, so that the server must not become its way into a network. A
host counts only if it was named at the start, and every address that its name stands for must be
public, or be named itself.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import quote, urlsplit

from lowbit.formats.errors import RequestError
from lowbit.formats.fields import shown

PORTS = {"http": 80, "https": 443}
ANY = "*"  # every host with public addresses
MOST_ADDRESS = 8192  # characters
SEND = "send the file itself: data:image/png;base64,..."
KEPT = "%/:=&?~#+!$,;'@()*[]"  # signs of a path that are not quoted
LABEL = re.compile(r"[a-z0-9_-]{1,63}")
# IPv6 that stands for an IPv4 address, to which a gateway may lead
TRANSLATED = IPv6Network("64:ff9b::/96")
COMPATIBLE = IPv6Network("::/96")
# Services of the machine's own cloud at addresses that look public
OF_CLOUDS = (IPv4Network("192.0.0.0/24"), IPv4Network("168.63.129.16/32"))

Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class Place:
    """A host and a port, as an address has them."""

    host: str  # in lower case; an IP address in its usual form
    port: int

    def __str__(self) -> str:
        """Both, as an address writes them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Hosts that the server may ask for images.

    Attributes:
        names: `example.org`, `example.org:8443`, an IP address, or `*` for every host. A port must
            be named unless it is that of http or https.
    """

    names: frozenset[str]

    def check(self, place: Place, scheme: str) -> None:
        """Refuse a host, or a port of it, that is not named.

        Raises:
            RequestError: as above.
        """
        usual = place.port == PORTS[scheme]
        if str(place) in self.names or (usual and not self.names.isdisjoint((place.host, ANY))):
            return
        raise RequestError(
            f"this server may not fetch images from {shown(str(place))}",
            hint=f"{SEND} The server's --allow-image-urls names the hosts that it may ask",
        )

    def takes(self, address: Address, port: int) -> bool:
        """True if an address of a host may be connected to: it is public, or named itself."""
        own = str(address)
        return is_public(address) or not self.names.isdisjoint((own, str(Place(own, port))))


def allowed_hosts(names: Iterable[str]) -> AllowedHosts:
    """Read the names of hosts.

    Raises:
        RequestError: one is no host, such as a whole URL.
    """
    return AllowedHosts(frozenset(name if name == ANY else _place(name) for name in names))


def _place(name: str) -> str:
    """A host, or host and port, in the form in which `AllowedHosts` compares it."""
    bare = name.strip()
    try:
        return _host(bare)  # also an IPv6 address without brackets
    except ValueError:
        pass
    try:
        parts = urlsplit(f"//{bare}")
        port = parts.port
        if parts.netloc != bare or "@" in bare:
            raise ValueError
        host = _host(parts.hostname or "")
    except ValueError:
        raise RequestError(
            f"`--allow-image-urls {name[:80]}` names no host",
            hint=f"write it as example.org, example.org:8443, 192.0.2.7 or {ANY}",
        ) from None
    return host if port is None else str(Place(host, port))


def _host(text: str) -> str:
    """A host in lower case, an IP address in its usual form.

    Raises:
        ValueError: it is neither.
    """
    host = text.lower().removesuffix(".")
    if host[:1] + host[-1:] == "[]":
        host = host[1:-1]
    try:
        return str(plain_address(ip_address(host)))
    except ValueError:
        pass
    labels = host.split(".")
    if len(host) > 253 or not all(map(LABEL.fullmatch, labels)):
        raise ValueError
    return host


def plain_address(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for on this machine; any other as it is."""
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            raise ValueError
        return address.ipv4_mapped or address
    return address


def is_public(address: Address) -> bool:
    """True for an address of the Internet, which leads into no network of its own."""
    if isinstance(address, IPv6Address):
        if address.scope_id is not None or address in COMPATIBLE:
            return False
        inner = address.ipv4_mapped or address.sixtofour
        if address in TRANSLATED:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address.is_site_local:
            return False
    elif any(address in each for each in OF_CLOUDS):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


@dataclass(frozen=True, slots=True)
class Target:
    """An address that has been checked, and the hosts that it was checked against."""

    scheme: str
    place: Place
    path: str  # with the query
    address: str

    @property
    def host(self) -> str:
        """The host as its header names it, with a port that is not the usual one."""
        named = str(self.place)
        return named.removesuffix(f":{PORTS[self.scheme]}")


def target_of(address: str, allowed: AllowedHosts) -> Target:
    """Read an address.

    Raises:
        RequestError: it is no http or https address, has a password, or its host is not allowed.
    """
    text = address.strip()
    if len(text) > MOST_ADDRESS:
        raise RequestError(f"an image's address has over {MOST_ADDRESS} characters", SEND)
    try:
        if any(sign <= " " or sign in "\\\x7f" for sign in text):
            raise ValueError
        parts = urlsplit(text)
        port = PORTS[parts.scheme] if parts.port is None else parts.port
        place = Place(_host(parts.hostname or ""), port)
        path = quote(parts.path or "/", safe=KEPT)  # a lone surrogate is a ValueError
        path += f"?{quote(parts.query, safe=KEPT)}" if parts.query else ""
        if not port or parts.username is not None or parts.password is not None:
            raise ValueError
    except (ValueError, KeyError):
        raise RequestError(
            f"the image's address must be http or https, a host and a path, got {shown(text)}", SEND
        ) from None
    allowed.check(place, parts.scheme)
    return Target(parts.scheme, place, path, text)
