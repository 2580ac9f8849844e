"""Files of requests: from an allowed directory, sent inline, or fetched from an allowed host.

Where a file comes from is decided on host 0. Files of the directory are opened on every host at the
same relative path; bytes from elsewhere travel to the other hosts, and lie in private temporary
files during the request.
"""

import base64
import binascii
import hashlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urljoin, urlsplit

from ...errors import InvalidRequestError, StorageError
from ...reporting import raised_as
from ..settings import ServerSettings

_MAX_REDIRECTS = 3
_CHUNK = 2**16
BASE64_PIECE = 2**22  # characters, a multiple of four
_REDIRECTS = (301, 302, 303, 307, 308)
_IPV6_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class MediaError(InvalidRequestError):
    """Raised if a URL is not allowed, or cannot be read; the message says why."""


class FolderError(StorageError):
    """Raised if the server's media directory cannot be read, which is not the request's fault."""


@dataclass(frozen=True)
class Media:
    """File that a request refers to.

    Attributes:
        name: its name in error messages.
        relative: its path in the allowed directory, on every host; None if it came as bytes.
        path: its path on this host.
    """

    name: str
    relative: str | None
    path: Path


class PrivateFiles:
    """Files that only this user can read, in a temporary directory; thread-safe."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="apbv-")
        self._lock = threading.Lock()
        self._num_users: Counter[str] = Counter()  # by a file's name
        self._is_closed = False

    def close(self) -> None:
        """Delete the directory; no more files can be made."""
        with self._lock:
            self._is_closed = True
            self._folder.cleanup()

    @contextmanager
    def holding(self, data: bytes) -> Iterator[Path]:
        """Provide a file with this content, which is deleted after its last use.

        The same bytes are always the same file, by name and date, so that
        :mod:`apbv.prefilling.reuse` knows it again.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: after :meth:`close`.
        """
        name = hashlib.sha256(data).hexdigest()
        path = Path(self._folder.name, name)
        with self._lock:
            if self._is_closed:  # a file that was still being fetched would be left behind
                raise RuntimeError("the server has stopped")
            if not self._num_users[name]:
                _write(path, data)
            self._num_users[name] += 1
        try:
            yield path
        finally:
            with self._lock:
                self._num_users[name] -= 1
                if not self._num_users[name]:
                    del self._num_users[name]
                    path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(0o700, exist_ok=True)  # a cleaner of temporary files may have removed it
        path.touch(0o600)
        path.write_bytes(data)
        os.utime(path, (0, 0))
    except OSError:
        path.unlink(missing_ok=True)
        raise


def find_in_folder(folder: Path | None, path: str) -> Path:
    """Return the real path, after ``..`` and symbolic links, of a file in the directory.

    Raises:
        MediaError: no directory is allowed, or the file is outside it or is not a regular file.
            Files outside get the same message whether they exist or not.
        FolderError: the directory was removed, or became something else, since the server was
            started.
    """
    if folder is None:
        raise MediaError("this server reads no files: it was started without --media-dir")
    try:
        root = folder.resolve(strict=True)
        if not root.is_dir():
            raise NotADirectoryError
    except (OSError, RuntimeError) as error:
        raise FolderError("this server cannot read its folder of media files at present") from error
    if path.endswith("/"):
        raise MediaError(f"{path!r:.200} is not a file")
    try:
        real_path = (root / path).resolve()
        is_inside = real_path.is_relative_to(root)
        is_file = is_inside and _is_regular_file(real_path)
    except (OSError, ValueError, RuntimeError) as error:
        # Too long a name, a null character, a loop of links.
        raise MediaError(f"{path!r:.200} is not a usable path") from error
    if not is_inside:
        raise MediaError(f"{path!r:.200} is not in the folder that this server may read")
    if not is_file:
        raise MediaError(f"there is no file {path!r:.200} in the folder that this server may read")
    return real_path


def _is_regular_file(path: Path) -> bool:
    """Return whether a regular file exists; other errors than its absence are raised."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


