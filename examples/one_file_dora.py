"""DORA in one file: several policy versions live at once, and nobody waits for the long tail.

    python examples/one_file_dora.py     # needs torch alone; under a minute on one core

Synchronous RL generates a batch, waits for its longest response, trains, and starts again. Here
the trainer takes any B groups that are complete, while longer ones continue *with the weights that
they were started with*; old versions stay loaded until their last response is done. One number
bounds it: a response is trained at most K steps after its version. K = 0 is synchronous
training: the two runs below are one code with another K. Read `run` first: it is the loop.
"""

import copy
import hashlib
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

NUM_INSTANCES = 8  # rollout replicas; each hosts one version at a time
SLOTS = 8  # responses that one instance decodes side by side
GROUPS_PER_STEP = 8  # B: a batch is B complete groups
GROUP_SIZE = 8  # responses to one prompt, judged against each other
DEPTH = 2 * GROUPS_PER_STEP  # groups under way that we aim at: more only makes them wait and age
TRAIN_TIME = 8  # what a train step takes on its own device, in decode steps

# The task: add `step` to `start`, `terms` times, modulo 10; write each sum and how many terms
# are left. So a prompt sets the length of its response. Most are short, a few very long.
MAX_TERMS = 12
END = 10 + MAX_TERMS  # tokens: 0-9 are sums, 10 + n says "n terms left", END also opens
Prompt = tuple[int, int, int]  # start, step, terms


def make_prompt(seed: str) -> Prompt:
    source = random.Random(seed)
    terms = min(MAX_TERMS, int(1 / (1 - source.random())))  # P(n terms or more) = 1 / n
    return source.randrange(10), source.randint(1, 3), terms


def solution(prompt: Prompt) -> list[int]:
    start, step, terms = prompt
    lines = [((start + step * n) % 10, 10 + terms - n) for n in range(1, terms + 1)]
    return [*[token for line in lines for token in line][:-1], END]


@dataclass(eq=False)
class Trajectory:
    """One response to one prompt."""

    name: str
    prompt: Prompt
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # as they were when it was sampled
    digests: set[str] = field(default_factory=set)  # of all weights that wrote one of its tokens
    state: list[Tensor] = field(default_factory=list)  # moves along: no token is computed twice

    @property
    def done(self) -> bool:
        return self.response[-1:] == [END] or len(self.response) == 2 * MAX_TERMS

    @property
    def reward(self) -> float:
        return float(self.response == solution(self.prompt))


@dataclass(eq=False)
class Group:
    """The responses to one prompt, pinned to one version."""

    version: int
    deadline: int  # the last train step that may consume it: version + K
    members: list[Trajectory]
    trained_at: list[int] = field(default_factory=list)  # train steps; exactly one in the end

    @property
    def complete(self) -> bool:
        return all(member.done for member in self.members)


