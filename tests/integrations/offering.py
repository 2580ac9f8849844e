"""KV that hosts offer by tickets, for the checks: the hosts' side and the consumer's."""

import json
import time
from pathlib import Path

import apbv
from apbv.kv.offers import Offers

from apbv_tests.patience import limit, wait_for

NUM_TICKETS = 32  # for each case
TICKETS = "tickets.json"
ENDS = "ends.jsonl"
STOP = "stop"
PIDS = "pids.json"


def offer_all(
    folder: Path, states: dict[str, "apbv.PrefillResult"], hosts: "apbv.HostGroup", pid: int
) -> None:
    """On every host: offer each state many times, and go on until the file ``stop`` appears."""

    def note(transfer: str, how: str, num_bytes: int) -> None:
        with open(folder / ENDS, "a") as file:
            file.write(json.dumps([transfer, how, num_bytes]) + "\n")

    with (
        Offers(hosts, seconds=3600.0, on_end=note) as offers,
        Offers(hosts, seconds=0.01, on_end=note) as short,
    ):
        tickets = {}
        for name, state in states.items():
            tickets[name] = [state.offer(offers) for _ in range(NUM_TICKETS)]
            tickets[f"{name}, expired"] = [state.offer(short)]
        pids = hosts.gather_json(pid)
        if hosts.is_leader:
            params = {
                name: [ticket.to_params() for ticket in several]
                for name, several in tickets.items()
            }
            (folder / PIDS).write_text(json.dumps(pids))
            (folder / TICKETS).write_text(json.dumps(params))
        while not (folder / STOP).exists():
            time.sleep(0.2)


class Tickets:
    """The tickets that were written into a folder, each of which is given to one request."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._left = json.loads((folder / TICKETS).read_text())
        self.pids = json.loads((folder / PIDS).read_text())

    def take(self, name: str) -> dict:
        """The ``kv_transfer_params`` of a request."""
        params = self._left[name].pop()
        # For whoever comes after this process.
        (self._folder / TICKETS).write_text(json.dumps(self._left))
        return params

    def ended(self, params: dict) -> str:
        """How an offer has ended, which is waited for."""

        def found() -> list[str]:
            path = self._folder / ENDS
            lines = path.read_text().splitlines() if path.exists() else []
            return [
                how
                for transfer, how, _ in map(json.loads, lines)
                if transfer == params["apbv"]["transfer"]
            ]

        wait_for(found, limit(60.0))
        (how,) = found()
        return how
