"""A version's weights on disk: safetensors with a manifest, published by one rename.

`store` writes, lists and deletes versions; `loading` is what an engine calls; `manifest` can be
read without torch. Imports the core's types and errors, nothing else of the project.
"""
