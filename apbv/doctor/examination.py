"""Running all checks on all hosts, in one order, whatever becomes of any of them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from ..hosts import HostGroup
from .checks import FAILED, OK, SKIPPED, Check, Verdict, carry_out, one_line


@dataclass(frozen=True)
class Result:
    """A Result is what became of a check on all hosts; the same on every host.

    Attributes:
        part: the part that the check belongs to.
        verdicts: one per host.
    """

    part: str
    check: Check
    verdicts: list[Verdict]

    @property
    def status(self) -> str:
        """``"failed"`` where it failed on one host, ``"skipped"`` where it was skipped on all."""
        found = {verdict.status for verdict in self.verdicts}
        return next(status for status in (FAILED, OK, SKIPPED) if status in found)


class Examination:
    """An Examination runs checks on all hosts of a group; every method is collective.

    What is examined is a group of the same hosts beside the one given here, over which they tell one another what
    they found. So a check that breaks its group takes nothing else with it: the next one gets a new group. Where
    none can be made, as on a GPU that an error has left unusable, what was found so far is still told.

    Args:
        hosts: the hosts, of one process each.
        limit: seconds after which a check is given up.

    Attributes:
        has_stuck: whether something was given up that may still run on some host.
    """

    def __init__(self, hosts: HostGroup, limit: float):
        self._hosts, self._limit = hosts, limit
        self._examined = self._new_group()
        self._stuck: str | None = None

    @property
    def has_stuck(self) -> bool:
        return self._stuck is not None

    def run(
        self, parts: Mapping[str, Callable[[], Iterable[Check]]], tell: Callable[[Result], None]
    ) -> list[Result]:
        """Run all checks of some parts.

        Args:
            parts: by name, what lists their checks; the same ones on every host.
            tell: called on every host with each result as soon as it is known.
        """
        results = []
        for part, checks in parts.items():
            for check in checks():
                results.append(Result(part, check, self._verdicts(check)))
                tell(results[-1])
        return results

    def _verdicts(self, check: Check) -> list[Verdict]:
        """Carry out a check on all hosts, or none: behind one that still runs nothing can be trusted."""
        if self._stuck is not None:
            return [Verdict(SKIPPED, self._stuck)] * self._hosts.size
        with self._hosts.working(check.name):
            mine = carry_out(check, self._examined, self._limit)
        told = self._hosts.gather_json([asdict(mine), self._examined.is_broken])
        verdicts = [Verdict(**fields) for fields, _ in told]
        if any(verdict.is_stuck for verdict in verdicts):
            self._stuck = f"{check.name!r} has not ended"
        elif any(is_broken for _, is_broken in told):
            self._replace_group(check.name)
        return _compared(verdicts) if check.must_agree else verdicts

    def _replace_group(self, broken_by: str) -> None:
        """Examine a new group from now on, or nothing any more where a host cannot make it."""
        obstacle = None
        try:
            self._examined = self._new_group()
        except Exception as error:  # whatever a GPU says that has failed before
            obstacle = one_line(error)
        for host, reason in enumerate(self._hosts.gather_json(obstacle)):
            if reason is not None and self._stuck is None:
                name = self._hosts.name_of(host)
                self._stuck = f"behind {broken_by!r} the hosts were not connected anew ({name}: {reason})"

    def _new_group(self) -> HostGroup:
        return self._hosts.subgroup(range(self._hosts.size))


def _compared(verdicts: list[Verdict]) -> list[Verdict]:
    """Fail the hosts that found something else than host 0."""
    first = verdicts[0].detail
    return [
        verdict
        if verdict.status != OK or verdict.detail == first
        else replace(verdict, status=FAILED, detail=f"{verdict.detail}, where host 0 has {first}")
        for verdict in verdicts
    ]
