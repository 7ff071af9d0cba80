"""The core in virtual time: a world that performs its commands, at a cost that a model gives."""
