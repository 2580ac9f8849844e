"""Sequential speculative decoding: drafts a chain or a tree of tokens, then verifies it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...decode.answer import NO_TOKEN, Answer
from ...decode.sampling import NotFiniteError
from ...stats import Recorder
from ..drafters.drafters import Drafter, Proposal, pack_tokens, unpack_tokens
from ..drafters.tree import Tree, verify_tree
from ..verify import verify_window
from .pace import CONSTRAINED, LOSING, Pace, SpeculationStats

SWITCHED_OFF = -1  # sent by host 0 instead of the number of drafted tokens


@dataclass(frozen=True)
class RoundVerdict:
    """What host 0 decides about a round, as it is sent to all hosts.

    Attributes:
        token: the target's token after the accepted path; :data:`NO_TOKEN` if its logits are NaN or
            infinite.
        num_new: how many tokens the answer gets: those of the path, and this one.
        has_ended: whether the answer ends with the last of them.
        path: the accepted nodes of the tree, the root first.
    """

    token: int
    num_new: int
    has_ended: bool
    path: list[int]

    @classmethod
    def not_finite(cls) -> "RoundVerdict":
        """Return the verdict where the target's logits allow no token."""
        return cls(NO_TOKEN, num_new=1, has_ended=True, path=[0])

    @staticmethod
    def num_ints(depth: int) -> int:
        """Return the length of :meth:`to_ints` for a tree of this depth.

        It is of three fields, the path's length, and a path of the root and one node a level.
        """
        return 3 + 1 + (1 + depth)

    def to_ints(self, depth: int) -> list[int]:
        """Return the verdict as numbers, for :meth:`from_ints`."""
        path = pack_tokens(self.path, 1 + depth)
        return [self.token, self.num_new, int(self.has_ended), *path]

    @classmethod
    def from_ints(cls, numbers: Sequence[int]) -> "RoundVerdict":
        """Return the verdict that :meth:`to_ints` encoded."""
        token, num_new, has_ended = numbers[:3]
        return cls(token, num_new, bool(has_ended), unpack_tokens(numbers[3:]))


def generate_speculatively(
    answer: Answer, drafter: Drafter | None, pace: Pace, tree: Tree | None = None
) -> tuple[list[int], SpeculationStats]:
    """Decode like :func:`apbv.decode.answer.generate_tokens`, but several tokens per pass.

    A pass is a forward pass of the target.

    Every token is distributed as the target's own would be; at temperature 0, and always with a
    tree, it is the same token.

    Args:
        drafter: the drafter on the leader; None on the others.
        pace: decides how many levels are drafted, and whether a draft is dropped that costs more
            time than it saves.
        tree: the shape of what is drafted per round, the same on every host; None: a chain, as long
            as ``pace`` says.

    Returns:
        The new tokens, and the statistics, with times as measured on this host.

    Raises:
        ModelOutputError: the target's logits are NaN or infinite; on every host. A draft with such
            logits is dropped.
    """
    hosts = answer.decoder.hosts
    decoder = answer.decoder
    tokens = answer.tokens
    stats = SpeculationStats(record=Recorder(hosts.clock))
    whole = tree or Tree.chain(pace.most)
    token, has_ended = answer.choose(answer.logits)
    new = [token]
    is_drafting = not answer.sampling.is_constrained
    if not is_drafting:
        stats.switch_off(CONSTRAINED, 0)
    while True:
        answer.add(new)
        if has_ended:
            return tokens, stats
        # Draft. The target adds a token to the drafted ones.
        limit = whole.cut(answer.num_left - 1)
        proposal = None
        if is_drafting and limit.num_drafted:
            with stats.record.section("draft"):
                proposal = _draft(drafter, answer, limit, pace, stats)
            is_drafting = proposal is not None
        if proposal is None:
            proposal = Proposal([])
        shape = limit.first(len(proposal.tokens))
        drafted = [tokens[-1], *proposal.tokens]

        # Verify.
        with stats.record.section("verify"):
            if tree is None:
                rows = decoder.advance(drafted)
            else:
                rows = decoder.advance(drafted, shape.depths, shape.visible)
            numbers = None
            if hosts.is_leader:
                assert rows is not None, "the leader has the target's logits"
                hosts.settle()
                decision = _decide(answer, shape, proposal, rows, is_chain=tree is None)
                numbers = decision.to_ints(shape.depth)
            numbers = hosts.broadcast_ints(numbers, RoundVerdict.num_ints(shape.depth))
            verdict = RoundVerdict.from_ints(numbers)
            answer.require_token(verdict.token)
            path = verdict.path
            has_ended = verdict.has_ended
            accepted = [drafted[node] for node in path[1:]]
            new = [*accepted, verdict.token][: verdict.num_new]
            # All new tokens but the last are in the KV then, and no others.
            decoder.take_back(len(shape), path[: len(new)])

        # Learn.
        if is_drafting and drafter is not None:
            assert rows is not None, "the leader drafts, and has the target's logits"
            drafter.learn(new, rows[: len(new)])
        num_accepted = len(path) - 1
        was_rejected = path[-1] in shape.parents  # a node below the path's end
        stats.num_target_forwards += 1
        stats.num_drafted += shape.num_drafted
        stats.num_accepted += num_accepted
        if was_rejected:
            stats.num_rejections += 1
        if is_drafting:
            stats.rounds += 1
            pace.learn(shape.depth, *stats.seconds_of_round(), len(new))
            if shape.depth:
                pace.acceptance.learn(shape.depth, num_accepted)


