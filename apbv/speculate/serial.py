"""Sequential speculative decoding: drafts a chain or a tree of tokens, then verifies it."""

from torch import Tensor

from ..decode.answer import NO_TOKEN, Answer
from ..decode.sampling import NotFiniteError
from ..stats import Recorder
from .drafters import Drafter, Proposal, pack_tokens, unpack_tokens
from .pace import CONSTRAINED, LOSING, Pace, SpeculationStats
from .tree import Tree, verify_tree
from .verify import verify_window

SWITCHED_OFF = -1  # sent by host 0 instead of the number of drafted tokens


def generate_speculatively(
    answer: Answer, drafter: Drafter | None, pace: Pace, tree: Tree | None = None
) -> tuple[list[int], SpeculationStats]:
    """Decode like :func:`apbv.decode.answer.generate_tokens`, but several tokens per forward pass
    of the target.

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
        AgreedError: the target's logits are NaN or infinite; on every host. A draft with such
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
        # The target adds a token.
        limit, proposal, verdict = (whole.cut(answer.num_left - 1), None, None)
        if is_drafting and limit.num_drafted:
            with stats.record.section("draft"):
                proposal = _draft(drafter, answer, limit, pace, stats)
            is_drafting = proposal is not None
        proposal = proposal or Proposal([])
        shape = limit.first(len(proposal.tokens))
        drafted = [tokens[-1], *proposal.tokens]
        with stats.record.section("verify"):
            rows = decoder.advance(
                drafted, *(() if tree is None else (shape.depths, shape.visible))
            )
            if hosts.is_leader:
                hosts.settle()
                verdict = _encode_verdict(answer, shape, proposal, rows, is_chain=tree is None)
            token, num_new, has_ended, *path = hosts.broadcast_ints(verdict, shape.depth + 5)
            answer.require_token(token)
            path = unpack_tokens(path)
            new = [*(drafted[node] for node in path[1:]), token][:num_new]
            # All new tokens but the last are in the KV then, and no others.
            decoder.take_back(len(shape), path[: len(new)])
        if is_drafting and drafter is not None:
            drafter.learn(new, rows[: len(new)])
        stats.rounds += is_drafting
        stats.num_target_forwards += 1
        stats.num_drafted += shape.num_drafted
        stats.num_accepted += len(path) - 1
        stats.num_rejections += path[-1] in shape.parents
        if is_drafting:
            pace.learn(shape.depth, *stats.seconds_of_round(), len(new))
            if shape.depth:
                pace.acceptance.learn(shape.depth, len(path) - 1)


def _encode_verdict(
    answer: Answer, shape: Tree, proposal: Proposal, rows: Tensor, is_chain: bool
) -> list[int]:
    """Encode for all hosts the token after the accepted path, the number of new tokens, the end,
    and the path."""
    index = answer.next_index
    drafted = [answer.tokens[-1], *proposal.tokens]
    indices = [index + depth for depth in shape.depths]
    allowed = answer.allowed(rows, indices, proposal.tokens, shape.visible[:, 1:])
    try:
        if is_chain:
            verdict = verify_window(proposal, allowed, index, answer.sampling)
            path = range(verdict.num_accepted + 1)
            token = verdict.next_token
        else:
            path, token = verify_tree(shape, drafted, allowed, index, answer.sampling)
    except NotFiniteError:
        return [NO_TOKEN, 1, True, *pack_tokens([0], shape.depth + 1)]
    new = [*(drafted[node] for node in path[1:]), token]
    answer.tell_of(rows[list(path)], new)
    new, has_ended = answer.cut(new)
    return [token, len(new), has_ended, *pack_tokens(path, shape.depth + 1)]


def _draft(
    drafter: Drafter | None, answer: Answer, limit: Tree, pace: Pace, stats: SpeculationStats
) -> Proposal | None:
    """Draft on host 0, at most the given tree; return it on every host, or None if the draft is
    switched off."""
    hosts = answer.decoder.hosts
    most = limit.num_drafted
    proposal = None
    numbers = None
    if hosts.is_leader:
        if pace.is_losing():
            stats.switch_off(LOSING, len(answer.tokens))
        else:
            tree = limit.cut(pace.windows([pace.acceptance.rate])[0])
            try:
                proposal = (
                    drafter.propose(answer.tokens, tree) if tree.num_drafted else Proposal([])
                )
            except NotFiniteError as error:
                stats.switch_off(f"it gave {error}", len(answer.tokens))
        numbers = (
            [SWITCHED_OFF, *[0] * most] if proposal is None else pack_tokens(proposal.tokens, most)
        )
    numbers = hosts.broadcast_ints(numbers, most + 1)
    return None if numbers[0] == SWITCHED_OFF else proposal or Proposal(unpack_tokens(numbers))
