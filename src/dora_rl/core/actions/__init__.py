"""What the core does to its state and asks for; `settle` is the loop, on one page."""
