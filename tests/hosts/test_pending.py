"""Results that arrive later."""

import pytest

import apbv.hosts
from apbv.hosts import Pending


def test_a_result_is_waited_for_once():
    waits = []
    pending = Pending(lambda: waits.append("once") or 3, ready=lambda: False)
    assert not pending.ready() and pending.wait() == 3
    assert pending.ready() and pending.wait() == 3 and waits == ["once"]


def test_a_value_of_a_result_arrives_with_it():
    arrived = []
    pending = Pending(lambda: 3, ready=lambda: bool(arrived))
    doubled = pending.then(lambda value: 2 * value)
    assert not doubled.ready()
    arrived.append(True)
    assert doubled.ready() and doubled.wait() == 6 and pending.wait() == 3


def test_an_error_is_raised_where_the_result_is_waited_for():
    pending = Pending(lambda: 1 // 0).then(str)
    with pytest.raises(ZeroDivisionError):
        pending.wait()


def test_the_former_name_warns():
    with pytest.warns(DeprecationWarning, match=r"apbv\.hosts\.Exchange is now"):
        assert apbv.hosts.Exchange is Pending
