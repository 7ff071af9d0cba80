"""Events and commands are values: equal by type and fields, hashed alike, without a dict."""

from typing import get_args

import pytest

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev

MESSAGES = (*get_args(ev.Event), *get_args(cm.Command))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_is_a_small_value(kind: type) -> None:
    fields = range(len(kind.__slots__))
    one, same = kind(*fields), kind(*fields)
    assert one == same and hash(one) == hash(same)
    assert not hasattr(one, "__dict__")
    if fields:
        assert one != kind(*fields[:-1], -1)


def test_messages_of_two_kinds_are_never_equal() -> None:
    assert cm.Sleep(1, 2) != cm.Wake(1, 2)
    assert ev.TrajectoryScored(1, 2) != (1, 2)