@contextmanager
def open_media(
    url: str, settings: ServerSettings, private_files: PrivateFiles, deadline: float | None = None
) -> Iterator[Media]:
    """Provide the file that a URL, or a path in the allowed directory, stands for; on host 0.

    Args:
        deadline: when fetching must be done, by ``time.monotonic``; None: ``fetch_seconds`` from
            now.

    Raises:
        MediaError: it is not allowed, or cannot be read.
        FolderError: the directory cannot be read.
    """
    scheme = ""
    if ":" in url[:16]:
        scheme = url[: url.index(":")].lower()
    if scheme == "data":
        with private_files.holding(decode_data_url(url, settings.media.max_media_bytes)) as path:
            yield Media("the inline data", None, path)
    elif scheme in ("http", "https"):
        with private_files.holding(fetch(url, settings, deadline)) as path:
            yield Media(f"{url:.200}", None, path)
    elif scheme and "/" not in scheme and scheme != "file":
        raise MediaError(f"a URL must begin with file:, data: or https:, not with {scheme}:")
    else:
        name = _path_of(url) if scheme else url
        path = find_in_folder(settings.media_dir, name)
        assert settings.media_dir is not None, "a file was found in it"
        relative = path.relative_to(settings.media_dir.resolve())
        yield Media(name, str(relative), path)


def _path_of(url: str) -> str:
    """Return the path of a ``file:`` URL, without percent escapes.

    Its forms are ``file:a/b``, ``file:///a/b`` and ``file://localhost/a/b``.
    """
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise MediaError(f"file: URLs must name files on this machine, not on {host!r:.100}")
        rest = slash + path
    try:
        return unquote(rest, errors="strict")
    except UnicodeDecodeError as error:
        raise MediaError(f"{url!r:.200} is not a usable path") from error


def _decode_base64(data: str | bytes) -> bytes:
    """Decode base64 in pieces, between which other threads have their turn.

    Raises:
        ValueError: it is not valid.
    """
    decoded_pieces = []
    for start in range(0, len(data), BASE64_PIECE):
        piece = data[start : start + BASE64_PIECE]
        decoded_pieces.append(base64.b64decode(piece, validate=True))
    whole_length = BASE64_PIECE // 4 * 3
    if any(len(piece) < whole_length for piece in decoded_pieces[:-1]):
        raise ValueError("padding before the end")
    return b"".join(decoded_pieces)


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """Return the content of a ``data:`` URL in base64.

    Raises:
        MediaError: it is not in base64, or has more bytes than that.
    """
    header, comma, data = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise MediaError("a data: URL must have the form data:TYPE;base64,DATA")
    # Before anything is copied. Percent escapes make it longer than 4/3.
    if len(data) > 2 * max_bytes:
        raise MediaError(f"inline data may have at most {max_bytes} bytes")
    with raised_as(MediaError, "a data: URL is not valid base64", binascii.Error, ValueError):
        if "%" in data:
            decoded = _decode_base64(unquote_to_bytes(data))
        else:
            decoded = _decode_base64(data)
    if len(decoded) > max_bytes:
        raise MediaError(f"inline data may have at most {max_bytes} bytes, not {len(decoded)}")
    return decoded


def fetch(url: str, settings: ServerSettings, deadline: float | None = None) -> bytes:
    """Fetch a file from an allowed host.

    The address is resolved once, checked, and then connected to, so that a name cannot change its
    meaning in between. A redirect may lead to the same host only.

    Args:
        deadline: when fetching must be done, by ``time.monotonic``; None: ``fetch_seconds`` from
            now.

    Raises:
        MediaError: the host or its address is not allowed, or the file is too large, too slow or
            not to be had.
    """
    deadline = deadline or time.monotonic() + settings.media.fetch_seconds
    host = _host_of(url, settings)
    for _ in range(1 + _MAX_REDIRECTS):
        if _host_of(url, settings) != host:
            raise MediaError(f"{host} redirects to another host")
        try:
            with _connected(url, host, settings, deadline) as connection:
                headers = {"User-Agent": "apbv", "Accept-Encoding": "identity"}
                connection.request("GET", _request_target(url), headers=headers)
                response = connection.getresponse()
                if response.status == 200:
                    data = _read(response, host, settings.media.max_media_bytes)
                    # A response that the deadline cuts off may look complete.
                    if time.monotonic() >= deadline:
                        raise TimeoutError
                    return data
                if response.status not in _REDIRECTS:
                    raise MediaError(f"{host} returned status {response.status}")
                url = urljoin(url, response.getheader("Location", ""))
        except (OSError, ValueError, http.client.HTTPException) as error:
            if time.monotonic() >= deadline:
                message = (
                    f"fetching took more than {settings.media.fetch_seconds:g} s; the last file "
                    f"came from {host}"
                )
                raise MediaError(message) from error
            if isinstance(error, MediaError):
                raise
            message = f"cannot fetch from {host}: {type(error).__name__}"
            # The output of a server that does not speak HTTP is not passed on.
            if not isinstance(error, http.client.HTTPException):
                message = f"{message}: {error}"
            raise MediaError(message) from error
    raise MediaError(f"{host} redirects more than {_MAX_REDIRECTS} times")


