"""Versions on their way from the trainer to the engines; what they are is in `dora_rl.weights`."""
