"""The rules, as pure functions with their proofs: admission, batching, partitioning, lending."""