def _request_target(url: str) -> str:
    """Return the path and query of a URL."""
    parts = urlsplit(url)
    path = parts.path or "/"
    return f"{path}?{parts.query}" if parts.query else path


def _host_of(url: str, settings: ServerSettings) -> str:
    """Return the host of an http(s) URL; MediaError unless it may be fetched from."""
    with raised_as(MediaError, f"{url!r:.200} is not a URL", ValueError):
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        _ = parts.port  # ValueError: it is not a port
    if parts.scheme not in ("http", "https") or host not in settings.media_hosts:
        raise MediaError(f"this server does not fetch from {host!r:.100} (see --allow-media-host)")
    return host


@contextmanager
def _connected(
    url: str, host: str, settings: ServerSettings, deadline: float
) -> Iterator[http.client.HTTPConnection]:
    """Connect to the host's first address, if all of them are allowed, until the deadline."""
    parts = urlsplit(url)
    is_secure = parts.scheme == "https"
    port = parts.port
    if not port:
        port = 443 if is_secure else 80
    addresses = []
    for *_, socket_address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        addresses.append(str(socket_address[0]))
    # Who lists a name for this machine, or an address, knows what it means.
    is_named_itself = host in ("localhost", *addresses)
    if not is_named_itself and not all(is_public(address) for address in addresses):
        raise MediaError(f"the address of {host} is not public")
    sock = socket.create_connection((addresses[0], port), max(0.1, deadline - time.monotonic()))

    def shut() -> None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    # A timeout of the socket would begin anew with every byte.
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), shut)
    timer.start()
    connection: http.client.HTTPConnection
    try:
        if is_secure:
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
            connection = http.client.HTTPSConnection(host, port)
        else:
            connection = http.client.HTTPConnection(host, port)
        connection.sock = sock
        yield connection
    finally:
        timer.cancel()
        sock.close()


def is_public(address: str) -> bool:
    """Return whether an IP address, or the IPv4 address that it wraps, is public."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.version == 6:
        ip = _wrapped_ipv4(ip) or ip
    # All that IANA has given out.
    is_unicast = ip.version == 4 or ip in _IPV6_UNICAST
    return is_unicast and ip.is_global and not ip.is_multicast


def _wrapped_ipv4(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 address leads to; None: there is none."""
    if ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    if ip.sixtofour is not None:
        return ip.sixtofour
    if ip.teredo is not None:
        _, client = ip.teredo
        return client
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return None


def _read(response: http.client.HTTPResponse, host: str, max_bytes: int) -> bytes:
    """Read a response's body, which has a bounded size."""
    data = bytearray()
    while chunk := response.read1(_CHUNK):
        data += chunk
        if len(data) > max_bytes:
            raise MediaError(f"a file may have at most {max_bytes} bytes; that of {host} is larger")
    if response.length:
        raise MediaError(f"{host} closed the connection in the middle of the file")
    return bytes(data)


def client_message(text: str, media: list[Media]) -> str:
    """Return an error's message, with files called what the request calls them."""
    for file in media:
        text = text.replace(str(file.path), file.name)
        if file.relative is None:
            # Other hosts have it elsewhere, by the same name.
            escaped_name = file.name.replace("\\", r"\\")
            text = re.sub(rf"\S*/{file.path.name}", escaped_name, text)
    return text
