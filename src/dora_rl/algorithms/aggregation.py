"""From a loss a token to one number: weights that make it a plain weighted sum.

Computed once over a whole mini-batch. A micro-batch takes its slice of them, so accumulated
gradients are the same however the mini-batch is split.
"""

import torch
from torch import Tensor

from dora_rl.algorithms.settings import Aggregation
from dora_rl.algorithms.shapes import check_same, check_sequences, sequence_sum


def weights(mask_T: Tensor, sequence_T: Tensor, mode: Aggregation, *, max_tokens: int) -> Tensor:
    """`weights_T` with loss = sum(weights_T * loss_T); 0 where the mask is.

    - `token`: 1 / tokens; every token counts alike (DAPO, arXiv 2503.14476).
    - `sequence`: 1 / (sequences · its tokens); every sequence counts alike (GRPO, arXiv
      2402.03300).
    - `constant`: 1 / (sequences · max_tokens); a token counts the same in every batch
      (Dr. GRPO, arXiv 2503.20783).

    Sequences that are wholly masked out do count as sequences: how much one weighs does not depend
    on how many others were left out.
    """
    check_same(mask_T=mask_T, sequence_T=sequence_T)
    check_sequences(sequence_T)
    trained_T = (mask_T != 0).to(torch.float32)
    num_sequences = max(1, int(torch.unique_consecutive(sequence_T).numel()))
    match mode:
        case "token":
            return trained_T / trained_T.sum().clamp(min=1)
        case "sequence":
            count_N = sequence_sum(trained_T, sequence_T).clamp(min=1)
            return trained_T / (num_sequences * count_N)[sequence_T]
        case "constant":
            return trained_T * (1 / (num_sequences * max_tokens))
