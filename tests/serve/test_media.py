"""What a URL in a request may mean: a file of the folder, inline data, or an address that is fetched from."""

import base64
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from apbv.input.files import FileIdentity
from apbv.serve.media import FolderError, MediaError, MediaSettings, fetch, is_public, open_media
from apbv.serve.private_files import PrivateFiles
from apbv.serve.protocol import ApiError
from apbv.serve.reading import Reader, RequestSettings
from apbv.serve.requests import ChatRequest

from patience import limit
from servers import asking


@pytest.fixture
def folder(tmp_path):
    allowed = tmp_path / "allowed"
    (allowed / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"secret")
    (allowed / "file").write_bytes(b"file")
    (allowed / "sub" / "a %41").write_bytes(b"escaped")
    (allowed / "out").symlink_to(tmp_path / "secret")
    (allowed / "up").symlink_to(tmp_path)
    (allowed / "in").symlink_to(allowed / "file")
    (allowed / "loop").symlink_to(allowed / "loop")
    os.mkfifo(allowed / "pipe")
    return allowed


def read(url: str, media: MediaSettings) -> bytes:
    with PrivateFiles() as private_files, open_media(url, media, private_files) as found:
        return found.path.read_bytes()


def test_files_of_the_folder_and_no_others(folder):
    media = MediaSettings(folder=folder, max_bytes=100)
    for url in ("file", "sub/../file", "in", f"{folder}/file", f"file://{folder}/file", "file:file"):
        assert read(url, media) == b"file", url
    assert read("sub/a %41", media) == read("file:sub/a%20%2541", media) == b"escaped"
    outside = ("../secret", "sub/../../secret", "out", "up/secret", "up", f"{folder.parent}/secret", "/etc/passwd",
               "/nowhere", "file:///etc/passwd", "file:%2e%2e/secret", "..")  # fmt: skip
    for url in outside:
        with pytest.raises(MediaError, match="is not in the folder"):
            read(url, media)
    for url in ("", ".", "sub", "pipe", "nowhere", "file/x", "loop", "a\0b", "x" * 5000, "file:%ff", "file://host/file",
                "ftp://a/b", "gopher:a", "\ud800", "/etc/passwd\0"):  # fmt: skip
        with pytest.raises(MediaError):
            read(url, media)
        with pytest.raises(MediaError):
            read(url, MediaSettings())


@pytest.mark.parametrize("becomes", ["gone", "a file"])
def test_a_folder_that_was_removed_is_the_servers_failure(app, tmp_path, becomes):
    """Not the request's, and it does not end the server: the folder may be mounted again."""
    folder = tmp_path / "media"
    settings = RequestSettings(media=MediaSettings(folder=folder))
    content = [{"type": "image_url", "image_url": {"url": "picture.png"}}]
    request = ChatRequest.parse(asking(messages=[{"role": "user", "content": content}]))
    if becomes == "a file":
        folder.touch()
    with pytest.raises(FolderError, match="cannot read its folder of media files"):
        read("picture.png", settings.media)
    with PrivateFiles() as files, ExitStack() as stack, pytest.raises(ApiError, match="its folder") as error:
        Reader(app.engine, settings, files).read(request, stack)
    assert error.value.status == 503 and str(folder) not in str(error.value)


def test_inline_data_lies_in_a_private_file_and_then_nowhere():
    media = MediaSettings(max_bytes=100)
    url = "data:video/mp4;base64," + base64.b64encode(b"x" * 100).decode()
    with PrivateFiles() as private_files, open_media(url, media, private_files) as found:
        assert found.path.read_bytes() == b"x" * 100 and found.path.stat().st_mode & 0o777 == 0o600
    assert not found.path.exists()
    for data in (
        ",x",
        ";base64",
        ";base64,!",
        ";base64,QQ",
        ";base64,é",
        ";base64," + "A" * 140,
        ";base64," + "A" * 10**6,
    ):
        wrong = f"data:{data}"
        with pytest.raises(MediaError):
            read(wrong, media)