class Policy(nn.Module):
    """A GRU. Its hidden state plays the part of a transformer's KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(END + 1, 96), nn.Linear(96, END + 1)
        self.read, self.gru = nn.Linear(3 * 96, 96), nn.GRU(96, 96, batch_first=True)

    def prefill(self, prompts: list[Prompt]) -> Tensor:
        return self.read(self.embed(torch.tensor(prompts)).flatten(1)).tanh()[None]

    def forward(self, inputs_BT: Tensor, state_1BH: Tensor) -> tuple[Tensor, Tensor]:
        hidden_BTH, state_1BH = self.gru(self.embed(inputs_BT), state_1BH)
        return self.head(hidden_BTH).log_softmax(-1), state_1BH

    def digest(self) -> str:
        """Names the weights by their content, so that the audit need not trust a counter."""
        weights = nn.utils.parameters_to_vector(self.parameters()).detach()
        return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def log_probs_of(policy: Policy, shown: list[Trajectory]) -> tuple[Tensor, Tensor]:
    """The log-probability of every token of the responses, and which entries are no padding."""
    tokens_BT = pad_sequence([torch.tensor(t.response) for t in shown], True, -1)
    known_BT = tokens_BT.clamp(min=0)
    inputs_BT = torch.cat([torch.full((len(shown), 1), END), known_BT[:, :-1]], 1)
    log_probs_BTV, _ = policy(inputs_BT, policy.prefill([t.prompt for t in shown]))
    return log_probs_BTV.gather(2, known_BT[:, :, None]).squeeze(2), tokens_BT >= 0


class Instance:
    """One rollout replica: the weights of one version, and the responses that it decodes."""

    def __init__(self, version: int, policy: Policy, running: list[Trajectory]) -> None:
        self.version, self.policy, self.digest = version, policy, policy.digest()
        self.running = running

    @torch.no_grad()
    def decode(self) -> None:
        """One more token for every running response."""
        for new in [t for t in self.running if not t.state]:
            new.state = [self.policy.prefill([new.prompt])]
        last_B1 = torch.tensor([[(t.response or [END])[-1]] for t in self.running])
        state_1BH = torch.cat([t.state[0] for t in self.running], 1)
        log_probs_B1V, state_1BH = self.policy(last_B1, state_1BH)
        log_probs_BV = log_probs_B1V.squeeze(1)
        # The noise is a function of the trajectory and the position alone: it does not matter
        # where, when and beside whom a response is decoded.
        noise = [[random.Random(f"{t.name} {len(t.response)}").random()] for t in self.running]
        sums_BV = log_probs_BV.exp().cumsum(1)  # their last may be a little less than 1
        sampled_B1 = torch.searchsorted(sums_BV, torch.tensor(noise)).clamp(max=END)
        for row, t in enumerate(self.running):
            t.response.append(int(sampled_B1[row]))
            t.log_probs.append(float(log_probs_BV[row, sampled_B1[row]]))
            t.digests.add(self.digest)
            t.state = [state_1BH[:, row : row + 1]]
        self.running = [t for t in self.running if not t.done]


def free_slots(instances: list[Instance]) -> int:
    return sum(SLOTS - len(instance.running) for instance in instances)


def pack(instances: list[Instance], newest: int, policy: Policy) -> None:
    """Pack each older version into as few instances as hold it; the others get the newest."""
    for version in {instance.version for instance in instances} - {newest}:
        hosts = sorted(
            (i for i in instances if i.version == version), key=lambda i: -len(i.running)
        )
        while hosts and len(hosts[-1].running) <= free_slots(hosts[:-1]):
            emptied = hosts.pop()
            while emptied.running:  # migrate: another place, the same version
                host = next(host for host in hosts if len(host.running) < SLOTS)
                host.running.append(emptied.running.pop())
            instances[instances.index(emptied)] = Instance(newest, policy, [])


def may_start(outstanding: list[Group], deadline: int, next_step: int) -> bool:
    """Whether all groups, and one more, can be trained in time: by no deadline are more due than
    the steps up to it take. With `next_batch`, staleness stays <= K and nothing is dropped."""
    deadlines = [group.deadline for group in outstanding] + [deadline]
    return len(deadlines) <= DEPTH and all(
        sum(other <= due for other in deadlines) <= (due - next_step + 1) * GROUPS_PER_STEP
        for due in set(deadlines)
    )


def next_batch(outstanding: list[Group], next_step: int) -> list[Group] | None:
    """B complete groups, earliest deadline first. None if too few, or if one that is due runs."""
    complete = [group for group in outstanding if group.complete]
    late = [g for g in outstanding if g.deadline == next_step and not g.complete]
    if len(complete) < GROUPS_PER_STEP or late:
        return None
    return sorted(complete, key=lambda group: group.deadline)[:GROUPS_PER_STEP]


def train(policy: Policy, optimizer: torch.optim.Optimizer, batch: list[Group]) -> None:
    """One step of GRPO. A response has *one* behaviour policy, so PPO's plain ratio holds."""
    members = [member for group in batch for member in group.members]
    rewards_BG = torch.tensor([[member.reward for member in group.members] for group in batch])
    advantage_N1 = (rewards_BG - rewards_BG.mean(1, keepdim=True)).view(-1, 1)
    new_NT, real_NT = log_probs_of(policy, members)
    old_NT = pad_sequence([torch.tensor(member.log_probs) for member in members], True)
    ratio_NT = (new_NT - old_NT).exp()
    gain_NT = torch.minimum(ratio_NT * advantage_N1, ratio_NT.clamp(0.8, 1.2) * advantage_N1)
    optimizer.zero_grad()
    (-gain_NT[real_NT].mean()).backward()
    optimizer.step()


@dataclass
class Result:
    policy: Policy
    digest_of: dict[int, str]  # version -> its weights
    groups: list[Group] = field(default_factory=list)  # all that were ever started
    decode_steps: int = 0
    most_versions: int = 0  # live at once


