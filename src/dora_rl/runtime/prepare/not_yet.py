"""What newcomers look for and this version does not have, with what there is instead."""

import re

_GPU = "A GPU is set by train.device and, with rollout.engine=vllm, by rollout.device."
_ENGINES = "Other engines are not supported yet: rollout.engine is `embedded` or `vllm`."
_LORA = "LoRA is set by model.lora, such as model.lora.rank = 16; nothing is quantised."
_LOGGERS = "Loggers are not supported yet: metrics.jsonl of the run has every step."
_CLUSTER = "Other clusters than Ray's are not supported yet: a run on Ray has runtime.kind=ray."

NOT_YET = {
    **dict.fromkeys(("gpu", "gpus", "cuda", "rocm", "mps", "devices"), _GPU),
    **dict.fromkeys(("sglang", "tgi"), _ENGINES),
    **dict.fromkeys(("qlora", "peft", "adapter"), _LORA),
    **dict.fromkeys(("wandb", "tensorboard", "mlflow", "logger", "loggers"), _LOGGERS),
    **dict.fromkeys(("slurm", "kubernetes", "nodes", "deepspeed"), _CLUSTER),
}


def not_yet(*words: object) -> str | None:
    """A sentence on the first of these words that names something that is not there."""
    for word in words:
        for part in re.findall(r"[a-z]+", str(word).lower()):
            if part in NOT_YET:
                return NOT_YET[part]
    return None