def test_equal_bytes_are_one_file_until_nobody_uses_it():
    data, other = b"x" * 100, b"y" * 100
    with PrivateFiles() as files:
        with files.holding(other) as different, files.holding(data) as path:
            with files.holding(data) as again:
                assert again == path != different
                before = FileIdentity.of(path)
            assert path.read_bytes() == data and different.read_bytes() == other
        assert not path.exists()
        with files.holding(data) as path:
            assert FileIdentity.of(path) == before

        def use(number: int) -> bool:
            with files.holding(data) as path:
                return path.read_bytes() == data

        with ThreadPoolExecutor(8) as users:
            assert all(users.map(use, range(500)))
        assert not any(path.parent.iterdir())
    assert not path.parent.exists()
    with pytest.raises(RuntimeError, match="has stopped"), files.holding(data):
        pass
    assert not path.parent.exists()


def test_only_listed_hosts_are_fetched_from(site, monkeypatch):
    port = site.server_address[1]
    media = MediaSettings(
        hosts=frozenset({"127.0.0.1", "media.example"}), max_bytes=100, fetch_seconds=limit(60.0)
    )
    here = f"http://127.0.0.1:{port}"
    assert fetch(f"{here}/file", media) == b"xxx"
    assert fetch(f"{here}/to/{here}/file", media) == fetch(f"{here}/to//file", media) == b"xxx"
    refused = {"missing": "404", "large": "at most 100", "short": "middle"}
    for path, reason in {**refused, "to//to//to//to//to//file": "redirects more"}.items():
        with pytest.raises(MediaError, match=reason):
            fetch(f"{here}/{path}", media)
    with pytest.raises(MediaError, match="more than 2 s"):
        fetch(f"{here}/slow", replace(media, fetch_seconds=2.0))
    # To other hosts, as itself, by a redirect, or by a name that means this machine.
    resolve = socket.getaddrinfo
    inside = {"media.example": "127.0.0.1", "other.example": "127.0.0.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: resolve(inside.get(host, host), *a, **k))
    site.paths.clear()
    for url, reason in (
        (f"http://localhost:{port}/file", "does not fetch from 'localhost'"),
        (f"http://127.1:{port}/file", "does not fetch"),
        (f"http://2130706433:{port}/file", "does not fetch"),
        (f"http://[::1]:{port}/file", "does not fetch"),
        (f"http://127.0.0.1@other.example:{port}/file", "does not fetch from 'other.example'"),
        (f"http://media.example:{port}/file", "not a public one"),
        (f"HTTP://MEDIA.example.:{port}/file", "does not fetch"),
        ("http://127.0.0.1:99999/", "not a URL"),
        ("http://", "does not fetch"),
        ("https://[", "not a URL"),
    ):
        with pytest.raises(MediaError, match=reason):
            read(url, media)
    assert not site.paths
    for target in (f"http://localhost:{port}/file", f"http://other.example:{port}/file", "file:///etc/passwd"):
        with pytest.raises(MediaError, match=r"another host|does not fetch"):
            fetch(f"{here}/to/{target}", media)
    assert all(path.startswith("/to/") for path in site.paths)
    public = MediaSettings(hosts=frozenset({"media.example"}))
    with pytest.raises(MediaError, match="does not fetch"):
        fetch(f"{here}/file", public)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("172.16.0.1", False), ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False),
        ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False), ("::", False),
        ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:127.0.0.1", False), ("::ffff:10.0.0.1", False),
        ("::127.0.0.1", False), ("::ffff:0:127.0.0.1", False), ("fec0::1", False), ("64:ff9b:1::7f00:1", False),
        ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("64:ff9b::5db8:d822", True),
    ],
)  # fmt: skip
def test_public_addresses(address, public):
    assert is_public(address) == public
