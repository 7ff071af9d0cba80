"""The second half of `--help` of each `dora-rl bench`: how it measures, and examples."""

ORCHESTRATOR = """\b
The world is a cheap driver in virtual time whose own cost is not counted: 4 slots on each
instance, a batch that is as large as the fleet, lognormal lengths, a report of every instance
each 10 s. Each size is warmed up until every slot is busy and two versions are live, and then
measured over whole train steps, so --events is rounded up.

\b
Examples:
  dora-rl bench orchestrator
  dora-rl bench orchestrator --instances 64,1024 --json
  dora-rl bench orchestrator --quick
"""

CONTROL = """\b
The driver is the real one, with its messages, core, journal, ledger and timeline. Its workers
are one process that computes nothing and says what so many instances of a large model would: a
report of all running lengths each --report-period, prefixes each --save-period, finished
trajectories at 30 tokens a second, answers to every install and move. A batch is an eighth of
what is in flight. Rewards take 0.5 s and no processor; responses have 8 tokens on the disk, so
that reading and decoding long ones is not measured, nor what Ray takes for its own calls. The
first train step is warm-up.

\b
Examples:
  dora-rl bench control
  dora-rl bench control --instances 1000 --json
  dora-rl bench control --quick
"""

ENGINE = """\b
Each contestant is a process that loads once; they are asked in turn, so that the noise of the
machine hits all, and one computes at a time. Same prompts and lengths for all, temperature 1,
log-probabilities on. Prefill is the time for one token of every sequence, decode what more
tokens take beyond that. The roofline is the slower of reading the weights and the KV once a
step, and of the operations at the peak of torch.mm, both measured in the same run.

\b
hf is generate() of transformers. vllm needs its own environment: make venv-vllm, or a Python
that has vLLM in $DORA_RL_VLLM_PYTHON.

\b
Examples:
  dora-rl bench engine
  dora-rl bench engine --against hf,vllm --batches 1,8,32,64,128
  dora-rl bench engine --model tiny --batches 8 --json
  dora-rl bench engine --quick
"""

MIGRATION = """\b
By KV: exported, sent to another process, imported, until the next token is there. Read again:
its tokens are submitted there, until the next token is there. Both continue as without the move,
up to rounding: the table counts the moves after which a token differed. In bfloat16 rounding
depends on how many rows are computed at once, so some do; with --dtype float32 hardly one.
Before each way the target installs its version anew, so that no cache knows the tokens.

\b
--engine vllm needs its own environment (make venv-vllm). It is measured with greedy sampling: its
noise begins anew after a move.

\b
Examples:
  dora-rl bench migration
  dora-rl bench migration --engine vllm
  dora-rl bench migration --model tiny --tokens 100,1000 --json
  dora-rl bench migration --quick
"""

SPECULATION = """\b
The responses of each prompt go through an engine with as many slots as the batch, sampled at
temperature 1 and ended as the model ends them, by an engine with speculation and one without, in
turns. While more than 4 run at once, nothing is proposed. Seconds are those that the process
computed, of each prompt in its fastest repeat.
The quickstart's model gets the longest prompts of its task, any other a few questions.

\b
Examples:
  dora-rl bench speculation
  dora-rl bench speculation --model quickstart --batches 1,4 --json
  dora-rl bench speculation --quick
"""

VERSIONS = """\b
One engine holds all versions, each with other weights. The rows of the batch are split evenly.
With --lora the versions are adapters of one base, and a second engine, which serves the base
without adapters, is measured in turns with it: its rate is what "to no adapter" compares with.

\b
--engine vllm needs its own environment (make venv-vllm) and --lora, as it holds one full set of
weights. Fingerprints of the versions are computed by the trainer's code before it starts.

\b
Examples:
  dora-rl bench versions
  dora-rl bench versions --model tiny --lora --lora-rank 8
  dora-rl bench versions --lora --engine vllm
  dora-rl bench versions --model tiny --batch 64 --versions 1,4,8 --json
  dora-rl bench versions --quick
"""

