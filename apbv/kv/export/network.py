"""Offers a prefill's KV over the network, to a consumer such as vLLM with apbv's connector."""

from dataclasses import asdict

from ...config.refusals import refuse
from ..offers import Offers
from ..sending import Share
from ..ticket import Ticket, new_token, new_transfer
from .prefilled import PrefilledKV, exported_share, facts_of, hybrid_name


def offer(prefilled: PrefilledKV, offers: Offers) -> Ticket | None:
    """Export the KV; collective; see :meth:`apbv.PrefillResult.offer`."""
    hosts = prefilled.kv.hosts
    refuse(
        handing_over="offer()",
        reduction=None if prefilled.reduction is None else prefilled.reduction.method,
    )
    refuse(offering="offer()", hybrid=hybrid_name(prefilled))
    names = f"{new_transfer()} {new_token()}".encode() if hosts.is_leader else None
    transfer, token = hosts.broadcast_bytes(names).decode().split()
    try:
        # Every process holds its KV.
        with hosts.local_stage("offering the KV"):
            share = exported_share(prefilled)
            if share is not None:
                held = Share(share.tokens, share.kv_heads, share.layers)
                offers.hold(transfer, token, held)
            facts = asdict(facts_of(prefilled)) if hosts.is_leader else {}
        addresses = hosts.gather_json(None if share is None else offers.address)

        # The leader's ticket names them all.
        if not hosts.is_leader:
            return None
        sources = []
        for address in addresses:
            if address is not None:
                host, port = address
                sources.append((host, port))
        ticket = Ticket(transfer=transfer, token=token, sources=tuple(sources), **facts)
        offers.publish(ticket)
        return ticket
    except BaseException:
        offers.drop(transfer)
        raise
