"""The command-line options of handing KV over to another server."""

import argparse
import ipaddress
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apbv.serve.server import TransferSettings

_LAST_PORT = 65_535
_DEFAULT_SECONDS = 120.0
_LOOPBACK = "127.0.0.1"


def add_transfer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of handing KV over; none that is not given has a value."""
    transfer = parser.add_argument_group("handing KV over to another server, such as vLLM")
    transfer.add_argument(
        "--kv-transfer",
        metavar="tcp|DIR",
        help="from these processes' memory, or by a folder that the other server shares (default: not at all)",
    )
    transfer.add_argument(
        "--kv-host",
        metavar="ADDRESS",
        help="where each process of this machine listens for the other server (default: 127.0.0.1 where nothing "
        "else is on another machine, or else this machine's address)",
    )
    transfer.add_argument(
        "--kv-port", type=int, metavar="BASE", help="process p of all listens on BASE + p (default: any free port)"
    )
    transfer.add_argument(
        "--kv-seconds",
        type=float,
        metavar="N",
        help=f"how long KV waits to be fetched (default {_DEFAULT_SECONDS:g})",
    )


def check_transfer(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process with one line where these options are wrong, or do not go together."""
    if options.kv_transfer is None:
        for name in ("kv_host", "kv_port", "kv_seconds"):
            if getattr(options, name) is not None:
                parser.error(f"--{name.replace('_', '-')} needs --kv-transfer")
        return
    if options.reduce is not None:
        parser.error("--kv-transfer hands whole prompts over: not together with --reduce")
    if options.kv_transfer != "tcp" and not Path(options.kv_transfer).is_dir():
        parser.error(f"--kv-transfer {options.kv_transfer} is no folder, and not tcp")
    last = (options.kv_port or 0) + int(os.environ.get("WORLD_SIZE", 1)) - 1
    if options.kv_port is not None and not 0 <= options.kv_port <= last <= _LAST_PORT:
        parser.error(f"--kv-port must leave a port up to {_LAST_PORT} for each process, not {options.kv_port}")
    if options.kv_port and options.kv_port <= options.port <= last:
        parser.error(f"--port {options.port} is one of the ports from --kv-port {options.kv_port} on")
    if options.kv_seconds is not None and not 0 < options.kv_seconds <= 86_400:
        parser.error("--kv-seconds must lie in 0 .. 86400")


def transfer_settings(options: argparse.Namespace) -> "TransferSettings | None":
    """Make the settings of handing KV over; None where it is not.

    Raises:
        OSError: this machine does not know its own address.
    """
    from apbv.serve.server import TransferSettings

    if options.kv_transfer is None:
        return None
    return TransferSettings(
        host=options.kv_host or _own_address(options.host),
        port=options.kv_port or 0,
        seconds=_DEFAULT_SECONDS if options.kv_seconds is None else options.kv_seconds,
        directory=None if options.kv_transfer == "tcp" else Path(options.kv_transfer).resolve(),
    )


def _own_address(http_host: str) -> str:
    """Return by which address the other server reaches this process, as far as that can be known.

    Args:
        http_host: where this server listens for HTTP.
    """
    from apbv.kv.wire import reachable_address

    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if is_one_machine:
        return _LOOPBACK if _is_loopback(http_host) else reachable_address(http_host)
    # The address by which this machine reaches host 0. Nothing is sent by this: it chooses a route.
    family, kind, _, _, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        found = probe.getsockname()[0]
    return reachable_address("0.0.0.0") if _is_loopback(found) else found


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
