"""What a user may set of a task: the section `[task]`."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from dora_rl.config import ConfigModel

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class RewardSettings(ConfigModel):
    """One of several rewards: a built-in by `name`, or a `function` of the user's."""

    name: str = ""
    function: str = ""
    weight: float = 1.0
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_something(self) -> "RewardSettings":
        if not self.name and not self.function:
            raise ValueError(
                "function is missing. Give `name` (a built-in reward) or `function` "
                "(module:function)."
            )
        return self


def _form(value: Any) -> str:
    return "one" if isinstance(value, str) else "several"


# With a discriminator, so that what is wrong in a table is said of the table.
Reward = Annotated[
    Annotated[str, Tag("one")] | Annotated[tuple[RewardSettings, ...], Tag("several")],
    Discriminator(_form),
]


class TaskSettings(ConfigModel):
    """Prompts, rewards and environment of a run."""

    prompts: str | None = None
    """A JSONL file, `hf:NAME[:split]`, `gym:NAME`, or `module:callable` that gives rows."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For whatever makes the prompts: of the generator, the dataset, or the callable."""
    shuffle: bool = True
    epochs: Count | None = None
    """How often the prompts are gone through; endlessly if absent."""
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    system: str = ""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether the model's chat template is applied; auto: if the model has one."""
    long_prompts: Literal["refuse", "skip"] = "refuse"
    """Prompts that leave no room for a response; skip: the next takes its place.

    An evaluation only leaves them out, and asks no prompt twice.
    """
    observation_role: Literal["user", "tool"] = "user"
    """Who says, to a chat model, what an environment answers."""

    reward: Reward | None = None
    """A built-in name, `module:function`, or tables of several with their weights."""
    environment: str | None = None
    max_turns: Count = 8
    reward_workers: Count = 2
    reward_timeout_s: Positive = 10.0
    reward_memory_mb: Annotated[int, Field(ge=16)] = 1024
    """What a worker may use on top of what it has when it starts."""
    reward_network: bool = False
    dry_run: bool = True
    """Score a response to the first prompt before the run."""
    writable: tuple[str, ...] = ()
    """Directories that a worker may write to, besides a scratch directory of its own."""

    import_path: tuple[str, ...] = ()
    """Directories with modules, besides the working one; a TOML file's own is added if used."""

    eval_prompts: str | None = None
    eval_options: dict[str, Any] = Field(default_factory=dict)
    eval_every: Count | None = None
    """Steps between evaluations; none if absent."""
    eval_samples: Count = 1
    """Responses to each prompt of an evaluation."""
    eval_temperature: float = Field(default=0.0, ge=0, description="0: the most probable token")
    eval_size: Count = 256
    """Prompts of an evaluation, at most; generators have no end of their own."""

    @model_validator(mode="after")
    def _evaluation_has_prompts(self) -> "TaskSettings":
        if self.eval_every is not None and self.eval_prompts is None:
            raise ValueError(
                f"eval_every needs eval_prompts: `{self.eval_every}`. Name the prompts that "
                "evaluate, or leave it out."
            )
        return self