def _decide(
    answer: Answer, shape: Tree, proposal: Proposal, rows: Tensor, is_chain: bool
) -> RoundVerdict:
    """Verify a round's draft on host 0.

    Args:
        shape: of the draft.
        rows: the target's logits after every node, ``[len(shape), V]``.
        is_chain: whether speculative sampling verifies it, and not the target's own tokens.
    """
    index = answer.next_index
    drafted = [answer.tokens[-1], *proposal.tokens]
    indices = [index + depth for depth in shape.depths]
    allowed = answer.allowed(rows, indices, proposal.tokens, shape.visible[:, 1:])
    try:
        if is_chain:
            verdict = verify_window(proposal, allowed, index, answer.sampling)
            assert verdict.next_token is not None, "there are logits for a bonus"
            path = list(range(verdict.num_accepted + 1))
            token = verdict.next_token
        else:
            path, token = verify_tree(shape, drafted, allowed, index, answer.sampling)
    except NotFiniteError:
        return RoundVerdict.not_finite()
    new = [*(drafted[node] for node in path[1:]), token]
    answer.tell_of(rows[path], new)
    new, has_ended = answer.cut(new)
    return RoundVerdict(token, len(new), has_ended, path)


def _draft(
    drafter: Drafter | None, answer: Answer, limit: Tree, pace: Pace, stats: SpeculationStats
) -> Proposal | None:
    """Draft on host 0, at most the given tree.

    Return it on every host, or None if the draft is switched off.
    """
    hosts = answer.decoder.hosts
    most = limit.num_drafted
    proposal = None
    numbers = None
    if hosts.is_leader:
        assert drafter is not None, "the leader drafts"
        proposal = _propose(drafter, answer, limit, pace, stats)
        if proposal is None:
            numbers = [SWITCHED_OFF, *[0] * most]
        else:
            numbers = pack_tokens(proposal.tokens, most)
    numbers = hosts.broadcast_ints(numbers, 1 + most)
    if numbers[0] == SWITCHED_OFF:
        return None
    if proposal is not None:
        return proposal
    return Proposal(unpack_tokens(numbers))


def _propose(
    drafter: Drafter, answer: Answer, limit: Tree, pace: Pace, stats: SpeculationStats
) -> Proposal | None:
    """Draft as many levels as pay; None if the draft is switched off."""
    if pace.is_losing():
        stats.switch_off(LOSING, len(answer.tokens))
        return None
    windows = pace.windows([pace.acceptance.rate])
    assert windows is not None, "only a batch goes without drafts for a while"
    tree = limit.cut(windows[0])
    if not tree.num_drafted:
        return Proposal([])
    try:
        return drafter.propose(answer.tokens, tree)
    except NotFiniteError as error:
        stats.switch_off(f"it gave {error}", len(answer.tokens))
        return None
