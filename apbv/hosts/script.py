"""Running a script's body on the hosts that torchrun started."""

import sys
from collections.abc import Callable

from .exchange import HostError
from .group import HostGroup


def run_on_hosts(
    body: Callable[[HostGroup], None],
    timeout: float = 300.0,
    tensor_parallel: int = 1,
    device: str | None = None,
) -> int:
    """Run a script's body on this host of those that torchrun started, and return the exit status.

    An error that the user can mend is one line on every host, not a traceback.

    Args:
        body: the script, which gets the group of all hosts.
        timeout: seconds to wait for a silent process.
        tensor_parallel: T, processes of a host.
        device: as of :meth:`HostGroup.from_env`.
    """
    hosts = None
    try:
        hosts = HostGroup.from_env(device, timeout, tensor_parallel=tensor_parallel)
        body(hosts)
    except (ValueError, HostError) as error:
        host = "" if hosts is None else f" ({hosts.name})"
        sys.stderr.write(f"error{host}: {error}\n")  # one write: hosts share the terminal
        if hosts is not None:
            hosts.let_others_report()
        return 1
    except KeyboardInterrupt:
        hosts = None  # leaving the group would wait for exchanges that are under way
        raise
    finally:
        if hosts is not None:
            hosts.close()
    return 0