def run(start: Policy, max_staleness: int, num_steps: int) -> Result:
    """The loop. Its clock counts decode steps: one takes about as long for few responses as for
    many, since it reads all the weights anyway."""
    policy = copy.deepcopy(start)  # the trainer's own
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    newest, published = 0, copy.deepcopy(policy)  # the version that new groups start on
    next_step, busy_until = 0, 0  # step s is taken at version s and publishes version s + 1
    instances = [Instance(newest, published, []) for _ in range(NUM_INSTANCES)]
    result = Result(policy, {newest: published.digest()})
    outstanding: list[Group] = []  # started and not trained yet

    while newest < num_steps:
        # 1. A train step has ended: publish its weights. Whatever runs is not disturbed.
        if newest < next_step and result.decode_steps >= busy_until:
            newest, published = newest + 1, copy.deepcopy(policy)
            result.digest_of[newest] = published.digest()
        # 2. Make room for the newest version and start groups on it, as far as K allows.
        pack(instances, newest, published)
        hosts = [instance for instance in instances if instance.version == newest]
        while len(result.groups) < num_steps * GROUPS_PER_STEP and free_slots(hosts) >= GROUP_SIZE:
            if not may_start(outstanding, newest + max_staleness, next_step):
                break
            number, prompt = len(result.groups), make_prompt(f"train {len(result.groups)}")
            members = [Trajectory(f"{number}.{n}", prompt) for n in range(GROUP_SIZE)]
            for member in members:
                min(hosts, key=lambda host: len(host.running)).running.append(member)
            outstanding.append(Group(newest, newest + max_staleness, members))
            result.groups.append(outstanding[-1])
        # 3. An idle trainer takes a batch as soon as there is one. It waits for no response,
        #    however long, but for one that would be too old at the next step.
        if newest == next_step and (batch := next_batch(outstanding, next_step)):
            train(policy, optimizer, batch)
            for group in batch:
                group.trained_at.append(next_step)
                outstanding.remove(group)
            next_step, busy_until = next_step + 1, result.decode_steps + TRAIN_TIME
        # 4. Every instance decodes one token for each of its responses, with its own version.
        busy = [instance for instance in instances if instance.running]
        result.most_versions = max(result.most_versions, len({i.version for i in busy}))
        result.decode_steps += 1
        for instance in busy:
            instance.decode()
    return result


def audit(result: Result, max_staleness: int) -> str:
    """Check the promises on what the run left behind, not on what it meant to do."""
    for group in result.groups:
        written_by = set.union(*(member.digests for member in group.members))
        assert written_by == {result.digest_of[group.version]}, "not one version"
        assert len(group.trained_at) == 1, "lost, or trained twice"
        assert 0 <= group.trained_at[0] - group.version <= max_staleness, "too old"
    return f"{len(result.groups)} groups, one version each, trained once, staleness <= K"


def warm_start(num_updates: int = 250) -> Policy:
    """RL improves a model, it does not begin one: this one was shown sums, many of them wrong."""
    torch.manual_seed(0)
    policy, source = Policy(), random.Random("warm start")
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(num_updates):
        shown = [Trajectory("", make_prompt(str(source.random()))) for _ in range(32)]
        for t in shown:
            for token in solution(t.prompt):
                wrong = token < 10 and source.random() < 0.35
                t.response.append(source.randrange(10) if wrong else token)
        log_probs_BT, real_BT = log_probs_of(policy, shown)
        optimizer.zero_grad()
        (-log_probs_BT[real_BT].mean()).backward()
        optimizer.step()
    return policy


def evaluate(policy: Policy, num_prompts: int = 400) -> float:
    """The share of right responses to prompts that no run trains on."""
    asked = [Trajectory(f"eval {n}", make_prompt(f"eval {n}")) for n in range(num_prompts)]
    instance = Instance(0, policy, asked)
    while instance.running:
        instance.decode()
    return sum(trajectory.reward for trajectory in asked) / num_prompts


def main(num_steps: int = 100, max_staleness: int = 3) -> None:
    torch.set_num_threads(1)
    start, decode_steps = warm_start(), []
    for bound in (0, max_staleness):
        result = run(start, bound, num_steps)
        decode_steps.append(result.decode_steps)
        num_tokens = sum(len(t.response) for group in result.groups for t in group.members)
        full = num_tokens / (NUM_INSTANCES * SLOTS) / result.decode_steps
        busy = num_steps * TRAIN_TIME / result.decode_steps
        print(f"K = {bound}: {num_steps} train steps in {result.decode_steps} decode steps")
        print(f"  trainer busy {busy:.0%}, slots {full:.0%}; live versions: {result.most_versions}")
        print(f"  reward {evaluate(start):.2f} -> {evaluate(result.policy):.2f}")
        print("  audit:", audit(result, bound))
    print(f"sync took {decode_steps[0] / decode_steps[1]:.1f} times the decode steps")


if __name__ == "__main__":
    main()