TRL = """\b
Same model, questions, reward, learning rate, group size and lengths; temperature 1, no KL. Each
has every processor, one after the other, and works in its own best way, which a short search
finds: TRL's dtype and sequences in one pass; ours in turns or at once. Ours trains in float32 and
generates in the dtype of the model's files. Responses end where the model ends them, so both
numbers of tokens are shown. Warm-up is not counted. The default takes most of an hour on two
cores.

\b
TRL needs its own environment: make venv-trl, or a Python that has TRL in --trl-python.

\b
Examples:
  dora-rl bench trl
  dora-rl bench trl --steps 3 --max-tokens 64 --json
  dora-rl bench trl --quick
"""

RESUME = """\b
Runs of so many events, synthetic but through the real journal, ledger and snapshots, are resumed in
turns; each died half-way between two snapshots. Only opening and taking over is timed: no process
starts. The default takes some minutes, nearly all of them to make the long history.

\b
Examples:
  dora-rl bench resume
  dora-rl bench resume --events 10000,100000,300000 --json
  dora-rl bench resume --quick
"""

DURABILITY = """\b
The quickstart without its evaluations, with the ledger and without it, in turns. Then a rollout
process is killed, and a whole run, which is resumed. The default takes some six minutes.

\b
Examples:
  dora-rl bench durability
  dora-rl bench durability --rounds 1 --steps 8 --json
  dora-rl bench durability --quick
"""

TRANSPORTS = """\b
The sender and every receiver are processes of this machine; all receivers ask at once. Weights are
random, in bfloat16; --changed of them move to the next number with every version, as at a learning
rate of 1e-6. Publish is the write into the store and, with +delta, the comparison with the version
before. Receive is until the last receiver has mapped the version and compared it with its digests.
With object_store, an actor of a Ray cluster of this machine is beside each of them. The default
needs 11 GB of disk and 3 GB of memory, and takes long on two cores.

\b
Examples:
  dora-rl bench transports
  dora-rl bench transports --transports directory,process_group+delta --parameters 100 --json
  dora-rl bench transports --quick
"""

MODES = """\b
The quickstart's model and task, with long-tailed lengths, as processes of this machine. Every
paradigm runs through the same core; what differs is a row of its table. First the parts of a step
are measured alone: its limit is what they take with every core busy, and each paradigm has a floor
of its own (docs/performance.md). Rollout-only is the part of a step in which nothing is trained,
stalls are waits for a group at its deadline. The search for each one's best split of the cores is
printed; then they take turns. The default takes about a quarter of an hour on two cores.

\b
Workloads; reasoning and long are sized from measured rates, so that the share holds anywhere:
  default     power-law lengths, 64 prompts; training dominates
  reasoning   p99 5 times the mean, longest 12.5 times; rollout is 65 to 75 % of a sync step
  long        in every batch a response of 8 times the mean; rollout is 85 % or more
  agentic     several turns with tools that take 50 ms (median) to 2 s (p99), really waited for

\b
Examples:
  dora-rl bench modes
  dora-rl bench modes --paradigms sync,multi_version --rounds 1 --steps 8 --json
  dora-rl bench modes --quick
  dora-rl bench modes --workload long --paradigms sync,in_flight,multi_version
  dora-rl bench modes --engine vllm --lora --paradigms sync,multi_version --search-steps 0
"""

CONVERGENCE = """\b
sync, multi_version with K = 1 and 3, and in_flight, from the same model, with equal numbers of
trajectories. Held-out reward is that of the last version on prompts that no run trains on. The
default takes well over an hour on two cores.

\b
Examples:
  dora-rl bench convergence --out convergence.json --plot convergence.png
  dora-rl bench convergence --seeds 2 --steps 20
  dora-rl bench convergence --quick
"""

EXAMPLES = """\b
Examples:
  dora-rl bench orchestrator
  dora-rl bench engine --model tiny
  dora-rl bench engine --against hf,vllm --json
  dora-rl bench modes --quick
"""
