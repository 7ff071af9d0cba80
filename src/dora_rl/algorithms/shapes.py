"""Flat tensors: the checks that come first, and the sums over sequences that everyone needs."""

from torch import Tensor, bfloat16, float16, int64, zeros

from dora_rl.core.protocol.errors import DoraError


class ShapeError(DoraError, ValueError):
    """A tensor does not fit the others: a bug in the caller."""


def check_same(**tensors: Tensor | None) -> None:
    """Every tensor has one dimension and the length of the first; None stands for absent."""
    present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first, like = present[0]
    for name, tensor in present:
        if tensor.dim() != 1 or tensor.shape != like.shape:
            raise ShapeError(
                f"{name} must be flat and as long as {first} ({like.numel()}): "
                f"`{tuple(tensor.shape)}`."
            )


def check_sequences(sequence_T: Tensor, num_sequences: int | None = None) -> None:
    """Rows from 0 up, never falling, and below `num_sequences` where that is known."""
    if sequence_T.dim() != 1 or sequence_T.dtype != int64:
        raise ShapeError(
            f"sequence_T must be flat int64: `{sequence_T.dtype}` of `{tuple(sequence_T.shape)}`."
        )
    if not sequence_T.numel():
        return
    if bool((sequence_T[1:] < sequence_T[:-1]).any()) or int(sequence_T[0]) < 0:
        raise ShapeError("sequence_T must rise from 0: keep the tokens of a sequence together.")
    if num_sequences is not None and int(sequence_T[-1]) >= num_sequences:
        raise ShapeError(
            f"sequence_T names row `{int(sequence_T[-1])}` of {num_sequences} sequences."
        )


def check_precise(**tensors: Tensor | None) -> None:
    """Refuse half precision: a difference of two such log-probabilities is mostly rounding."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype in (float16, bfloat16):
            raise ShapeError(
                f"{name} must be float32 or float64: `{tensor.dtype}`. "
                "Take the log-softmax in float32."
            )


def sequence_sum(values_T: Tensor, sequence_T: Tensor, num_sequences: int | None = None) -> Tensor:
    """The sum of each sequence's entries, `_N`; 0 for a sequence without any."""
    if num_sequences is None:
        num_sequences = int(sequence_T[-1]) + 1 if sequence_T.numel() else 0
    sums_N = zeros(num_sequences, dtype=values_T.dtype, device=values_T.device)
    return sums_N.index_add(0, sequence_T, values_T)


def sequence_mean(values_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """The mean over each sequence's masked-in tokens, `_N`; 0 for a sequence without any."""
    mask_T = mask_T.to(values_T.dtype)
    count_N = sequence_sum(mask_T, sequence_T)
    return sequence_sum(values_T * mask_T, sequence_T) / count_N.clamp(min=1)


def masked_mean(values_T: Tensor, mask_T: Tensor) -> Tensor:
    mask_T = mask_T.to(values_T.dtype)
    return (values_T * mask_T).sum() / mask_T.sum().clamp(min=1)
