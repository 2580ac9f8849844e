"""This module drafts, then verifies, in turn: speculative decoding with a chain of tokens per round."""

from torch import Tensor

from ..decode.answer import NO_TOKEN, Answer
from ..decode.sampling import NotFiniteError
from ..hosts import HostGroup
from ..timeline import Recorder
from .drafters import Drafter, Learner, Proposal, pack_tokens, unpack_tokens
from .pace import Pace
from .speculation_stats import LOSING, SpeculationStats
from .verify import verify_window

SWITCHED_OFF = -1  # sent by host 0 in place of the number of drafted tokens


def generate_speculatively(
    answer: Answer, drafter: Drafter | None, pace: Pace
) -> tuple[list[int], SpeculationStats]:
    """Decode as :func:`apbv.decode.answer.generate_tokens` does, but several tokens per pass of the target.

    Every token is distributed as the target's own would be; at temperature 0 it is the same token.

    Args:
        drafter: the drafter on the leader; None on the others.
        pace: decides how long windows are, and whether a draft is dropped that costs more time than it saves.

    Returns:
        The new tokens, and the statistics, with times as measured on this host.

    Raises:
        AgreedError: the target's logits are NaN or infinite; on every host. A draft with such logits is dropped.
    """
    hosts, decoder, tokens = answer.hosts, answer.decoder, answer.tokens
    stats = SpeculationStats(record=Recorder("decoding", hosts.clock))
    drafted: list[int] = []
    token, has_ended = answer.choose(answer.logits)
    new, is_drafting = [token], True
    while True:
        # The target has run the last token and all drafted ones: keep the KV of all new tokens but the last, and
        # roll the others back.
        decoder.take_back(len(drafted) + 1 - len(new))
        answer.add(new)
        if has_ended:
            return tokens, stats
        room = answer.num_left - 1  # the target adds one token to those that it accepts
        proposal, verdict, drafted = Proposal([]), None, []
        if is_drafting and room:
            with stats.record.span("draft") as details:
                if hosts.is_leader:
                    proposal = _propose(drafter, tokens, room, pace, stats)
                drafted = _broadcast_proposal(proposal, min(pace.most, room), hosts)
                is_drafting = drafted is not None
                drafted = drafted or []
                details["tokens"] = len(drafted)
        with stats.record.span("verify", tokens=len(drafted) + 1) as details:
            rows = decoder.advance([tokens[-1], *drafted])
            if hosts.is_leader:
                hosts.settle()
                verdict = _encode_verdict(answer, proposal or Proposal([]), rows)
            accepted, token, num_new, has_ended = hosts.broadcast_ints(verdict, 4)
            answer.require_token(token)
            details["accepted"] = accepted
        new = [*drafted[:accepted], token][:num_new]
        if is_drafting and isinstance(drafter, Learner):
            drafter.learn(new, rows[: len(new)])
        stats.rounds += is_drafting
        stats.num_target_forwards += 1
        stats.count(len(drafted), accepted)
        if is_drafting:
            pace.learn(len(drafted), accepted, len(new), *stats.seconds_of_round())


def _encode_verdict(answer: Answer, proposal: Proposal, rows: Tensor) -> list[int]:
    """Encode for all hosts how many tokens are accepted, the next token, the number of new tokens, and the end."""
    index = answer.next_index
    rows = answer.allowed(rows, range(index, index + len(rows)))
    try:
        verdict = verify_window(proposal, rows, index, answer.sampling)
    except NotFiniteError:
        return [0, NO_TOKEN, 1, True]
    new, has_ended = answer.cut([*proposal.tokens[: verdict.num_accepted], verdict.next_token])
    return [verdict.num_accepted, verdict.next_token, len(new), has_ended]


def _propose(
    drafter: Drafter, tokens: list[int], room: int, pace: Pace, stats: SpeculationStats
) -> Proposal | None:
    """Draft the next window, of at most ``room`` tokens; return None where the draft is switched off."""
    if pace.is_losing():
        stats.switch_off(LOSING, len(tokens))
        return None
    count = min(pace.next_window(), room)
    try:
        return drafter.propose(tokens, count) if count else Proposal([])
    except NotFiniteError as error:
        stats.switch_off(f"it gave {error}", len(tokens))
        return None


def _broadcast_proposal(proposal: Proposal | None, most: int, hosts: HostGroup) -> list[int] | None:
    """Send host 0's drafted tokens, at most ``most``, to every host; return None if the draft is switched off."""
    numbers = None
    if hosts.is_leader:
        numbers = [SWITCHED_OFF, *[0] * most] if proposal is None else pack_tokens(proposal.tokens, most)
    numbers = hosts.broadcast_ints(numbers, most + 1)
    return None if numbers[0] == SWITCHED_OFF else unpack_tokens(numbers)
