"""`GRPOTrainer` of TRL on the CPU, and the reward that both sides train with.

Runs in the environment of `make venv-trl`, which does not have this project: imports nothing of
it, and TRL only where it is needed, for our own workers import the reward from here.
"""

import gc
import time
from typing import Any

# What TRL can be told to compute in: the dtype of the weights, and whether autocast is on.
# Autocast is its default; weights in bfloat16 halve what generation reads.
DTYPES = {
    "float32": ("float32", False),
    "mixed": ("float32", True),
    "bfloat16": ("bfloat16", False),
}


def reward(response: str) -> float:
    """The share of digits: cheap, the same everywhere, and different within a group."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


class Trl:
    """A model directory, and a new trainer on it for each request."""

    def __init__(self, directory: str, work: str, threads: int) -> None:
        import torch
        from transformers import AutoTokenizer
        from trl import GRPOTrainer  # noqa: F401 -- fail early

        torch.set_num_threads(threads)
        self._directory, self._work = directory, work
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            directory, padding_side="left", local_files_only=True
        )

    def about(self) -> dict[str, Any]:
        import torch
        import trl

        return {
            "version": trl.__version__,
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
        }

    def train(self, questions: list[str], **given: Any) -> dict[str, Any]:
        """Seconds, tokens trained and mean reward of every step; `prompts` as TRL read them."""
        steps = _Steps()
        trainer = self._trainer(questions, steps, **given)
        trainer.train()
        read = [example["prompt"] for example in trainer.train_dataset]
        prompts, *_ = trainer._tokenize_prompts(read)
        del trainer
        gc.collect()  # a trainer refers to itself; its weights must not stay beside the next one's
        return {
            "step_s": [after - before for before, after in steps.spans()],
            "tokens": steps.tokens,
            "completions": steps.completions,
            "rewards": steps.rewards,
            "prompts": [list(map(int, prompt)) for prompt in prompts],
        }

    def _trainer(
        self,
        questions: list[str],
        steps: "_Steps",
        *,
        num_steps: int,
        group_size: int,
        batch: int,
        per_device: int,
        max_tokens: int,
        learning_rate: float,
        dtype: str,
        seed: int,
    ) -> Any:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        weights, autocast = DTYPES[dtype]
        config = GRPOConfig(
            output_dir=f"{self._work}/trl",
            use_cpu=True,
            bf16=autocast,
            model_init_kwargs={"dtype": weights, "local_files_only": True},
            max_steps=num_steps,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=batch // per_device,  # one generation for a whole step
            gradient_checkpointing=False,
            num_generations=group_size,
            max_completion_length=max_tokens,
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            shuffle_dataset=False,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        return GRPOTrainer(
            model=self._directory,
            reward_funcs=steps.score,
            args=config,
            processing_class=self._tokenizer,
            train_dataset=Dataset.from_list([{"prompt": self._prompt(q)} for q in questions]),
            callbacks=[_clock(steps)],
        )

    def _prompt(self, question: str) -> str | list[dict[str, str]]:
        """A chat if the model has a template for it."""
        if self._tokenizer.chat_template is None:
            return question
        return [{"role": "user", "content": question}]


class _Steps:
    """What the steps of one run came to."""

    def __init__(self) -> None:
        self.ends: list[float] = []  # the first is the start
        self.tokens: list[int] = []
        self.completions: list[int] = []
        self.rewards: list[float] = []

    def score(
        self, completions: list[Any], completion_ids: list[list[int]], **rest: Any
    ) -> list[float]:
        """The reward function, as TRL calls it: once a step, with all that was generated."""
        scores = [reward(_text(completion)) for completion in completions]
        self.tokens.append(sum(map(len, completion_ids)))
        self.completions.append(len(completions))
        self.rewards.append(sum(scores) / len(scores))
        return scores

    def spans(self) -> list[tuple[float, float]]:
        return list(zip(self.ends, self.ends[1:], strict=False))


def _text(completion: Any) -> str:
    """Of a chat it is a message."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def _clock(steps: _Steps) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            steps.ends.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            steps.ends.append(time.perf_counter())

    return Clock()


def load(**settings: Any) -> Trl:
    return Trl(**settings)
