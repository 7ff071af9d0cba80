"""Why a trajectory may fail for good: its retries are used up, or it was refused. Age is none.

A Fail is checked against what the stream showed of its trajectory, and against the limits
that the settings grant.
"""

from dora_rl.core.audit.records import JUDGING, OPEN, REJECTED, SCORING, Group, Member
from dora_rl.core.audit.report import Breaches
from dora_rl.core.protocol.settings import OnFailedMember, Settings
from dora_rl.core.protocol.types import TrajectoryId


class Causes:
    def __init__(self, settings: Settings, clock: Breaches) -> None:
        self._settings = settings
        self._clock = clock

    def of_failure(self, group: Group, member: Member) -> bool:
        """Had enough failed, or gone unanswered, for this member to fail?"""
        settings = self._settings
        if group.stage == JUDGING:
            return group.judgements > settings.max_retries and self.unanswered(group.asked_at)
        if group.stage == REJECTED:
            return True
        if group.stage != OPEN:
            return False
        sibling_failed = group.left < len(group.members)
        if sibling_failed and settings.on_failed_member is OnFailedMember.FAIL_GROUP:
            return True
        unanswered = member.stage == SCORING and self.unanswered(member.since)
        return (
            member.refused
            or member.failures + unanswered > settings.max_retries
            or member.losses > settings.max_losses
        )

    def unanswered(self, asked_at: float) -> bool:
        """Has a score or a judgement been waited for as long as it may take?"""
        return self._clock.now >= asked_at + self._settings.score_timeout_s

    def stuck(self, trajectory: TrajectoryId, member: Member) -> bool:
        """Has a placement stood still for too long, as far as its instance's last report tells?

        Earlier reports are not kept: they would cost a look at every trajectory in each.
        """
        limit = self._clock.now - self._settings.trajectory_timeout_s
        if member.since >= limit:
            return False
        host = member.host
        if host is None or host.heard_at < limit:
            return True
        return all(
            (trajectory_id, fence) != (trajectory, member.fence)
            for trajectory_id, fence, _ in host.lengths
        )
