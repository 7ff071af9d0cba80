"""Which groups are filtered, and that nobody needs torch to know."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from dora_rl.algorithms.filters import NO_SIGNAL, judge
from dora_rl.algorithms.settings import AlgorithmSettings

rewards = st.lists(st.sampled_from((-1.0, 0.0, 1.0)), max_size=6)


@given(rewards)
def test_groups_of_equal_rewards_are_filtered(group: list[float]) -> None:
    differ = any(reward != group[0] for reward in group)
    assert judge(AlgorithmSettings(preset="dapo"), group) == (None if differ else NO_SIGNAL)


@given(rewards)
def test_without_dynamic_sampling_all_are_trained(group: list[float]) -> None:
    assert judge(AlgorithmSettings(preset="grpo"), group) is None


def test_settings_and_filters_are_free_of_torch() -> None:
    code = (
        "import sys, dora_rl.algorithms.filters, dora_rl.algorithms.settings; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
